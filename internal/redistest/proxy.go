package redistest

import (
	"context"
	"math"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// A Proxy forwards between clients and a server, and sees every command and its reply. Rules make
// single commands fail; the other methods disturb whole connections. A client that loses its
// connection never undoes forwarded commands: the server executes them before it sees the end of
// the connection.
//
// Replies are matched to commands by their order. A subscription is answered by any number of
// messages: on subscribing commands, and with RESP2 on all later commands of the connection, rules
// about replies do not fire.
type Proxy struct {
	Addr string

	t        testing.TB
	target   atomic.Pointer[string]
	dial     func() (net.Conn, error) // to the target, until stop
	stop     context.CancelFunc       // closes done
	done     <-chan struct{}
	commands atomic.Int64
	delay    atomic.Int64
	running  sync.WaitGroup

	swallowed atomic.Int64

	mu        sync.Mutex
	listener  net.Listener       // protected by mu: nil while refusing
	links     map[*link]struct{} // protected by mu
	rules     []*Rule            // protected by mu
	blackHole bool               // protected by mu
	closed    bool               // protected by mu
}

// NewProxy starts a proxy to the server at target. It ends when the test does.
func NewProxy(t testing.TB, target string) *Proxy {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	p := &Proxy{t: t, stop: stop, done: ctx.Done(), links: make(map[*link]struct{})}
	p.Redirect(target)
	p.dial = func() (net.Conn, error) { return new(net.Dialer).DialContext(ctx, "tcp", *p.target.Load()) }
	var err error
	if !poll(awaitLimit, func() bool {
		p.Addr = loopback(freePort())
		err = p.listen()
		return err == nil
	}) {
		stop()
		t.Fatal(err)
	}
	t.Cleanup(p.close)
	return p
}

// Client returns a client that connects through the proxy, with the options of Server.Client.
func (p *Proxy) Client(t testing.TB, mutate ...func(*redis.Options)) *redis.Client {
	return newClient(t, p.Addr, mutate)
}

// On applies action to every later command that match accepts; cmd is the command and its
// arguments. The first matching rule is applied.
func (p *Proxy) On(match func(cmd []string) bool, action Action) *Rule {
	rule := &Rule{
		match: match, action: action, left: math.MaxInt,
		hit: make(chan struct{}), release: make(chan struct{}),
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rules = append(p.rules, rule)
	return rule
}

// Commands returns how many commands the clients have sent, HELLO included.
func (p *Proxy) Commands() int { return int(p.commands.Load()) }

// Swallowed returns how many commands were lost in a black hole, or on a connection that a rule made dead.
func (p *Proxy) Swallowed() int { return int(p.swallowed.Load()) }

// Delay delays every reply by d.
func (p *Proxy) Delay(d time.Duration) { p.delay.Store(int64(d)) }

// Redirect connects new connections to the server at target, like a DNS name that has changed its
// address. Existing connections stay.
func (p *Proxy) Redirect(target string) { p.target.Store(&target) }

// BlackHole makes the network swallow everything: new connections are accepted, but nothing is
// forwarded or answered, on new and existing connections. These connections stay dead after
// BlackHole(false).
func (p *Proxy) BlackHole(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.blackHole = on
	for c := range p.links {
		if on {
			c.kill()
		}
	}
}

// Cut closes all connections to clients and returns their number.
func (p *Proxy) Cut() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.links {
		_ = c.client.Close()
	}
	return len(p.links)
}

// Refuse closes the listener, so that new connections are refused, or opens it again on the same
// port. Existing connections stay.
func (p *Proxy) Refuse(on bool) {
	p.t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case on && p.listener != nil:
		_ = p.listener.Close()
		p.listener = nil
	case !on && p.listener == nil && !p.closed:
		var err error
		if !poll(awaitLimit, func() bool { err = p.listen(); return err == nil }) {
			p.t.Fatal(err)
		}
	}
}

func (p *Proxy) listen() error {
	l, err := net.Listen("tcp", p.Addr)
	if err != nil {
		return err
	}
	p.listener = l
	p.running.Go(func() { p.accept(l) })
	return nil
}

func (p *Proxy) close() {
	p.mu.Lock()
	p.closed = true
	p.stop()
	if p.listener != nil {
		_ = p.listener.Close()
	}
	for c := range p.links {
		c.close()
	}
	p.mu.Unlock()
	p.running.Wait()
}

func (p *Proxy) accept(l net.Listener) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		p.running.Go(func() { p.serve(conn) })
	}
}

func (p *Proxy) serve(conn net.Conn) {
	c := &link{p: p, client: conn}
	defer c.close()
	if !p.join(c) {
		return
	}
	defer p.leave(c)
	if !c.deaf.Load() && !p.connect(c) {
		return
	}
	replies := make(chan struct{})
	go func() {
		defer close(replies)
		c.replies()
	}()
	c.requests()
	<-replies
}

func (p *Proxy) join(c *link) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	p.links[c] = struct{}{}
	if p.blackHole {
		c.kill()
	}
	return true
}

func (p *Proxy) leave(c *link) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.links, c)
}

func (p *Proxy) connect(c *link) bool {
	server, err := p.dial()
	if err != nil {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	c.server = server.(*net.TCPConn)
	return !p.closed
}

// first returns the first rule that applies to a command, or nil.
func (p *Proxy) first(cmd []string) *Rule {
	p.mu.Lock()
	all := p.rules // rules are only ever appended
	p.mu.Unlock()
	for _, r := range all {
		if r.takes(cmd) {
			return r
		}
	}
	return nil
}

// hold waits until the rule is released or the test ends.
func (p *Proxy) hold(r *Rule) {
	select {
	case <-r.release:
		return
	default:
	}
	r.fire()
	select {
	case <-r.release:
	case <-p.done:
	}
}

// sleep sleeps for d, or until the test ends.
func (p *Proxy) sleep(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-p.done:
	}
}

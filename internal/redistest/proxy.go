package redistest

import (
	"bufio"
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// Proxy stands between clients and a server and sees every command and its
// reply. Rules make single commands fail; the other methods disturb whole
// connections. Clients that lose their connection never undo what was forwarded:
// the server executes it before it sees the end of the connection.
//
// Replies are matched to commands by their order. A subscription is answered by
// any number of messages: on such commands, and on RESP2 on all that follow on
// the connection, rules about replies do not fire.
type Proxy struct {
	Addr string

	t        testing.TB
	target   atomic.Pointer[string]
	dial     func() (net.Conn, error) // to the target, until stop
	stop     context.CancelFunc       // closes done
	done     <-chan struct{}
	commands atomic.Int64
	delay    atomic.Int64
	slice    atomic.Int64
	pause    atomic.Int64
	running  sync.WaitGroup

	delayed, sliced, swallowed atomic.Int64

	mu        sync.Mutex
	listener  net.Listener       // protected by mu: nil while refusing
	links     map[*link]struct{} // protected by mu
	rules     []*Rule            // protected by mu
	blackHole bool               // protected by mu
	closed    bool               // protected by mu
}

// NewProxy starts a proxy to the server at target. It ends with the test.
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

// Client returns a client that goes through the proxy, on the terms of
// Server.Client.
func (p *Proxy) Client(t testing.TB, mutate ...func(*redis.Options)) *redis.Client {
	return newClient(t, p.Addr, mutate)
}

// On applies action to every command from now on that match accepts; cmd is the
// command and its arguments. The first rule that takes a command decides.
func (p *Proxy) On(match func(cmd []string) bool, action Action) *Rule {
	rule := newRule(match, action)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rules = append(p.rules, rule)
	return rule
}

// Commands returns how many commands the clients have sent, HELLO included.
func (p *Proxy) Commands() int { return int(p.commands.Load()) }

// Counts say how often the faults that are no rules have come about.
type Counts struct {
	Delayed   int // replies, by Delay
	Sliced    int // replies, by Trickle
	Swallowed int // commands, by a black hole or after a rule had made their connection dead
}

// Counts returns the counts since the start. Nobody can count what Refuse does
// but the clients.
func (p *Proxy) Counts() Counts {
	return Counts{int(p.delayed.Load()), int(p.sliced.Load()), int(p.swallowed.Load())}
}

// Delay lets every reply arrive later by d.
func (p *Proxy) Delay(d time.Duration) { p.delay.Store(int64(d)) }

// Trickle lets every reply arrive n bytes at a time, with a pause in between. With
// n = 0 replies arrive whole again.
func (p *Proxy) Trickle(n int, pause time.Duration) {
	p.pause.Store(int64(pause))
	p.slice.Store(int64(n))
}

// Redirect makes new connections lead to the server at target, as a name does that
// was given another address. It leaves the connections that exist.
func (p *Proxy) Redirect(target string) { p.target.Store(&target) }

// BlackHole makes the network swallow everything: new connections are accepted
// and nothing is forwarded or answered, on them or on those that exist. These
// connections stay dead when the hole is closed again.
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

// Cut closes all connections to clients and returns how many there were.
func (p *Proxy) Cut() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.links {
		_ = c.client.Close()
	}
	return len(p.links)
}

// Refuse closes the listener, so that new connections are refused, or opens it
// again on the same port. It leaves the connections that exist.
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
	if !p.add(c) {
		return
	}
	defer p.remove(c)
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

func (p *Proxy) add(c *link) bool {
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

func (p *Proxy) remove(c *link) {
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

// rule returns the rule that takes cmd, or nil.
func (p *Proxy) rule(cmd []string) *Rule {
	p.mu.Lock()
	rules := p.rules // only ever appended to
	p.mu.Unlock()
	for _, r := range rules {
		if r.takes(cmd) {
			return r
		}
	}
	return nil
}

// hold waits for the release of the rule, or the end of the test.
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

// link is one client's connection and its counterpart to the server. Each
// direction has a goroutine, which reads on even when nothing is to be passed on:
// a peer must not block in a write, and a connection that is closed with unread
// data is reset, which may undo what was sent before.
type link struct {
	p      *Proxy
	client net.Conn
	server *net.TCPConn // nil in a black hole; protected by p.mu while connecting
	deaf   atomic.Bool  // forwards nothing more
	mute   atomic.Bool  // answers nothing more

	subscribed atomic.Bool // replies no longer follow the commands

	mu      sync.Mutex
	pending []*Rule // protected by mu: for each reply to come, its rule or nil
}

func (c *link) kill() {
	c.deaf.Store(true)
	c.mute.Store(true)
}

func (c *link) close() {
	_ = c.client.Close()
	if c.server != nil {
		_ = c.server.Close()
	}
}

// requests forwards commands until the client leaves. Only the writing half of
// the server's connection is closed then: the server executes what it got, and
// ends the connection itself.
func (c *link) requests() {
	if c.server != nil {
		defer c.server.CloseWrite()
	}
	r := bufio.NewReader(c.client)
	resp3 := false
	for {
		f, err := readFrame(r)
		if err != nil {
			c.report(err)
			return
		}
		c.p.commands.Add(1)
		if c.deaf.Load() {
			c.p.swallowed.Add(1)
			continue
		}
		if len(f.bulks) == 0 {
			continue
		}
		rule := c.p.rule(f.bulks)
		if rule != nil && !c.request(rule) {
			continue
		}
		switch name := strings.ToUpper(f.bulks[0]); {
		case name == "HELLO" && len(f.bulks) > 1:
			resp3 = f.bulks[1] == "3"
			c.expect(rule)
		case strings.HasSuffix(name, "SUBSCRIBE"):
			c.subscribed.Store(!resp3)
		default:
			c.expect(rule)
		}
		if rule != nil && rule.action == Twice {
			c.expect(nil)
			f.raw = append(f.raw, f.raw...)
		}
		if _, err := c.server.Write(f.raw); err != nil {
			c.deaf.Store(true) // the server is gone; replies() tells the client
		}
	}
}

// request applies what the rule says about the request itself and reports whether
// to forward it.
func (c *link) request(rule *Rule) bool {
	switch rule.action {
	case Pass:
		rule.fire()
	case HoldRequest:
		c.p.hold(rule)
		return !c.deaf.Load() // a black hole may have opened meanwhile
	case DropRequest:
		c.expect(rule) // replies to earlier commands still arrive
		c.deaf.Store(true)
		rule.fire()
		return false
	case CloseBefore:
		c.deaf.Store(true)
		rule.fire()
		_ = c.client.Close()
		return false
	}
	return true
}

func (c *link) expect(rule *Rule) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pending = append(c.pending, rule)
}

// answered takes the rule of the next reply off the queue. A frame that answers
// nothing has none.
func (c *link) answered(f frame) *Rule {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.pending) == 0 {
		return nil
	}
	if c.pending[0] != nil && c.pending[0].action == DropRequest {
		c.mute.Store(true) // the silence has reached the client's side
		return nil
	}
	if f.isPush() || c.subscribed.Load() {
		return nil
	}
	rule := c.pending[0]
	c.pending = c.pending[1:]
	return rule
}

// replies passes on what the server says until it ends the connection. A client
// that waits on a mute connection does not learn of that end either.
func (c *link) replies() {
	if c.server == nil {
		return
	}
	r := bufio.NewReader(c.server)
	var arrived time.Time
	for {
		fresh := r.Buffered() == 0
		f, err := readFrame(r)
		if err != nil {
			c.report(err)
			break
		}
		if fresh {
			arrived = time.Now()
		}
		rule := c.answered(f)
		if c.mute.Load() || rule != nil && !c.reply(rule, f) {
			continue
		}
		// Counted from when it came in, so that the replies of a pipeline do not add up their delays.
		if late := time.Until(arrived.Add(time.Duration(c.p.delay.Load()))); late > 0 {
			c.p.delayed.Add(1)
			c.p.sleep(late)
		}
		if c.mute.Load() {
			continue
		}
		if err := c.write(f.raw); err != nil {
			c.mute.Store(true) // the client has left
		}
	}
	if !c.mute.Load() {
		_ = c.client.Close()
	}
}

// reply applies what the rule says about the reply and reports whether to pass
// it on.
func (c *link) reply(rule *Rule, f frame) bool {
	switch rule.action {
	case HoldReply:
		c.p.hold(rule)
	case MuteReply:
		c.mute.Store(true)
		rule.fire()
		return false
	case DropReply:
		c.kill()
		rule.fire()
		_ = c.client.Close()
		return false
	case Twice:
		rule.fire()
		return false
	case ResetReply:
		c.kill()
		rule.fire()
		_, _ = c.client.Write(f.raw[:len(f.raw)/2])
		_ = c.client.(*net.TCPConn).SetLinger(0)
		_ = c.client.Close()
		return false
	}
	return true
}

// write passes a reply on, in slices if the proxy is to.
func (c *link) write(raw []byte) error {
	if n := int(c.p.slice.Load()); n > 0 && len(raw) > n {
		c.p.sliced.Add(1)
		for ; len(raw) > n; raw = raw[n:] {
			if _, err := c.client.Write(raw[:n]); err != nil {
				return err
			}
			c.p.sleep(time.Duration(c.p.pause.Load()))
		}
	}
	_, err := c.client.Write(raw)
	return err
}

// sleep ends early with the test.
func (p *Proxy) sleep(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-p.done:
	}
}

// report fails the test on traffic that the proxy cannot read, so that no fault is
// missed for it. The ends of connections are no news.
func (c *link) report(err error) {
	if errors.Is(err, errNotRESP) {
		c.p.t.Error(err)
		c.close()
	}
}

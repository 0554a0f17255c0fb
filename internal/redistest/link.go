package redistest

import (
	"bufio"
	"errors"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

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
		defer func() { _ = c.server.CloseWrite() }()
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

// report fails the test on traffic that the proxy cannot read, so that no fault is
// missed for it. The ends of connections are no news.
func (c *link) report(err error) {
	if errors.Is(err, errNotRESP) {
		c.p.t.Error(err)
		c.close()
	}
}

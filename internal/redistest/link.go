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

// A link is one client's connection and the connection to the server that belongs to it. Each
// direction has a goroutine, which keeps reading even when nothing may be forwarded: a peer must
// not block in a write, and closing a connection with unread data resets it, which may destroy what
// was sent before.
type link struct {
	p      *Proxy
	client net.Conn
	server *net.TCPConn // nil in a black hole; protected by p.mu while connecting
	deaf   atomic.Bool  // forwards no more requests
	mute   atomic.Bool  // forwards no more replies

	subscribed atomic.Bool // from now on replies do not follow the commands

	mu      sync.Mutex
	pending []*Rule // protected by mu: the rule, or nil, of each expected reply
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

// requests forwards commands until the client closes its connection. Then it closes only the
// writing half of the server's connection: the server executes the commands it received, and closes
// the connection itself.
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
		rule := c.p.first(f.bulks)
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
		if _, err := c.server.Write(f.raw); err != nil {
			c.deaf.Store(true) // the server has closed; replies() closes the client
		}
	}
}

// request applies what the rule does to the request, and reports whether to forward it.
func (c *link) request(rule *Rule) bool {
	switch rule.action {
	case Pass:
		rule.fire()
	case HoldRequest:
		c.p.hold(rule)
		return !c.deaf.Load() // a black hole may have opened since
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

// answered removes the rule of the next reply from the queue. A frame that is not a reply has none.
func (c *link) answered(f frame) *Rule {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.pending) == 0 {
		return nil
	}
	if c.pending[0] != nil && c.pending[0].action == DropRequest {
		c.mute.Store(true) // the replies before the dropped request have been forwarded
		return nil
	}
	if f.raw[0] == '>' || c.subscribed.Load() { // the server has sent it without a request
		return nil
	}
	rule := c.pending[0]
	c.pending = c.pending[1:]
	return rule
}

// replies forwards the server's replies until it closes the connection. A client on a mute
// connection does not notice that the server has closed it.
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
		// Counted from the arrival, so that the delays of the replies of a pipeline do not add up.
		if late := time.Until(arrived.Add(time.Duration(c.p.delay.Load()))); late > 0 {
			c.p.sleep(late)
		}
		if c.mute.Load() {
			continue
		}
		if _, err := c.client.Write(f.raw); err != nil {
			c.mute.Store(true) // the client has closed
		}
	}
	if !c.mute.Load() {
		_ = c.client.Close()
	}
}

// reply applies what the rule does to the reply, and reports whether to forward it.
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

// report fails the test if the proxy cannot parse the traffic, since it could miss a fault. The end
// of a connection is not reported.
func (c *link) report(err error) {
	if errors.Is(err, errNotRESP) {
		c.p.t.Error(err)
		c.close()
	}
}

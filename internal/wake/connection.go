package wake

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	// sweepEvery is the time between two sweeps for channels without a Subscription. They stay
	// subscribed until then: the next wait for a hot key sends no command to subscribe.
	sweepEvery = time.Second

	// idleLife is how long the connection stays open without a channel.
	idleLife = 10 * time.Second

	// firstPause is the time between the loss of a connection and the next one. It doubles up to
	// longestPause until a subscription succeeds.
	firstPause   = 100 * time.Millisecond
	longestPause = 10 * time.Second

	// mostSweeps is how many sweeps may find a command unanswered until the connection is closed: the
	// network may swallow what is sent on it.
	mostSweeps = 5

	// perCommand is how many channels one command subscribes at most.
	perCommand = 1000
)

// A connection is the connection of a Listener. When it breaks, the Listener connects again. One
// goroutine writes, another one reads.
//
// A connection for wake-ups has no heartbeat. The network may swallow what is sent on it, while
// commands get through on others. A waiter that was subscribed before then polls when the lock as
// last seen ends, or after listeningPause and a quarter of it: that bounds how late it is. It finds
// the value without a message, and the connection is closed, as above. A new channel on that
// connection gets no answer. Its waiter polls as without wake-ups, and after five seconds the
// connection is replaced. See TestWake_Lost and TestListener_Unanswered.
type connection struct {
	*Listener
	ctx     context.Context
	close   context.CancelFunc
	changed chan struct{} // has an element if there may be something to write

	// Guarded by Listener.mu.
	channels   map[string]*channel
	wanted     []string  // channels to subscribe
	unanswered []request // commands, in the order of their answers
	heard      bool      // a subscription has succeeded since it was connected
	lastUsed   time.Time // when a sweep last found a channel
}

// A request is a command to subscribe or unsubscribe. Its answer has a part for each channel, or is
// one error.
type request struct {
	kind     string
	channels []string
	sweeps   int // that have found it unanswered
}

func newConnection(l *Listener) *connection {
	ctx, stop := context.WithCancel(context.Background())
	return &connection{Listener: l, ctx: ctx, close: stop, changed: make(chan struct{}, 1), channels: make(map[string]*channel), lastUsed: time.Now()}
}

// want makes the writer subscribe a channel. The caller holds mu.
func (n *connection) want(name string) {
	n.channels[name].state = wanted
	n.wanted = append(n.wanted, name)
	select {
	case n.changed <- struct{}{}:
	default:
	}
}

// run connects, again and again, until the connection is closed.
func (n *connection) run() {
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		n.connect()
		if n.ctx.Err() != nil {
			return
		}
		if n.lost() {
			pause = firstPause
		}
		select {
		case <-n.ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// connect connects, and writes until the connection breaks or is closed.
func (n *connection) connect() {
	ctx, cancel := context.WithCancel(n.ctx)
	pubsub := subscriber(ctx, n.rdb)
	if pubsub == nil {
		n.disable()
		cancel()
		return
	}
	var reader sync.WaitGroup
	defer reader.Wait()
	defer pubsub.Close()
	defer cancel() // before Close, which waits while the client dials
	sweep := time.NewTicker(sweepEvery)
	defer sweep.Stop()
	for reading := false; ; {
		var requests []request
		select {
		case <-ctx.Done():
			return
		case <-n.changed:
			requests = n.subscribe()
		case <-sweep.C:
			if n.frozen() {
				return
			}
			requests = n.sweep()
		}
		for _, r := range requests {
			if r.send(ctx, pubsub) != nil {
				return
			}
			if !reading { // not earlier: the first command connects to the right node
				reading = true
				reader.Go(func() {
					defer cancel()
					for n.receive(ctx, pubsub) {
					}
				})
			}
		}
	}
}

// subscriber returns nil if the user's client cannot subscribe.
func subscriber(ctx context.Context, rdb redis.UniversalClient) (p *redis.PubSub) {
	defer func() { _ = recover() }() // a wrapper may have no such method behind it
	return rdb.SSubscribe(ctx)
}

// subscribe returns the commands that subscribe the wanted channels.
func (n *connection) subscribe() []request {
	n.mu.Lock()
	defer n.mu.Unlock()
	var names []string
	for _, name := range n.wanted {
		if c := n.channels[name]; c != nil && c.state == wanted {
			c.state = requested
			names = append(names, name)
		}
	}
	n.wanted = nil
	return n.request("subscribe", names)
}

// sweep forgets channels that have had no Subscription since the last sweep, and returns the commands
// that unsubscribe them. It closes the connection when there has been no channel for idleLife.
func (n *connection) sweep() []request {
	n.mu.Lock()
	defer n.mu.Unlock()
	var names []string
	for name, c := range n.channels {
		switch {
		case len(c.subs) > 0:
			c.unused = false
		case !c.unused:
			c.unused = true
		default:
			delete(n.channels, name)
			if c.state == subscribed || c.state == requested {
				names = append(names, name)
			}
		}
	}
	if len(n.channels) > 0 {
		n.lastUsed = time.Now()
	} else if time.Since(n.lastUsed) >= idleLife && n.conn == n {
		n.disconnect()
	}
	return n.request("unsubscribe", names)
}

// request returns the commands for channels, and expects their answers. The caller holds mu.
func (n *connection) request(kind string, names []string) (requests []request) {
	if !n.plain {
		kind = "s" + kind // of sharded channels
	}
	size := perCommand
	if n.oneByOne {
		size = 1
	}
	for some := range slices.Chunk(names, size) {
		requests = append(requests, request{kind: kind, channels: some})
	}
	n.unanswered = append(n.unanswered, requests...)
	return requests
}

// frozen reports whether the server has left a command unanswered for too long. A sweep calls it.
func (n *connection) frozen() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.unanswered) == 0 {
		return false
	}
	n.unanswered[0].sweeps++
	return n.unanswered[0].sweeps > mostSweeps
}

func (r request) send(ctx context.Context, p *redis.PubSub) error {
	switch r.kind {
	case "ssubscribe":
		return p.SSubscribe(ctx, r.channels...)
	case "subscribe":
		return p.Subscribe(ctx, r.channels...)
	case "sunsubscribe":
		return p.SUnsubscribe(ctx, r.channels...)
	}
	return p.Unsubscribe(ctx, r.channels...)
}

// receive reads one message. It returns false when the connection must be closed.
func (n *connection) receive(ctx context.Context, p *redis.PubSub) bool {
	message, err := p.Receive(ctx)
	var refusal redis.Error
	switch m := message.(type) {
	case *redis.Message:
		n.deliver(m)
		return true
	case *redis.Subscription:
		return n.answered(m.Kind, m.Channel)
	case nil:
		return errors.As(err, &refusal) && n.refused(refusal)
	}
	return true
}

func (n *connection) deliver(m *redis.Message) {
	n.mu.Lock()
	var affected subscriptions
	if c := n.channels[m.Channel]; c != nil {
		c.last = time.Now()
		affected = affected.with(c)
	}
	n.mu.Unlock()
	affected.notify(m.Payload, true)
}

// answered notes the server's answer for one channel. An answer without a request ends a
// subscription, when a slot moves to another node; otherwise the client has connected again, and
// messages may have been lost.
func (n *connection) answered(kind, name string) (goOn bool) {
	n.mu.Lock()
	c := n.channels[name]
	asked := len(n.unanswered) > 0 && n.unanswered[0].kind == kind && n.unanswered[0].channels[0] == name
	ends := strings.HasSuffix(kind, "unsubscribe")
	var affected subscriptions
	switch {
	case asked:
		if r := &n.unanswered[0]; len(r.channels) > 1 {
			r.channels = r.channels[1:]
		} else {
			n.unanswered = n.unanswered[1:]
		}
		if c != nil && !ends && c.state == requested {
			c.state, c.since = subscribed, time.Now()
			if !n.heard && len(c.subs) == 0 {
				go n.closeWithClient()
			}
			n.heard = true
			affected = affected.with(c)
		}
	case ends && c != nil:
		affected = affected.with(c)
		c.state = refused
	}
	n.mu.Unlock()
	affected.notify("", false)
	return asked || ends
}

// closeWithClient closes the connection if the user's client is closed. A client that is closed while
// it dials leaves the new connection open. A waiter would notice at its next command.
func (n *connection) closeWithClient() {
	if errors.Is(n.rdb.Ping(n.ctx).Err(), redis.ErrClosed) {
		n.Close()
	}
}

// refused notes that the server refuses the first unanswered command.
func (n *connection) refused(why redis.Error) (goOn bool) {
	n.mu.Lock()
	if len(n.unanswered) == 0 {
		n.mu.Unlock()
		return false
	}
	r := n.unanswered[0]
	n.unanswered = n.unanswered[1:]
	unknown := strings.HasPrefix(why.Error(), "ERR unknown command") && r.kind == "ssubscribe"
	crosses := redis.HasErrorPrefix(why, "CROSSSLOT ") && len(r.channels) > 1
	n.plain, n.oneByOne = n.plain || unknown, n.oneByOne || crosses
	for _, name := range r.channels {
		switch c := n.channels[name]; {
		case c == nil || c.state != requested:
		case unknown || crosses:
			n.want(name)
		default:
			c.state = refused
		}
	}
	n.mu.Unlock()
	if !unknown && !crosses && !moves(why) {
		n.disable()
		return false
	}
	return true
}

// moves reports whether a refusal is about the slot of a channel.
func moves(why redis.Error) bool {
	for _, prefix := range []string{"MOVED ", "ASK ", "TRYAGAIN ", "CLUSTERDOWN "} {
		if redis.HasErrorPrefix(why, prefix) {
			return true
		}
	}
	return false
}

// lost notes that the connection has broken: no Subscription is complete until the channels have been
// subscribed again. Without a channel the Listener does not connect again. lost reports whether a
// subscription had succeeded.
func (n *connection) lost() (heard bool) {
	n.mu.Lock()
	heard = n.heard
	n.heard, n.unanswered, n.wanted = false, nil, nil
	var affected subscriptions
	for name, c := range n.channels {
		if len(c.subs) == 0 {
			delete(n.channels, name)
			continue
		}
		affected = affected.with(c)
		n.want(name)
	}
	if len(n.channels) == 0 && n.conn == n { // perhaps the user's client is closed
		n.disconnect()
	}
	n.mu.Unlock()
	affected.notify("", false)
	return heard
}

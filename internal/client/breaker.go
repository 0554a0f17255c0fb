package client

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/foreign"
)

// A breaker spares callers the wait for a node that does not answer. All caches and locks on one client
// share it: what one of them learns protects all. It opens after Limit failures in a row, or after one
// failure and an unanswered ping, if no answer has come for as long as a command may take. Quick failures
// alone, as from a server that is restarting, cost callers nothing. Then the caches probe the node in the
// background until it answers, so that no caller has to try. A command whose caller has left counts by its
// own outcome, whatever the caller's deadline was. Any answer closes the breaker.
//
// Caches may differ in how long they wait. The breaker is open for those that would wait for less time than
// the node has been silent: a cache that waits for longer is not told by a hasty one that a slow node is
// dead.
type breaker struct {
	outage  atomic.Pointer[outage]        // nil: closed
	opening atomic.Pointer[chan struct{}] // nil: no command has waited for it; see opens
}

// An outage is a silence of a node.
type outage struct {
	err   error         // that opened the breaker
	key   string        // of its command
	since time.Duration // when the first unanswered command was sent, since server.begun
	over  chan struct{} // closed when the node has answered

	probes atomic.Int64 // caches that probe the node
}

// Limit is how many failures in a row open a breaker.
const Limit = 5

// ErrAway is the error of a command that is not sent because the breaker is open.
var ErrAway = errors.New("redis does not answer")

// away returns the silence of a node if it has lasted for as long as a command may take.
func (c *Client) away(n *node) *outage {
	o := n.outage.Load()
	if o == nil || time.Since(n.begun)-o.since < c.least() {
		return nil
	}
	return o
}

// refusal returns an error if the breaker is open. It sends no command.
func (c *Client) refusal(n *node) error {
	o := c.away(n)
	if o == nil {
		return nil
	}
	return fmt.Errorf("%w: %w", ErrAway, o.err)
}

// opens returns a channel that is closed when the breaker opens, for a command that waits to be sent.
// If the breaker is open already, refusal says so.
func (b *breaker) opens() <-chan struct{} {
	if b.opening.Load() == nil {
		b.opening.CompareAndSwap(nil, new(make(chan struct{})))
	}
	return *b.opening.Load()
}

// Away reports whether the breaker of key's node is open, so that the node must not be asked.
func (c *Client) Away(key string) bool { return c.away(c.nodeOf(key)) != nil }

// Refusal returns the error that opened the breaker of key's node, or nil if it is closed.
func (c *Client) Refusal(key string) error { return c.refusal(c.nodeOf(key)) }

// Refused is Refusal for a command of a lock: only while a cache probes the node, since locks do not.
func (c *Client) Refused(key string) error {
	n := c.nodeOf(key)
	if o := c.away(n); o != nil && o.probes.Load() > 0 {
		return unsent{c.refusal(n)}
	}
	return nil
}

// Gone reports whether a breaker stays open because the user has closed the client.
func (c *Client) Gone() bool { return c.gone.Load() }

// AnyAway reports whether the breaker of any node is open.
func (c *Client) AnyAway() bool { return c.nodes.open.Load() > 0 }

// Silent reports whether the node of key has not answered for as long as a command may take. Even then, one
// unanswered command does not show an outage.
func (c *Client) Silent(key string) bool {
	s := c.nodeOf(key).server
	return s.silentSince(s.begun) >= c.least()
}

// yieldToReaders is called before a command counts as unanswered. With thousands of runnable
// goroutines, the answer may have come to a goroutine that has not run yet, since timers overtake
// it. The first Gosched lets the scheduler poll the network, the second lets the readers run.
func yieldToReaders() {
	runtime.Gosched()
	runtime.Gosched()
}

// noteFailure counts a command that was not answered, and opens the breaker when it has to. It
// returns false if another command has opened it.
func (c *Client) noteFailure(n *node, call call, err error) bool {
	if c.stalled(time.Since(call.sent)) {
		return true
	}
	failures, since := n.noteFailure(call.sent)
	if failures < Limit && !n.mute() || time.Since(n.begun)-since < c.least() {
		return true
	}
	return c.open(n, &outage{err: err, key: call.key, since: since, over: make(chan struct{})})
}

// open opens the breaker for all caches and locks. It returns false if it is open already.
func (c *Client) open(n *node, o *outage) bool {
	if !n.outage.CompareAndSwap(nil, o) {
		return c.away(n) == nil
	}
	if opening := n.opening.Load(); opening != nil {
		close(*opening)
	}
	for _, u := range n.watchers() {
		if u != n {
			u.client.watch(u, o, false)
		}
	}
	if n.client != nil {
		c.change(+1, o.err)
		c.watch(n, o, true)
	}
	return true
}

// watch has a cache probe a node until its silence is over. told: this cache has been told of it.
func (c *Client) watch(n *node, o *outage, told bool) {
	if n.watched.Swap(o) == o {
		return
	}
	c.background(func(closing <-chan struct{}) {
		o.probes.Add(1)
		defer o.probes.Add(-1)
		c.recover(n, o, told, closing)
	})
}

// catchUp is watch for a node that may have become silent before this Client knew it.
func (c *Client) catchUp(n *node) {
	if o := n.outage.Load(); o != nil && n.client == c {
		c.watch(n, o, false)
	}
}

// close closes the breaker, since the node has answered.
func (s *server) close(o *outage) {
	if s.outage.CompareAndSwap(o, nil) {
		s.opening.Store(new(make(chan struct{})))
		close(o.over)
	}
}

// stalled reports whether something that should end after c.Timeout ended so much later that this
// process itself must have been stalled. The answer may have come in time, so its absence proves
// nothing.
func (c *Client) stalled(took time.Duration) bool { return took > c.Timeout+c.Timeout/10 }

// recover probes the node until it answers in any way, which closes its breaker. It also closes it when
// the Cluster has another node in place of this one. It gives up when its owner closes, or when the user
// has closed the client.
func (c *Client) recover(n *node, o *outage, told bool, closing <-chan struct{}) {
	if !told {
		wait := time.NewTimer(c.least() - (time.Since(n.begun) - o.since)) // a hasty cache has opened it
		defer wait.Stop()
		select {
		case <-closing:
			return
		case <-o.over:
			return
		case <-wait.C:
		}
		c.change(+1, o.err)
	}
	tick := time.NewTicker(c.Timeout)
	defer tick.Stop()
	for {
		select {
		case <-closing:
		case <-o.over:
		case <-tick.C:
		}
		select { // a probe may take a whole tick, so that several channels are ready
		case <-closing:
			return
		case <-o.over:
			c.change(-1, nil)
			return
		default:
		}
		if c.nodeOf(o.key) != n {
			n.close(o)
		} else if err := c.reach(context.Background(), n, time.Now()); errors.Is(err, redis.ErrClosed) {
			c.gone.Store(true)
			return
		}
	}
}

// changes queues reports that a first breaker opened, or that the last one closed. Reports are made
// one at a time and in order, by the goroutine that finds none in progress: the user's function may
// take its time, and may cause another change.
type changes struct {
	mu        sync.Mutex
	pending   []error // why the first one opened; nil: the last one closed; protected by mu
	reporting bool    // protected by mu
}

func (c *Client) change(by int64, why error) {
	q := &c.changes
	q.mu.Lock()
	defer q.mu.Unlock()
	if open := c.nodes.open.Add(by); open == 0 || by > 0 && open == 1 {
		q.pending = append(q.pending, why)
	}
	if q.reporting {
		return
	}
	q.reporting = true
	defer func() { q.reporting = false }()
	for len(q.pending) > 0 {
		why := q.pending[0]
		q.pending = q.pending[1:]
		func() {
			q.mu.Unlock()
			defer q.mu.Lock()
			c.report(why)
		}()
	}
}

// report calls the user's function. If it panics, perhaps in a background goroutine, the breaker
// goes on, and the panic is reported as an error.
func (c *Client) report(why error) {
	defer func() {
		if p := recover(); p != nil {
			c.failed(context.Background(), "ping", fmt.Errorf("reporting that the breaker is open (%t) panicked: %s", why != nil, foreign.Text(p)))
		}
	}()
	c.changed(why)
}

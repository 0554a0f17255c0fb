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

// A breaker spares callers the wait for a node that does not answer. It opens after Limit failures
// in a row, if no answer has come for as long as a command may take. Quick failures alone, as from
// a server that is restarting, cost callers nothing. Then the client probes the node in the
// background until it answers, so that no caller has to try. A command whose caller has left counts
// by its own outcome, whatever the caller's deadline was.
type breaker struct {
	outage  atomic.Pointer[outage]        // nil: closed
	opening atomic.Pointer[chan struct{}] // nil: no command has waited for it; see opens
}

// An outage is the reason why a breaker has opened.
type outage struct {
	err error
	key string // of the command that opened it
}

// Limit is how many failures in a row open a breaker.
const Limit = 5

// refusal returns an error if the breaker is open. It sends no command.
func (b *breaker) refusal() error {
	o := b.outage.Load()
	if o == nil {
		return nil
	}
	return fmt.Errorf("redis does not answer: %w", o.err)
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
func (c *Client) Away(key string) bool { return c.nodeOf(key).outage.Load() != nil }

// Refusal returns the error that opened the breaker of key's node, or nil if it is closed.
func (c *Client) Refusal(key string) error { return c.nodeOf(key).refusal() }

// Gone reports whether a breaker stays open because the user has closed the client.
func (c *Client) Gone() bool { return c.gone.Load() }

// AnyAway reports whether the breaker of any node is open.
func (c *Client) AnyAway() bool { return c.nodes.open.Load() > 0 }

// Silent reports whether the node of key has not answered for the least that a command is given: see
// limit. Even then, one unanswered command does not show an outage.
func (c *Client) Silent(key string) bool {
	s := c.nodeOf(key).server
	return s.silentSince(s.begun) >= c.Timeout-c.Timeout/16
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
	failures, silent := n.noteFailure(call.sent)
	if c.background == nil || failures < Limit || silent < c.Timeout {
		return true
	}
	if !n.outage.CompareAndSwap(nil, &outage{err, call.key}) {
		return false
	}
	if opening := n.opening.Load(); opening != nil {
		close(*opening)
	}
	defer c.background(func(closing <-chan struct{}) { c.recover(n, closing) })
	c.change(+1, err)
	return true
}

// stalled reports whether something that should end after c.Timeout ended so much later that this
// process itself must have been stalled. The answer may have come in time, so its absence proves
// nothing.
func (c *Client) stalled(took time.Duration) bool { return took > c.Timeout+c.Timeout/10 }

// recover probes the node until it answers in any way, and then closes its breaker. It also closes
// it when the Cluster has another node in place of this one. It gives up when its owner closes,
// or when the user has closed the client.
func (c *Client) recover(n *node, closing <-chan struct{}) {
	tick := time.NewTicker(c.Timeout)
	defer tick.Stop()
	for {
		select {
		case <-closing:
			return
		case <-tick.C:
		}
		select {
		case <-closing: // a probe may take a whole tick, so that both channels are ready
			return
		default:
		}
		if c.nodeOf(n.outage.Load().key) == n {
			if err := c.ping(context.Background(), n); errors.Is(err, redis.ErrClosed) {
				c.gone.Store(true)
				return
			} else if Unreachable(err) {
				continue
			}
		}
		n.opening.Store(new(make(chan struct{})))
		n.outage.Store(nil)
		c.change(-1, nil)
		return
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

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
)

// A breaker spares callers the wait for a node that does not answer. It opens after Limit failures in a row if there has
// been no answer for as long as a command may take: quick failures alone, as of a server that is just being restarted,
// cost callers nothing. Then the client asks by itself, in the background, until there is an answer, so that no caller is
// spent on trying. A command whose caller has left counts by its own outcome, never by the caller's impatience.
type breaker struct {
	outage  atomic.Pointer[outage]        // nil: it is closed
	opening atomic.Pointer[chan struct{}] // is closed when it opens, for the commands that wait to be sent
}

// An outage is why a breaker has opened.
type outage struct {
	err error
	key string // of the command with which it did
}

// Limit is how many failures in a row open a breaker.
const Limit = 5

// refusal returns an error, without any asking, while the breaker is open.
func (b *breaker) refusal() error {
	o := b.outage.Load()
	if o == nil {
		return nil
	}
	return fmt.Errorf("redis does not answer: %w", o.err)
}

// Away reports whether the breaker of key's node is open: it is not to be asked.
func (c *Client) Away(key string) bool { return c.nodeOf(key).outage.Load() != nil }

// Refusal returns why the node of key is not to be asked; nil while its breaker is closed.
func (c *Client) Refusal(key string) error { return c.nodeOf(key).refusal() }

// AnyAway reports whether the breaker of any node is open.
func (c *Client) AnyAway() bool { return c.nodes.open.Load() > 0 }

// Silent reports whether the node of key has answered nothing for as long as a command may take. If it has, a command that
// was not answered is no sign of an outage.
func (c *Client) Silent(key string) bool {
	s := c.nodeOf(key).server
	return s.silentSince(s.begun) >= c.Timeout
}

// letAnswersIn is called before a command counts as not answered. With thousands of goroutines that want to run, the answer
// may have come to one that has not run yet, since timers overtake it. The first call of Gosched lets the scheduler look
// for answers, the second one lets their readers run.
func letAnswersIn() {
	runtime.Gosched()
	runtime.Gosched()
}

func (c *Client) noteFailure(n *node, call call, err error) {
	if c.heldUp(time.Since(call.sent)) {
		return
	}
	failures, silent := n.noteFailure(call.sent)
	if c.background == nil || failures < Limit || silent < c.Timeout {
		return
	}
	if n.outage.CompareAndSwap(nil, &outage{err, call.key}) {
		close(*n.opening.Load())
		defer c.background(func(closing <-chan struct{}) { c.recover(n, closing) })
		c.change(+1)
	}
}

// heldUp reports whether something that is to end after c.Timeout has ended so much later that this process must have been
// held up itself. The answer may have come in time then, and proves nothing by its absence.
func (c *Client) heldUp(took time.Duration) bool { return took > c.Timeout+c.Timeout/10 }

// recover probes until the node answers, in any way, and closes its breaker then, or when the node is not asked for that
// key any more, since the Cluster has another one in its place. It gives up when its owner closes, or when the user has
// closed the client.
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
		case <-closing: // a probe may take as long as the tick, so that both are always ready
			return
		default:
		}
		if c.nodeOf(n.outage.Load().key) == n {
			if err := c.ping(context.Background(), n); errors.Is(err, redis.ErrClosed) {
				return
			} else if Unreachable(err) {
				continue
			}
		}
		n.opening.Store(new(make(chan struct{})))
		n.outage.Store(nil)
		c.change(-1)
		return
	}
}

// changes are of the number of open breakers, and told when there is a first one, and when there is none any more. They
// are told one at a time, and in their order, by the goroutine that comes first: a function of the user may take its
// time, and cause another change.
type changes struct {
	mu      sync.Mutex
	untold  []bool // protected by mu
	telling bool   // protected by mu
}

func (c *Client) change(by int64) {
	q := &c.changes
	q.mu.Lock()
	defer q.mu.Unlock()
	if open := c.nodes.open.Add(by); open == 0 || by > 0 && open == 1 {
		q.untold = append(q.untold, open > 0)
	}
	if q.telling {
		return
	}
	q.telling = true
	defer func() { q.telling = false }()
	for len(q.untold) > 0 {
		open := q.untold[0]
		q.untold = q.untold[1:]
		func() {
			q.mu.Unlock()
			defer q.mu.Lock()
			c.tell(open)
		}()
	}
}

// tell calls a function of the user's. If that panics, perhaps in a goroutine of ours, the breaker works on, and what
// it has panicked with is told as an error.
func (c *Client) tell(open bool) {
	defer func() {
		if p := recover(); p != nil {
			c.failed(context.Background(), "ping", fmt.Errorf("telling that the breaker is open (%t) panicked: %v", open, p))
		}
	}()
	c.changed(open)
}

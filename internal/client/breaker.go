package client

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/singlefill/singlefill/internal/foreign"
	"github.com/singlefill/singlefill/internal/line"
)

// The breaker of a node is its line, as the caches and locks on one client see it: what one of them learns protects
// all. A [line.Line] decides when a server is away, and pings it until it answers, so that no caller has to try.
//
// A caller that waits when the server goes away is released. Its command goes on, and counts by its own
// outcome, like the commands of callers that have left; Close waits for them. With
// ContextTimeoutEnabled a command runs in its caller's goroutine, where nothing can interrupt it.
// So while other commands are on their way and none has been answered, it gets a goroutine, as
// without the option. A command is not repeated while the server is away, and not sent if its caller asks for
// that (Spared). See TestBreaker_OpensForThoseThatWait, TestBreaker_Opens,
// TestBreaker_FirstRequests, TestServer_SilentForAnyCall.
//
// Caches may differ in how long they wait. A cache with a short RedisTimeout does not make a patient cache believe that
// a slow server is dead. A lock pings nothing: it relies on what caches learn, and tries by itself when
// there is none. See TestLine_TooSlowForOne, TestLine_TimeoutsDiffer, TestBreaker_LockAfterTheLastCache.

// away returns the outage of a node for callers as patient as the callers of c, or nil.
func (c *Client) away(n *node) *line.Outage { return n.line.Away(c.Timeout) }

// refusal returns an error if a node is away. It sends no command.
func (c *Client) refusal(n *node) error {
	o := c.away(n)
	if o == nil {
		return nil
	}
	return fmt.Errorf("%w: %w", ErrAway, o.Err)
}

// await waits until done or end is closed, and returns why its caller leaves before: ctx has ended, or the server is
// away. A command that is not to be spared stays at a server that was away before: it is to find out whether it is
// back.
func (c *Client) await(ctx context.Context, n *node, done, end <-chan struct{}, spared bool) error {
	for {
		opened := n.line.Opened()
		if err := c.refusal(n); err != nil && !spared {
			opened = nil
		} else if err != nil && !over(done) {
			return err
		}
		spared = true
		select {
		case <-done:
			return nil
		case <-end:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		case <-opened:
		}
	}
}

// least returns how long a command is given at least: see limit.
func (c *Client) least() time.Duration { return c.Timeout - c.Timeout/16 }

// Away reports whether key's node is away, so that it must not be asked.
func (c *Client) Away(key string) bool { return c.away(c.nodeOf(key)) != nil }

// Refusal returns the error that began the outage of key's node, or nil if it is not away.
func (c *Client) Refusal(key string) error { return c.refusal(c.nodeOf(key)) }

// Silent reports whether the node of key has owed an answer for as long as a command may take. Even then, one
// unanswered command does not show an outage.
func (c *Client) Silent(key string) bool { return c.nodeOf(key).line.Silence() >= c.least() }

// Gone reports whether a node was away when the user closed the client.
func (c *Client) Gone() bool { return c.changes.gone.Load() }

// AnyAway reports whether any node is away.
func (c *Client) AnyAway() bool { return c.changes.away.Load() > 0 }

// tell reports an outage of a node, and its end.
func (c *Client) tell(n *node, o *line.Outage) {
	c.changes.last.Store(time.Now().UnixNano())
	c.background(func(closing <-chan struct{}) {
		c.change(+1, o.Err)
		select {
		case <-o.Over:
		case <-closing:
		}
		switch {
		case !over(o.Over):
		case n.closed.Load():
			c.changes.gone.Store(true) // and it stays away
		default:
			c.change(-1, nil)
		}
	})
}

// changes are reported one at a time, in order, and if they still hold: a first node went away, or the last one is
// back. The user's function may take its time.
type changes struct {
	changed func(why error)
	away    atomic.Int64 // number of nodes that are away
	gone    atomic.Bool  // one of them has gone for ever
	last    atomic.Int64 // when the last one went away, in Unix time

	mu   sync.Mutex
	told bool // that a node is away; protected by mu
}

func (c *Client) change(by int64, why error) {
	q := &c.changes
	q.away.Add(by)
	q.mu.Lock()
	defer q.mu.Unlock()
	if away := q.away.Load() > 0; away != q.told && away == (by > 0) {
		q.told = away
		c.report(why)
	}
}

// report calls the user's function. If it panics, in a background goroutine, perhaps when Redis comes back, the worst
// time for a crash, the panic is reported as an error. A panic in another function of Trace may end the process. See
// TestBreaker_PanickingTrace.
func (c *Client) report(why error) {
	defer func() {
		if p := recover(); p != nil {
			c.failed(context.Background(), "ping", fmt.Errorf("reporting that the breaker is open (%t) panicked: %s", why != nil, foreign.Text(p)))
		}
	}()
	c.changes.changed(why)
}

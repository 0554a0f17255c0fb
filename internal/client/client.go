// Package client is Redis as singlefill sees it: every command is bounded in time, observed, and told to a
// breaker, whatever client the user has brought.
package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// A Client bounds and observes the commands of one cache or lock.
type Client struct {
	Redis   redis.UniversalClient // to be used inside of Do only
	Timeout time.Duration         // of each command

	node    *node // of all keys that have no other one
	nodes   nodes
	changes changes
	queued  atomic.Int64

	bounded    bool // Redis returns when a context's deadline has passed
	limit      limit
	failed     func(ctx context.Context, op string, err error)
	changed    func(open bool)
	background func(run func(closing <-chan struct{})) // nil: there are no breakers
}

// Check refuses what cannot be used as a client.
func Check(rdb redis.UniversalClient) error {
	if rdb == nil {
		return errors.New("rdb is nil: a redis.UniversalClient is needed")
	}
	if v := reflect.ValueOf(rdb); v.Kind() == reflect.Pointer && v.IsNil() {
		return fmt.Errorf("rdb is a nil %T: a connected redis.UniversalClient is needed", rdb)
	}
	if _, ok := rdb.(redis.Pipeliner); ok {
		return fmt.Errorf("rdb is a %T, a pipeline, which answers nothing until it is executed: a redis.UniversalClient is needed", rdb)
	}
	return nil
}

// New returns a Client that sends what it has to send over rdb. failed is told of every command that fails,
// changed when a first breaker has opened, and when the last one has closed; background runs a function that ends when
// closing is closed. Without it there are no breakers.
func New(rdb redis.UniversalClient, timeout time.Duration,
	failed func(ctx context.Context, op string, err error), changed func(open bool),
	background func(run func(closing <-chan struct{}))) *Client {
	c := &Client{Redis: rdb, Timeout: timeout, node: newNode(rdb), failed: failed, changed: changed, background: background}
	// Left to itself go-redis minds the deadline of a context while it dials or waits for a connection, but
	// not while it waits for a reply; ContextTimeoutEnabled makes it. Client.WithTimeout would give a clone
	// that could be told to, but the clone runs none of the user's hooks: it would be missing in every trace.
	// Functions of the user's that are called for each new connection may take their time, whatever is set.
	switch user := rdb.(type) {
	case *redis.Client:
		o := user.Options()
		c.bounded = o.ContextTimeoutEnabled && o.OnConnect == nil && o.CredentialsProvider == nil &&
			o.CredentialsProviderContext == nil && o.StreamingCredentialsProvider == nil
	case *redis.ClusterClient:
		o := user.Options()
		c.bounded = o.ContextTimeoutEnabled && o.OnConnect == nil && o.CredentialsProvider == nil &&
			o.CredentialsProviderContext == nil && o.StreamingCredentialsProvider == nil && o.ClusterSlots == nil
		c.nodes.cluster = user
	}
	return c
}

// endsWithin reports whether ctx ends before a command that is sent now is sure to have returned.
func endsWithin(ctx context.Context, d time.Duration) bool {
	deadline, ok := ctx.Deadline()
	return ok && time.Until(deadline) < d
}

// A call is what is known of a command that is sent.
type call struct {
	op, key string
	sent    time.Time
}

// Do runs one command, or one batch of them, on the node of key, for at most c.Timeout from the moment at which it can be
// sent. It returns when ctx ends; but with a client that minds deadlines a cancellation may be seen only when the
// command returns. A command that has been sent never ends with ctx: its outcome is observed even if no caller waits for it
// any more, or impatient callers would hide a dead server.
//
// key is any key of the command, all of which are on one node, or empty if no node is known.
func Do[R any](ctx context.Context, c *Client, op, key string, cmd func(ctx context.Context) (R, error)) (R, error) {
	return DoWithin(ctx, c, c.Timeout, op, key, cmd)
}

// DoWithin is Do with another bound, not above c.Timeout.
func DoWithin[R any](ctx context.Context, c *Client, timeout time.Duration, op, key string,
	cmd func(ctx context.Context) (R, error)) (R, error) {
	var none R
	if err := ctx.Err(); err != nil {
		return none, err
	}
	n, call := c.nodeOf(key), call{op, key, time.Now()}
	if err := c.enter(ctx, n, &call); err != nil {
		return none, err
	}
	if c.bounded && !endsWithin(ctx, timeout) {
		defer n.gate.leave()
		bounded, cancel := c.bound(ctx, call.sent, timeout)
		defer cancel()
		r, err := cmd(bounded)
		c.observe(ctx, n, call, err)
		return r, err
	}
	bounded, cancel := context.WithTimeout(Detach(ctx), timeout)
	return behind(ctx, c, n, call, bounded, func() { cancel(); n.gate.leave() }, cmd)
}

// enter returns when the command can be sent, and it then has to leave the gate.
func (c *Client) enter(ctx context.Context, n *node, call *call) error {
	if n.gate.tryEnter() {
		return nil
	}
	return c.wait(ctx, n, call)
}

// wait stands in the line of a node until ctx ends. It also ends when the breaker opens, and when nothing has been answered
// for as long as a command may take: then the line does not move.
func (c *Client) wait(ctx context.Context, n *node, call *call) error {
	c.queued.Add(1)
	defer c.queued.Add(-1)
	begun, place := call.sent, n.gate.line()
	patience := time.NewTimer(c.Timeout - n.silentSince(begun))
	defer patience.Stop()
	for {
		opening := *n.opening.Load()
		silent := n.silentSince(begun)
		if c.heldUp(silent) { // the answers come now, if there are any
			begun = time.Now().Add(-c.Timeout * 3 / 4)
			silent = n.silentSince(begun)
		}
		if silent >= c.Timeout {
			letAnswersIn()
			silent = n.silentSince(begun)
		}
		err := cmp.Or(ctx.Err(), n.refusal())
		if err == nil && silent >= c.Timeout {
			err = fmt.Errorf("no answer for %v to the commands before: %w", silent, redis.ErrPoolTimeout)
			call.sent = time.Now().Add(-silent)
			c.noteFailure(n, *call, err)
			c.failed(Detach(ctx), call.op, err)
		}
		if err != nil {
			n.gate.giveUp(place)
			return err
		}
		patience.Reset(max(c.Timeout-silent, 1))
		select {
		case <-place.admitted:
			call.sent = time.Now()
			if ctx.Err() == nil && n.outage.Load() == nil {
				return nil
			}
		case <-ctx.Done():
		case <-opening:
		case <-patience.C:
		}
	}
}

// Queued returns how many commands wait now to be sent.
func (c *Client) Queued() int64 { return c.queued.Load() }

// behind runs a command in a goroutine of its own, which may outlive this call, for as long as the user's client makes
// it wait. done is called when the client has returned.
func behind[R any](ctx context.Context, c *Client, n *node, call call, bounded context.Context, done func(),
	cmd func(ctx context.Context) (R, error)) (R, error) {
	var none R
	type reply struct {
		value R
		err   error
	}
	replies := make(chan reply, 1)
	var settled atomic.Bool
	settle := func(r R, err error) {
		if settled.CompareAndSwap(false, true) {
			c.observe(ctx, n, call, err)
			replies <- reply{r, err}
		}
	}
	go func() {
		defer done()
		settle(cmd(bounded))
	}()
	select {
	case r := <-replies:
		return r.value, r.err
	case <-bounded.Done():
		settle(none, bounded.Err())
		r := <-replies
		return r.value, r.err
	case <-ctx.Done():
		context.AfterFunc(bounded, func() { settle(none, bounded.Err()) })
		return none, ctx.Err()
	}
}

// bound returns a context for a command that is sent now.
func (c *Client) bound(ctx context.Context, now time.Time, timeout time.Duration) (context.Context, context.CancelFunc) {
	if timeout == c.Timeout {
		return c.limit.within(ctx, now, timeout), func() {}
	}
	return context.WithTimeout(Detach(ctx), timeout)
}

// Get is Do of a GET, asked for at now. It is what every hit does, and so worth not allocating a context for that, or a
// function. It sends nothing while the breaker is open. asked is how long the server has been asked.
func (c *Client) Get(ctx context.Context, now time.Time, key string) (data []byte, asked time.Duration, err error) {
	if err := ctx.Err(); err != nil {
		return nil, 0, err
	}
	n, call := c.nodeOf(key), call{"get", key, now}
	if err := n.refusal(); err != nil {
		return nil, 0, err
	}
	if err := c.enter(ctx, n, &call); err != nil {
		return nil, time.Since(call.sent), err
	}
	bounded := c.limit.within(ctx, call.sent, c.Timeout)
	if c.bounded && !endsWithin(ctx, c.Timeout) {
		defer n.gate.leave()
		data, err = c.Redis.Get(bounded, key).Bytes()
		c.observe(ctx, n, call, err)
	} else {
		data, err = behind(ctx, c, n, call, bounded, n.gate.leave, func(ctx context.Context) ([]byte, error) {
			return c.Redis.Get(ctx, key).Bytes()
		})
	}
	if err != nil {
		asked = time.Since(call.sent)
	}
	return data, asked, err
}

// Detach returns a context with the values of ctx that never ends.
func Detach(ctx context.Context) context.Context {
	if ctx.Done() == nil {
		return ctx
	}
	return context.WithoutCancel(ctx)
}

func (c *Client) observe(ctx context.Context, n *node, call call, err error) {
	failed := err != nil && !errors.Is(err, redis.Nil)
	if failed {
		defer c.failed(Detach(ctx), call.op, err)
	}
	if failed && Unreachable(err) {
		letAnswersIn()
		c.noteFailure(n, call, err)
		return
	}
	n.noteAnswer()
}

// Unreachable tells a server that cannot answer anything now from one that answers, if only with a refusal. A
// redirection is the last of those that the client has followed, or one that it does not follow: a slot is on its
// way, or its master is being replaced.
func Unreachable(err error) bool {
	var reply redis.Error
	if !errors.As(err, &reply) {
		return err != nil
	}
	return redis.IsLoadingError(err) || redis.IsClusterDownError(err) || redis.IsMasterDownError(err) ||
		redis.IsTryAgainError(err) || redis.IsMaxClientsError(err) || redis.HasErrorPrefix(err, "BUSY ") || redirected(err)
}

func redirected(err error) bool {
	_, moved := redis.IsMovedError(err)
	_, asked := redis.IsAskError(err)
	return moved || asked
}

// Transaction sends what write queues between MULTI and EXEC, by a client or by a *redis.Tx. The server calls
// the whole off when it refuses a command; the error is the refusal then, which says why.
func Transaction(ctx context.Context, by interface {
	TxPipelined(context.Context, func(redis.Pipeliner) error) ([]redis.Cmder, error)
}, write func(p redis.Pipeliner)) error {
	cmds, err := by.TxPipelined(ctx, func(p redis.Pipeliner) error { write(p); return nil })
	if redis.IsExecAbortError(err) {
		for _, cmd := range cmds {
			if why := cmd.Err(); why != nil && !redis.IsExecAbortError(why) {
				return why
			}
		}
	}
	return err
}

// ScriptsRefused reports whether the server does not run scripts for this user, or at all. Nothing has been
// done then. A right that was missing inside a script is another matter: that reply may follow writes.
func ScriptsRefused(err error) bool {
	return err != nil && (strings.HasPrefix(err.Error(), "NOPERM") || strings.HasPrefix(err.Error(), "ERR unknown command"))
}

// WrongType reports that a key holds something that is not a string.
func WrongType(err error) bool {
	return err != nil && strings.HasPrefix(err.Error(), "WRONGTYPE")
}

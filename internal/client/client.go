// Package client bounds every command in time, observes it and tells the line to its server of it, for any
// client that the user supplies.
package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/foreign"
	"github.com/singlefill/singlefill/internal/line"
	"github.com/singlefill/singlefill/internal/local"
)

// A Client bounds and observes the commands of one cache or lock.
//
// The user's client is never cloned. Client.WithTimeout would bound commands without a goroutine.
// But a clone runs none of the user's hooks: the cache would be missing in every trace and metric.
// See TestNew_UserClient.
type Client struct {
	Redis   redis.UniversalClient // use it only inside of Do
	Local   *local.Store          // in place of a server; nil: there is one
	Timeout time.Duration         // of each command

	node    *node // of all keys without another node
	nodes   nodes
	changes changes
	queued  atomic.Int64
	traits  traits

	failed     func(ctx context.Context, op string, err error)
	background func(run func(closing <-chan struct{})) // nil: it watches no server
}

// The traits of a user's client.
type traits struct {
	bounded     bool // it returns when the deadline of a context has passed
	cached      bool // it keeps replies to GETs in memory
	fromMasters bool // see ReadFromMasters
}

// Check returns an error if rdb cannot be used as a client.
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

// New returns a Client that sends its commands through rdb. It calls failed for every command that
// fails, and changed when a first server is away, with the error that began it, and when the last
// one has answered, with nil. background runs a function that ends when closing is closed; without it the Client
// watches no server, and knows only what others on rdb learn.
func New(rdb redis.UniversalClient, timeout time.Duration,
	failed func(ctx context.Context, op string, err error), changed func(why error),
	background func(run func(closing <-chan struct{}))) *Client {
	memory, _ := rdb.(*local.Client)
	if memory != nil {
		rdb = memory.Client
	}
	c := &Client{Redis: rdb, Timeout: timeout, failed: failed, background: background}
	if memory != nil {
		c.Local = memory.Store
	}
	c.changes.changed = changed
	c.node = c.newNode(rdb, nil)
	c.node.join()
	// By default go-redis observes the deadline of a context while it dials or waits for a
	// connection, but not while it waits for a reply; with ContextTimeoutEnabled it does. The user's
	// functions that are called for each new connection may take any time.
	switch user := rdb.(type) {
	case *redis.Client:
		o := user.Options()
		c.traits.cached = CachesReplies(o)
		c.traits.bounded = o.ContextTimeoutEnabled && o.OnConnect == nil && o.CredentialsProvider == nil &&
			o.CredentialsProviderContext == nil && o.StreamingCredentialsProvider == nil
	case *redis.ClusterClient:
		o := user.Options()
		c.traits.bounded = o.ContextTimeoutEnabled && o.OnConnect == nil && o.CredentialsProvider == nil &&
			o.CredentialsProviderContext == nil && o.StreamingCredentialsProvider == nil && o.ClusterSlots == nil
		c.nodes.cluster = user
	}
	return c
}

// CachesReplies reports whether a client with these options keeps replies to GETs in memory.
func CachesReplies(o *redis.Options) bool {
	return o.ClientSideCache != nil || o.ClientSideCacheConfig != nil
}

// MayLeave reports whether a GET with ctx may return before its reply, because ctx ends.
func (c *Client) MayLeave(ctx context.Context) bool {
	return ctx.Done() != nil && (!c.traits.bounded || endsWithin(ctx, c.Timeout))
}

// endsWithin reports whether ctx may end before a command that is sent now has returned.
func endsWithin(ctx context.Context, d time.Duration) bool {
	deadline, ok := ctx.Deadline()
	return ok && time.Until(deadline) < d
}

// A call is a try of a command on its way.
type call struct {
	Command
	parcel
	client *Client
	node   *node
	sent   time.Time
	gate   *gate              // nil: it passes none
	group  *group             // with which it is sent, or nil
	cancel context.CancelFunc // ends its context before its time
}

// Do runs one command or pipeline on the node of key, for at most c.Timeout from when it can be
// sent. It returns when ctx ends; but a client that observes deadlines may notice a cancellation
// only when the command returns. A command that has been sent does not end with ctx: its outcome is
// observed even if no caller waits for it. Otherwise impatient callers would hide a dead server.
//
// key is any key of the command, whose keys are all on one node, or empty if no node is known. Each try calls cmd, and
// the command may be executed more than once: see [Always].
func Do[R any](ctx context.Context, c *Client, op, key string, cmd func(ctx context.Context) (R, error)) (R, error) {
	return DoWithin(ctx, c, Command{Op: op, Key: key, Within: c.Timeout, Again: Always}, cmd)
}

// DoWithin is Do of a command that is described in full.
func DoWithin[R any](ctx context.Context, c *Client, what Command, cmd func(ctx context.Context) (R, error)) (R, error) {
	r := DoTries(ctx, c, what, cmd)
	return r.Value, r.Err
}

// DoTries is DoWithin for a caller that has to know what has become of all tries.
func DoTries[R any](ctx context.Context, c *Client, what Command, cmd func(ctx context.Context) (R, error)) Reply[R] {
	reply, _ := tries(ctx, c, what, nothing, func(ctx context.Context, _ parcel) (R, error) { return cmd(ctx) })
	return reply
}

func nothing() (p parcel) { return p }

// tries tries a command until it is not to be sent again. Each try has a parcel of its own. If the command fails, asked
// is how long the server has been asked.
func tries[R any](ctx context.Context, c *Client, what Command, next func() parcel, read reader[R]) (reply Reply[R], asked time.Duration) {
	for r := (repeat{Command: what, view: c}); ; {
		var sent time.Time
		reply.Value, sent, reply.Err = do(ctx, c, &r.Command, next(), read)
		if what.Caller != nil {
			reply.Err = what.Caller.Explain(reply.Err)
		}
		if r.again(ctx, sent, reply.Err) {
			continue
		}
		if reply.Err != nil && !sent.IsZero() {
			asked = time.Since(r.begun)
		}
		reply.Lost = r.lost
		return reply, asked
	}
}

// send sends commands of one node once. Several go in one pipeline; a single one may go with the commands of others. It
// returns what read makes of the replies. Once it has returned, the commands are not sent any more; the error tells
// whether they were: see [Unsent]. If the time of the server had to be asked for first, what has that much less time.
func send[R any](ctx context.Context, c *Client, what *Command, cmds []redis.Cmder, read func() (R, error)) (r R, sent time.Time, err error) {
	caller := new(Caller)
	if what.takes {
		n := c.nodeOf(what.Key)
		if begun := time.Now(); !n.clock.known() {
			if err := c.look(ctx, n, *what); err != nil {
				return r, sent, unsent{err}
			}
			what.Within = max(what.Within-time.Since(begun), time.Millisecond)
		}
		caller.takes, caller.clock = cmds, &n.clock
	}
	p := parcel{caller: caller}
	if len(cmds) == 1 {
		p.cmd = caller.Only(cmds[0])
	} else {
		for _, cmd := range cmds {
			p.more = append(p.more, caller.Only(cmd))
		}
	}
	r, sent, err = do(ctx, c, what, p, func(context.Context, parcel) (none R, err error) {
		if caller.left.Load() { // the replies may be replies to PINGs
			if err := cmds[0].Err(); !Unknown(err) && !Late(err) {
				return none, err
			}
			return none, nil // the caller would have sent it again
		}
		caller.see()
		return read()
	})
	caller.Leave()
	return r, sent, caller.Explain(err)
}

// do tries a command once. It returns when the command was admitted, or zero if the server is away.
func do[R any](ctx context.Context, c *Client, what *Command, p parcel, read reader[R]) (r R, sent time.Time, err error) {
	if err := ctx.Err(); err != nil {
		return r, sent, err
	}
	p.rdb, p.ctx = c.Redis, ctx
	if c.Local != nil { // which has nothing to wait for
		sent = time.Now()
		what.admittedAt(sent)
		r, err = execute(ctx, p, nil, read)
		return r, sent, err
	}
	n := c.nodeOf(what.Key)
	if what.Spared {
		if err := c.refusal(n); err != nil {
			return r, sent, err
		}
	}
	call := call{Command: *what, parcel: p, client: c, node: n, sent: time.Now(), gate: n.alone}
	switch {
	case what.Now:
		call.gate = nil
	case what.Keys > fewKeys:
		call.gate, call.first = &n.many.gate, what.Holds
	case p.cmd != nil:
		call.gate = n.together
	}
	what.admittedAt(call.sent)
	queues := call.gate != nil && !call.gate.tryEnter()
	if queues {
		if err := call.wait(); err != nil {
			return r, call.sent, err
		}
		call.Spared = true // the server was there, and may be away any moment if the queue has not moved
	}
	shared := n.limit.next(call.sent, c.Timeout)
	since := n.line.Send(call.Key, call.sent)
	n.using.Add(1)
	bounded := call.bound(shared)
	// If a silence has begun before the limit, others are on their way unanswered: the caller may have to leave.
	stays := c.traits.bounded && !queues && !endsWithin(ctx, what.Within) && !since.Before(shared.begun)
	var left error // why the caller leaves
	if call.group != nil {
		left = c.await(ctx, n, call.group.done, bounded.Done(), call.Spared)
		stays = left == nil
	}
	if stays {
		answered := false
		defer func() { n.using.Add(-1); call.leave(answered) }()
		r, err := execute(bounded, call.parcel, call.group, read)
		err = n.Explain(err, call.Within)
		answered = call.observe(err)
		return r, call.sent, err
	}
	r, err = runAsync(call, bounded, left, read)
	return r, call.sent, err
}

// leave leaves the gate, if the command has passed one. Commands that are sent together leave together, by themselves.
func (call *call) leave(answered bool) {
	if call.cancel != nil {
		call.cancel()
	}
	switch many := call.node.many; {
	case call.group != nil, call.gate == nil:
	case call.gate == &many.gate:
		many.leave(answered, time.Since(call.sent), call.Within)
	default:
		call.gate.leave(answered)
	}
}

// wait queues at the gate of a node until the command is admitted. It returns an error when ctx
// ends, when the server is away, and when the queue does not move.
func (call *call) wait() error {
	c, n, ctx := call.client, call.node, call.ctx
	c.queued.Add(1)
	defer c.queued.Add(-1)
	call.timeout = timeTogether(call.Within, c.Timeout)
	w := call.gate.enqueue(call.parcel)
	left := c.await(ctx, n, w.decided, nil, true)
	err := cmp.Or(left, ctx.Err(), c.refusal(n)) // also if it was admitted just now
	stuck := err == nil && w.stuck
	if stuck {
		err = n.Explain(fmt.Errorf("no answer for %v to the commands before: %w", call.timeout, redis.ErrPoolTimeout), call.timeout)
	}
	if err != nil && call.gate.giveUp(w) {
		if stuck {
			c.failed(Detach(ctx), call.Op, err)
		}
		return err
	}
	if call.sent, call.group = time.Now(), w.group; w.group != nil {
		call.Within = call.timeout
	}
	call.admittedAt(w.at) // by now a group may have been sent
	return nil
}

// Queued returns how many commands wait to be sent.
func (c *Client) Queued() int64 { return c.queued.Load() }

// connections returns how many connections may be to a replica.
func (c *Client) connections() int {
	if pool := c.Redis.PoolStats(); pool != nil { // not of a double
		return int(pool.TotalConns) + 1
	}
	return 1
}

// runAsync executes a command in its own goroutine, which may outlive this call for as long as the
// user's client makes it wait. The command has an outcome at the latest when bounded ends. The call
// returns when the server is away, or at once if its caller has left.
//
// A command goes on in another goroutine when its caller has left. go-redis respects a deadline
// during a read only with ContextTimeoutEnabled. And a command that ended with its caller would
// show nothing: callers with short deadlines would hide a dead server for ever. See
// TestBreaker_ImpatientCallers.
func runAsync[R any](call call, bounded context.Context, left error, read reader[R]) (R, error) {
	c, n := call.client, call.node
	var none R
	var outcome struct {
		begun  atomic.Bool
		value  R
		err    error
		failed *foreign.Failure // of Trace.RedisError
	}
	done := make(chan struct{})
	finish := func(r R, err error) {
		if outcome.begun.CompareAndSwap(false, true) {
			outcome.value, outcome.err = r, n.Explain(err, call.Within)
			answered := false
			defer func() { // also if Trace.RedisError leaves by panic, which is the caller's, or by runtime.Goexit
				outcome.failed = foreign.Recovered(recover())
				call.leave(answered)
				close(done)
			}()
			answered = call.observe(outcome.err)
		}
	}
	go func() {
		defer n.using.Add(-1)
		finish(execute(bounded, call.parcel, call.group, read))
	}()
	if left == nil {
		left = c.await(call.ctx, n, done, bounded.Done(), call.Spared)
	}
	if left != nil && (call.ctx.Err() != nil || !outcome.begun.Load()) {
		context.AfterFunc(bounded, func() { finish(none, bounded.Err()) })
		return none, left
	}
	finish(none, bounded.Err()) // unless it has an outcome
	<-done
	if outcome.failed != nil {
		panic(outcome.failed)
	}
	return outcome.value, outcome.err
}

// bound returns a context that bounds a command sent now.
//
// A client with an OnConnect function gets a goroutine per command, also with
// ContextTimeoutEnabled. A client with a credentials provider or a ClusterSlots function does, too.
// go-redis calls these functions in the goroutine of the caller, and they may ignore their context.
// See TestBounded_OnConnect.
func (call *call) bound(shared *sharedLimit) (bounded context.Context) {
	switch {
	case call.group != nil: // which has the same time, and may be sent later, in a busy process
		return context.Background()
	case call.Within == call.client.Timeout:
		return commandContext{shared.ctx, call.ctx}
	}
	bounded, call.cancel = context.WithTimeout(Detach(call.ctx), call.Within)
	return bounded
}

// Detach returns a context with the values of ctx that never ends.
func Detach(ctx context.Context) context.Context {
	if ctx.Done() == nil {
		return ctx
	}
	return context.WithoutCancel(ctx)
}

// observe reports whether the server has answered.
func (call *call) observe(err error) (answered bool) {
	n := call.node
	failed := err != nil && !errors.Is(err, redis.Nil)
	if failed {
		defer call.client.failed(Detach(call.ctx), call.Op, err)
	}
	if errors.Is(err, redis.ErrClosed) {
		n.wakes.Close()
	}
	switch {
	case failed && Unreachable(err):
		n.line.Done(call.Key, err)
		return false
	case call.Cached && !failed:
		n.line.Done(call.Key, line.ErrUnknown)
	default:
		n.line.Done(call.Key, nil)
	}
	return true
}

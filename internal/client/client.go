// Package client bounds every command in time, observes it and counts it for a breaker, for any
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
)

// A Client bounds and observes the commands of one cache or lock.
//
// The user's client is never cloned. Client.WithTimeout would bound commands without a goroutine.
// But a clone runs none of the user's hooks: the cache would be missing in every trace and metric.
// See TestNew_UserClient.
type Client struct {
	Redis   redis.UniversalClient // use it only inside of Do
	Timeout time.Duration         // of each command
	Servers Servers

	node    *node // of all keys without another node
	nodes   nodes
	changes changes
	queued  atomic.Int64
	left    atomic.Int64 // until when commands run that the opening breaker has taken from their callers, in ns since begun

	fromMasters bool // see ReadFromMasters

	closed     context.Context // ends when a probe finds that the user has closed the client
	setClosed  func()
	bounded    bool // Redis returns when the deadline of a context has passed
	cached     bool // Redis keeps replies to GETs in memory
	failed     func(ctx context.Context, op string, err error)
	changed    func(why error)
	background func(run func(closing <-chan struct{})) // nil: no breakers
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
// fails, and changed when a first breaker has opened, with the error that opened it, and when the last
// one has closed, with nil. background runs a function that ends when closing is closed; without it there are no breakers.
func New(rdb redis.UniversalClient, timeout time.Duration,
	failed func(ctx context.Context, op string, err error), changed func(why error),
	background func(run func(closing <-chan struct{}))) *Client {
	c := &Client{Redis: rdb, Timeout: timeout, Servers: Servers{rdb: rdb}, failed: failed, changed: changed, background: background}
	c.closed, c.setClosed = context.WithCancel(context.Background())
	c.node = c.newNode(rdb, "")
	c.node.follow()
	// By default go-redis observes the deadline of a context while it dials or waits for a
	// connection, but not while it waits for a reply; with ContextTimeoutEnabled it does. The user's
	// functions that are called for each new connection may take any time.
	switch user := rdb.(type) {
	case *redis.Client:
		o := user.Options()
		c.cached = CachesReplies(o)
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

// CachesReplies reports whether a client with these options keeps replies to GETs in memory.
func CachesReplies(o *redis.Options) bool {
	return o.ClientSideCache != nil || o.ClientSideCacheConfig != nil
}

// MayLeave reports whether a GET with ctx may return before its reply, because ctx ends.
func (c *Client) MayLeave(ctx context.Context) bool {
	return ctx.Done() != nil && (!c.bounded || endsWithin(ctx, c.Timeout))
}

// endsWithin reports whether ctx may end before a command that is sent now has returned.
func endsWithin(ctx context.Context, d time.Duration) bool {
	deadline, ok := ctx.Deadline()
	return ok && time.Until(deadline) < d
}

// A Command describes a command or pipeline.
type Command struct {
	Op     string        // as failures are reported
	Key    string        // any of its keys, which are all on one node; empty: no node is known
	Keys   int           // of a pipeline; it waits for other pipelines of many keys: see throttle
	Holds  bool          // its caller holds the locks of the keys: of those that wait it goes first
	Within time.Duration // its bound, at most Client.Timeout
	Spared bool          // its caller does not wait while the breaker is open, and has asked whether it is
	Cached bool          // the user's client may answer it from memory, which shows nothing of the server

	// Sent, if it is not nil, is set to when the command was about to be sent: after the wait at the gate, and
	// before the server can have executed it. If it is sent again, that counts.
	Sent *time.Time
}

func (what Command) admittedAt(t time.Time) {
	if what.Sent != nil {
		*what.Sent = t
	}
}

// A call is a command on its way.
type call struct {
	Command
	client *Client
	node   *node
	sent   time.Time
	gate   *gate
	group  *group // with which it is sent, or nil
	idle   bool   // no caller waits for it
}

// Do runs one command or pipeline on the node of key, for at most c.Timeout from when it can be
// sent. It returns when ctx ends; but a client that observes deadlines may notice a cancellation
// only when the command returns. A command that has been sent does not end with ctx: its outcome is
// observed even if no caller waits for it. Otherwise impatient callers would hide a dead server.
//
// key is any key of the command, whose keys are all on one node, or empty if no node is known.
func Do[R any](ctx context.Context, c *Client, op, key string, cmd func(ctx context.Context) (R, error)) (R, error) {
	return DoWithin(ctx, c, Command{Op: op, Key: key, Within: c.Timeout}, cmd)
}

// DoWithin is Do with another bound.
func DoWithin[R any](ctx context.Context, c *Client, what Command, cmd func(ctx context.Context) (R, error)) (R, error) {
	return do(ctx, c, what, parcel{}, func(ctx context.Context, _ *group) (R, error) { return cmd(ctx) })
}

// Send is DoWithin of commands of one node, each of which may take something: see [NewTaking]. Several go in one
// pipeline; a single one may go with the commands of others. Send returns what read makes of the replies. Once it has
// returned, the commands are not sent any more; the error tells whether they were: see [Unsent].
func Send[R any](ctx context.Context, c *Client, what Command, cmds []redis.Cmder, read func() (R, error)) (R, error) {
	caller := new(Caller)
	var none R
	for _, cmd := range cmds {
		if _, takes := cmd.(taking); takes {
			caller.takes = append(caller.takes, cmd)
		}
	}
	if caller.takes != nil {
		n := c.nodeOf(what.Key)
		if begun := time.Now(); !n.clock.known() {
			if err := c.look(ctx, n, what); err != nil {
				return none, unsent{err}
			}
			what.Within -= time.Since(begun)
		}
		caller.clock, caller.stays = &n.clock, what.Within-what.Within/16 // see least
		caller.leaves, caller.hurries = ctx.Deadline()
	}
	timely := make([]redis.Cmder, len(cmds))
	for i, cmd := range cmds {
		timely[i] = caller.Only(cmd)
	}
	p := parcel{cmd: timely[0]}
	if len(timely) > 1 {
		p = parcel{more: timely}
	}
	r, err := do(ctx, c, what, p, func(ctx context.Context, together *group) (R, error) {
		if end, ok := ctx.Deadline(); ok && together == nil {
			caller.begin(end)
		}
		if err := c.process(ctx, p, together); err != nil {
			return none, err
		}
		if caller.left.Load() { // the replies may be replies to PINGs
			if err := timely[0].Err(); !Unknown(err) {
				return none, err
			}
			return none, nil // the caller would have sent the text
		}
		for _, cmd := range caller.takes {
			if now, late := lateAt(cmd.Err()); late {
				caller.clock.see(now)
			}
		}
		return read()
	})
	caller.Leave()
	if err != nil && !caller.sent.Load() {
		err = unsent{err}
	}
	return r, err
}

// process returns nil when the command has its reply or error.
func (c *Client) process(ctx context.Context, p parcel, together *group) error {
	switch {
	case together != nil:
		return together.wait(ctx)
	case p.ahead != nil || p.more != nil:
		_, _ = Pipelined(ctx, c.Redis, func(pipe redis.Pipeliner) { p.addTo(ctx, pipe) }) // each command has its error
	default:
		_ = c.Redis.Process(ctx, p.cmd) // which has the error
	}
	return nil
}

func do[R any](ctx context.Context, c *Client, what Command, p parcel,
	run func(ctx context.Context, together *group) (R, error)) (R, error) {
	var none R
	if err := ctx.Err(); err != nil {
		return none, err
	}
	n := c.nodeOf(what.Key)
	p.rdb, p.timeout, p.ctx = c.Redis, c.Timeout, ctx
	call := call{Command: what, client: c, node: n, sent: time.Now(), gate: n.alone}
	switch {
	case what.Keys > fewKeys:
		call.gate, p.first = &n.many.gate, what.Holds
	case p.cmd != nil:
		call.gate = n.together
	}
	what.admittedAt(call.sent)
	queues := !call.gate.tryEnter()
	if queues {
		if err := c.wait(&call, p); err != nil {
			return none, err
		}
		call.Spared = true // the breaker was closed, and may open any moment if the queue has not moved
	}
	group, shared := call.group, n.limit.next(call.sent, c.Timeout)
	if c.bounded && !queues && !endsWithin(ctx, what.Within) && !n.quiet(shared.begun) {
		answered := false
		n.using.Add(1)
		defer func() { n.using.Add(-1); call.leave(answered) }()
		bounded, cancel := c.bound(ctx, shared, what.Within)
		defer cancel()
		r, err := run(bounded, group)
		err = n.explain(err, what.Within)
		answered = c.observe(ctx, call, err)
		return r, err
	}
	bounded, cancel := c.bound(ctx, shared, what.Within)
	leave := call.leave
	done := func(answered bool) { cancel(); leave(answered) }
	return runAsync(ctx, call, bounded, done, func(ctx context.Context) (R, error) { return run(ctx, group) })
}

// leave leaves the gate. Commands that are sent together leave together, by themselves.
func (call call) leave(answered bool) {
	switch many := call.node.many; {
	case call.group != nil:
	case call.gate == &many.gate:
		many.leave(answered, time.Since(call.sent), call.client.Timeout)
	default:
		call.gate.leave(answered)
	}
}

// wait queues at the gate of a node until the command is admitted. It returns an error when ctx
// ends, when the breaker opens, and when no command was answered for as long as a command may take:
// then the queue does not move.
func (c *Client) wait(call *call, p parcel) error {
	c.queued.Add(1)
	defer c.queued.Add(-1)
	n, ctx := call.node, p.ctx
	begun, w := call.sent, call.gate.enqueue(p)
	enter := func() {
		call.sent, call.group = time.Now(), w.group
		call.admittedAt(w.at) // by now a group may have been sent
	}
	shared := n.limit.next(begun, c.Timeout).ctx.Done()
	var patience <-chan time.Time // of a command that waits for longer
	for {
		opening := n.opens()
		silent := n.stuckSince(begun)
		if c.stalled(silent) { // the process was stalled, and answers may be about to arrive
			begun = time.Now().Add(-c.Timeout * 3 / 4)
			silent = n.stuckSince(begun)
		}
		if silent >= c.Timeout {
			yieldToReaders()
			silent = n.stuckSince(begun)
		}
		err, fails := cmp.Or(ctx.Err(), c.refusal(n)), false
		if err == nil && silent >= c.Timeout {
			err = n.explain(fmt.Errorf("no answer for %v to the commands before: %w", silent, redis.ErrPoolTimeout), silent)
			call.sent = time.Now().Add(-silent)
			if fails = c.noteFailure(*call, err); !fails {
				err = cmp.Or(c.refusal(n), err) // as if this one had noticed the silence a moment later
			}
		}
		if err != nil {
			if !call.gate.giveUp(w) {
				enter()
				return nil
			}
			if fails {
				c.failed(Detach(ctx), call.Op, err)
			}
			return err
		}
		if shared == nil {
			patience = time.After(max(c.Timeout-silent, 1))
		}
		select {
		case <-w.admitted:
			enter()
			if ctx.Err() == nil && c.away(n) == nil && n.stuckSince(begun) < c.Timeout {
				return nil
			}
		case <-ctx.Done():
		case <-opening:
		case <-shared:
			shared = nil
		case <-patience:
		}
	}
}

// Queued returns how many commands wait to be sent.
func (c *Client) Queued() int64 { return c.queued.Load() }

// runAsync runs a command in its own goroutine, which may outlive this call for as long as the
// user's client makes it wait. done is called when the command has an outcome: at the latest when
// bounded ends. The call returns when the breaker opens, unless no caller waits for it, or it is open from the
// beginning: then the command is to find out whether the server is back.
//
// A command goes on in another goroutine when its caller has left. go-redis respects a deadline
// during a read only with ContextTimeoutEnabled. And a command that ended with its caller would
// tell the breaker nothing: callers with short deadlines would hide a dead server for ever. See
// TestBreaker_ImpatientCallers.
func runAsync[R any](ctx context.Context, call call, bounded context.Context, done func(answered bool),
	cmd func(ctx context.Context) (R, error)) (R, error) {
	c, n := call.client, call.node
	var none R
	type reply struct {
		value R
		err   error
	}
	replies := make(chan reply, 1)
	var finished atomic.Bool
	finish := func(r R, err error) {
		if finished.CompareAndSwap(false, true) {
			err = n.explain(err, cmp.Or(call.Within, c.Timeout))
			answered := false
			defer func() { // also if Trace.RedisError leaves by panic or runtime.Goexit
				done(answered)
				replies <- reply{r, err}
			}()
			answered = c.observe(ctx, call, err)
		}
	}
	opening := n.opens()
	var left error // why the caller leaves
	switch away := c.refusal(n); {
	case away != nil && call.Spared: // it has opened since the caller asked
		left = away
		c.leaves(bounded)
	case away != nil || call.idle:
		opening = nil
	}
	n.using.Add(1)
	go func() {
		defer n.using.Add(-1)
		finish(cmd(bounded))
	}()
	for {
		if left != nil {
			context.AfterFunc(bounded, func() { finish(none, bounded.Err()) })
			return none, left
		}
		select {
		case r := <-replies:
			return r.value, r.err
		case <-bounded.Done():
			finish(none, bounded.Err())
			r := <-replies
			return r.value, r.err
		case <-ctx.Done():
			left = ctx.Err()
		case <-opening:
			opening = n.opens()
			if !finished.Load() { // otherwise its own error may have opened the breaker
				left = c.refusal(n)
			}
			if left != nil {
				c.leaves(bounded)
			}
		}
	}
}

// leaves notes that the caller of a command leaves.
func (c *Client) leaves(bounded context.Context) {
	end, _ := bounded.Deadline()
	until := int64(end.Sub(c.node.begun))
	for last := c.left.Load(); last < until; last = c.left.Load() {
		if c.left.CompareAndSwap(last, until) {
			return
		}
	}
}

// Settle waits until no command runs any more that the opening breaker has taken from its caller.
func (c *Client) Settle() { time.Sleep(time.Until(c.node.begun.Add(time.Duration(c.left.Load())))) }

// bound returns a context that bounds a command sent now.
//
// A client with an OnConnect function gets a goroutine per command, also with
// ContextTimeoutEnabled. A client with a credentials provider or a ClusterSlots function does, too.
// go-redis calls these functions in the goroutine of the caller, and they may ignore their context.
// See TestBounded_OnConnect.
func (c *Client) bound(ctx context.Context, shared *sharedLimit, timeout time.Duration) (context.Context, context.CancelFunc) {
	if timeout == c.Timeout {
		return commandContext{shared.ctx, ctx}, func() {}
	}
	return context.WithTimeout(Detach(ctx), timeout)
}

// Detach returns a context with the values of ctx that never ends.
func Detach(ctx context.Context) context.Context {
	if ctx.Done() == nil {
		return ctx
	}
	return context.WithoutCancel(ctx)
}

// observe reports whether the server has answered.
func (c *Client) observe(ctx context.Context, call call, err error) (answered bool) {
	n := call.node
	failed := err != nil && !errors.Is(err, redis.Nil)
	if failed {
		defer c.failed(Detach(ctx), call.Op, err)
	}
	if errors.Is(err, redis.ErrClosed) {
		n.wakes.Close()
	}
	if failed && Unreachable(err) {
		yieldToReaders()
		c.noteFailure(call, err)
		return false
	}
	at := time.Since(n.begun)
	if !call.Cached || failed {
		n.noteAnswer(at)
	}
	if call.gate != nil {
		n.moved.Store(int64(at))
	}
	return true
}

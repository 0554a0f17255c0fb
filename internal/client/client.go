// Package client is Redis as singlefill sees it: every command is bounded in time, observed, and told to a
// breaker, whatever client the user has brought.
package client

import (
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
	Breaker Breaker

	bounded bool // Redis returns when a context's deadline has passed
	limit   limit
	failed  func(ctx context.Context, op string, err error)
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
// changed of every change of the breaker; background runs a function that ends when closing is closed.
func New(rdb redis.UniversalClient, timeout time.Duration,
	failed func(ctx context.Context, op string, err error), changed func(open bool),
	background func(run func(closing <-chan struct{}))) *Client {
	c := &Client{Redis: rdb, Timeout: timeout, failed: failed}
	c.Breaker = Breaker{probe: c.Ping, every: timeout, changed: changed, background: background}
	// Left to itself go-redis minds the deadline of a context while it dials or waits for a connection, but
	// not while it waits for a reply; ContextTimeoutEnabled makes it. Client.WithTimeout would give a clone
	// that could be told to, but the clone runs none of the user's hooks: it would be missing in every trace.
	switch user := rdb.(type) {
	case *redis.Client:
		c.bounded = user.Options().ContextTimeoutEnabled
	case *redis.ClusterClient:
		c.bounded = user.Options().ContextTimeoutEnabled
	}
	return c
}

// EndsWithin reports whether ctx ends before a command sent now is sure to have returned.
func (c *Client) EndsWithin(ctx context.Context) bool { return endsWithin(ctx, c.Timeout) }

func endsWithin(ctx context.Context, d time.Duration) bool {
	deadline, ok := ctx.Deadline()
	return ok && time.Until(deadline) < d
}

// Do runs one command, or one batch of them, for at most c.Timeout. It returns at the deadline of ctx if that
// comes first; a cancellation it may see only when the command returns. The command itself never ends with
// ctx: its outcome is observed even if nobody waits for it any more, or impatient callers would hide a dead
// server.
func Do[R any](ctx context.Context, c *Client, op, key string, cmd func(ctx context.Context) (R, error)) (R, error) {
	return DoWithin(ctx, c, c.Timeout, op, key, cmd)
}

// DoWithin is Do with a bound of its own, not above c.Timeout.
func DoWithin[R any](ctx context.Context, c *Client, timeout time.Duration, op, key string,
	cmd func(ctx context.Context) (R, error)) (R, error) {
	var none R
	if err := ctx.Err(); err != nil {
		return none, err
	}
	sent := time.Now()
	if c.bounded && !endsWithin(ctx, timeout) {
		bounded, cancel := c.bound(ctx, sent, timeout)
		defer cancel()
		r, err := cmd(bounded)
		c.observe(ctx, op, sent, err)
		return r, err
	}
	bounded, cancel := context.WithTimeout(Detach(ctx), timeout)
	return behind(ctx, c, op, sent, bounded, cancel, cmd)
}

// behind runs a command in a goroutine of its own, which may outlive this call, for as long as the user's client makes
// it wait.
func behind[R any](ctx context.Context, c *Client, op string, sent time.Time, bounded context.Context, cancel func(),
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
			c.observe(Detach(ctx), op, sent, err)
			replies <- reply{r, err}
		}
	}
	go func() {
		settle(cmd(bounded))
		cancel()
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

// Get is Do of a GET, sent now.
func (c *Client) Get(ctx context.Context, now time.Time, key string) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if !c.bounded || endsWithin(ctx, c.Timeout) {
		return c.getBehind(ctx, now, key)
	}
	return c.GetDetached(ctx, now, key)
}

// GetDetached is Get that does not end with ctx. It is what every hit does, and so worth not allocating a context for
// that, or a function.
func (c *Client) GetDetached(ctx context.Context, now time.Time, key string) ([]byte, error) {
	if !c.bounded {
		return c.getBehind(Detach(ctx), now, key)
	}
	data, err := c.Redis.Get(c.limit.within(ctx, now, c.Timeout), key).Bytes()
	c.observe(ctx, "get", now, err)
	return data, err
}

func (c *Client) getBehind(ctx context.Context, now time.Time, key string) ([]byte, error) {
	bounded := c.limit.within(ctx, now, c.Timeout)
	return behind(ctx, c, "get", now, bounded, func() {}, func(ctx context.Context) ([]byte, error) {
		return c.Redis.Get(ctx, key).Bytes()
	})
}

// Detach returns a context with the values of ctx that never ends.
func Detach(ctx context.Context) context.Context {
	if ctx.Done() == nil {
		return ctx
	}
	return context.WithoutCancel(ctx)
}

func (c *Client) observe(ctx context.Context, op string, sent time.Time, err error) {
	if err == nil || errors.Is(err, redis.Nil) {
		c.Breaker.succeeded()
		return
	}
	if Unreachable(err) {
		c.Breaker.noteFailure(sent, err)
	} else {
		c.Breaker.succeeded()
	}
	c.failed(Detach(ctx), op, err)
}

// Ping asks the server for an answer.
func (c *Client) Ping() error {
	_, err := Do(context.Background(), c, "ping", "", func(ctx context.Context) (string, error) {
		return c.Redis.Ping(ctx).Result()
	})
	return err
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

// Away reports whether the breaker of key's node is open: it is not to be asked.
func (c *Client) Away(key string) bool { return c.Breaker.Open() }

// Refusal returns why the node of key is not to be asked; nil while its breaker is closed.
func (c *Client) Refusal(key string) error { return c.Breaker.Check() }

// AnyAway reports whether the breaker of any node is open.
func (c *Client) AnyAway() bool { return c.Breaker.Open() }

// Answers counts the commands that have been answered.
func (c *Client) Answers() int64 { return c.Breaker.Answers() }

// Reachable asks the node of key for an answer, also while its breaker is open. It returns false only if there was
// none. It proves how the node was at some moment after the call.
func (c *Client) Reachable(ctx context.Context, key string) bool { return !Unreachable(c.Ping()) }

// ByNode returns keys in groups, one for each node.
func (c *Client) ByNode(keys []string) [][]string { return [][]string{keys} }

// Queued returns how many commands wait now to be sent.
func (c *Client) Queued() int64 { return 0 }

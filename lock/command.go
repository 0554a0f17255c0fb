package lock

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
)

// Commands are calls of scripts.
//
// A script that changes nothing ends with a write that changes nothing. After a failover behind one
// address the client still has connections to the old master. A replica refuses the write, so it
// cannot report that a lock is busy, or a lease lost. The write comes last: Redis lets a script
// continue without memory after its first write. See
// TestFailover_OldMasterKeepsItsConnections and TestFailover_LeaseThatTheOldMasterDoesNotKnow.

// runAcquire runs a script that acquires the lock or takes a place in its queue.
func (o *owner) runAcquire(ctx context.Context, within time.Duration, s client.Script, keys []string,
	args ...any) (reply, error) {
	call := append(s.Call(3+len(keys), 4+len(args)), o.keys.lock, o.keys.fence, o.keys.ended)
	for _, key := range keys {
		call = append(call, key)
	}
	call = append(call, o.token, o.opts.TTL.Milliseconds(), int64(fenceLife/time.Millisecond))
	call = append(append(call, args...), 0) // the time is set when it is sent
	var sent time.Time
	what := client.Command{Op: "acquire", Within: within, Spared: true, Sent: &sent}
	answer := run(ctx, o, what, client.ScriptCall{Script: s, Args: call}, func(cmd *redis.Cmd) (reply, error) {
		answer, err := cmd.Result()
		if err != nil {
			return reply{}, err
		}
		return parseReply(answer)
	})
	r := answer.Value
	r.sent, r.unknown = sent, answer.Lost
	return r, answer.Err
}

func (o *owner) runRenew(ctx context.Context, sent *time.Time, s client.Script, keys []string, args ...any) (bool, error) {
	call := o.onLease(s, keys, append([]any{o.opts.TTL.Milliseconds()}, args...)...)
	held := run(ctx, o, client.Command{Op: "renew", Within: o.opts.RedisTimeout, Sent: sent}, call, isDone)
	return held.Value, held.Err
}

func (o *owner) runRelease(ctx context.Context, within time.Duration, s client.Script, keys ...string) client.Reply[bool] {
	call := o.onLease(s, keys, o.markLife().Milliseconds(), maxMarks, o.reservationLife())
	return run(ctx, o, client.Command{Op: "release", Within: within}, call, isDone)
}

func (o *owner) runAbandon(ctx context.Context, s client.Script, keys ...string) error {
	call := o.onLease(s, keys, o.markLife().Milliseconds(), maxMarks, o.reservationLife())
	return run(ctx, o, client.Command{Op: "abandon", Within: o.opts.RedisTimeout}, call, isDone).Err
}

// onLease returns the call of a script that changes what the owner may hold.
func (o *owner) onLease(s client.Script, keys []string, args ...any) client.ScriptCall {
	call := s.Call(len(keys), 1+len(args))
	for _, key := range keys {
		call = append(call, key)
	}
	return client.ScriptCall{Script: s, Args: append(append(call, o.token), args...)}
}

// isDone reads the answer of a script: whether it has changed anything.
func isDone(cmd *redis.Cmd) (bool, error) {
	done, err := cmd.Int()
	return done == 1, err
}

// run runs a script, again if it is not answered: each knows what the last try has done.
func run[R any](ctx context.Context, o *owner, what client.Command, call client.ScriptCall,
	read func(cmd *redis.Cmd) (R, error)) client.Reply[R] {
	what.Key, what.Again = o.keys.lock, client.Always
	return client.Run(ctx, o.client, what, call, read)
}

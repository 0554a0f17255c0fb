package lock

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
)

// A command is a call of a script.
//
// A script that changes nothing ends with a write that changes nothing. After a failover behind one
// address the client still has connections to the old master. A replica refuses the write, so it
// cannot report that a lock is busy, or a lease lost. The write comes last: Redis lets a script
// continue without memory after its first write. After READONLY the command is sent again at once
// on another connection, since go-redis closes this one. See
// TestFailover_OldMasterKeepsItsConnections and TestFailover_LeaseThatTheOldMasterDoesNotKnow.
type command struct {
	op     string
	within time.Duration // the time that it may take
	script client.Script
	call   []any
	sent   *time.Time // see client.Command
}

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
	r, err := run(ctx, o, command{"acquire", within, s, call, &sent}, func(cmd *redis.Cmd) (reply, error) {
		answer, err := cmd.Result()
		if err != nil {
			return reply{}, err
		}
		return parseReply(answer)
	})
	r.sent = sent
	return r, err
}

func (o *owner) runRenew(ctx context.Context, sent *time.Time, s client.Script, keys []string, args ...any) (bool, error) {
	call := o.onLease(s, keys, append([]any{o.opts.TTL.Milliseconds()}, args...)...)
	return run(ctx, o, command{"renew", o.opts.RedisTimeout, s, call, sent}, isDone)
}

func (o *owner) runRelease(ctx context.Context, within time.Duration, s client.Script, keys ...string) (bool, error) {
	call := o.onLease(s, keys, o.markLife().Milliseconds(), maxMarks, o.reservationLife())
	return run(ctx, o, command{"release", within, s, call, nil}, isDone)
}

func (o *owner) runAbandon(ctx context.Context, s client.Script, keys ...string) error {
	call := o.onLease(s, keys, o.markLife().Milliseconds(), maxMarks, o.reservationLife())
	_, err := run(ctx, o, command{"abandon", o.opts.RedisTimeout, s, call, nil}, isDone)
	return err
}

// onLease returns the call of a script that changes what the owner may hold.
func (o *owner) onLease(s client.Script, keys []string, args ...any) []any {
	call := s.Call(len(keys), 1+len(args))
	for _, key := range keys {
		call = append(call, key)
	}
	return append(append(call, o.token), args...)
}

// isDone reads the answer of a script: whether it has changed anything.
func isDone(cmd *redis.Cmd) (bool, error) {
	done, err := cmd.Int()
	return done == 1, err
}

// run sends a command, and sends it again while a replica answers: see command.
func run[R any](ctx context.Context, o *owner, c command, read func(cmd *redis.Cmd) (R, error)) (R, error) {
	type reply struct {
		value                  R
		unknown, late, replica bool
	}
	what := client.Command{Op: c.op, Key: o.keys.lock, Within: c.within, Sent: c.sent}
	end := time.Now().Add(c.within)
	for tries := -1; ; {
		cmd := client.Evalsha(ctx, c.call)
		r, err := client.Send(ctx, o.client, what, []redis.Cmder{c.script.Of(once{cmd})}, func() (reply, error) {
			switch err := cmd.Err(); {
			case client.Unknown(err):
				return reply{unknown: true}, nil
			case client.Late(err) && time.Now().Before(end):
				return reply{late: true}, nil
			case redis.IsReadOnlyError(err) && tries != 0 && ctx.Err() == nil:
				return reply{replica: true}, nil
			}
			r, err := read(cmd)
			return reply{value: r}, err
		})
		switch {
		case r.unknown:
			c.script.WithText(c.call)
		case r.late:
		case r.replica:
			if tries--; tries < 0 {
				tries = int(o.client.Redis.PoolStats().TotalConns) // each may be one to the old master
			}
		default:
			return r.value, err
		}
	}
}

// once is a command that the client sends once. If the client retried by itself, its last error
// would hide the outcome of earlier tries: a grant whose reply was lost, then a refused connection,
// would look like a lock that was never acquired. This package retries by itself, and remembers. See
// TestErrAmbiguous_LostReplyThenRefused.
type once struct{ redis.Cmder }

func (once) NoRetry() bool { return true }

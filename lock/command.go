package lock

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
)

// ask runs a script that takes or queues.
func (t *ticket) ask(ctx context.Context, within time.Duration, s script, keys []string, args ...any) (reply, error) {
	keys = append([]string{t.keys.lock, t.keys.fence, t.keys.ended}, keys...)
	args = append([]any{t.token, t.opts.TTL.Milliseconds(), fenceLife.Milliseconds()}, args...)
	return client.DoWithin(ctx, t.client, within, "acquire", t.keys.lock, func(ctx context.Context) (reply, error) {
		answer, err := t.run(ctx, s, keys, args).Result()
		if err != nil {
			return reply{}, err
		}
		return parse(answer)
	})
}

func parse(answer any) (r reply, err error) {
	if fence, ok := answer.(int64); ok {
		return reply{state: held, number: fence}, nil
	}
	fields, _ := answer.([]any)
	var numbers [5]int64
	ok := len(fields) >= 2
	for i, field := range fields {
		switch {
		case i == 0:
			r.state, ok = field.(string)
		case i <= len(numbers) && ok:
			numbers[i-1], ok = field.(int64)
		case ok:
			var token string
			token, ok = field.(string)
			r.lost = append(r.lost, token)
		}
	}
	if !ok {
		return r, fmt.Errorf("unexpected reply %v", answer)
	}
	r.number, r.ahead, r.last, r.place = numbers[0], numbers[1], numbers[2], numbers[4]
	r.age = time.Duration(min(numbers[3], int64(time.Hour/time.Microsecond))) * time.Microsecond
	return r, nil
}

// act runs a script that does something to what the ticket may hold.
func (t *ticket) act(ctx context.Context, within time.Duration, op string, s script, keys []string, args ...any) (bool, error) {
	args = append([]any{t.token}, args...)
	return client.DoWithin(ctx, t.client, within, op, keys[0], func(ctx context.Context) (bool, error) {
		done, err := t.run(ctx, s, keys, args).Int()
		return done == 1, err
	})
}

func (t *ticket) renewBy(ctx context.Context, s script, keys ...string) (bool, error) {
	return t.act(ctx, t.opts.RedisTimeout, "renew", s, keys, t.opts.TTL.Milliseconds())
}

func (t *ticket) releaseBy(ctx context.Context, within time.Duration, s script, keys ...string) (bool, error) {
	return t.act(ctx, within, "release", s, keys, t.markLife().Milliseconds(), maxMarks)
}

func (t *ticket) abandonBy(ctx context.Context, s script, keys ...string) error {
	_, err := t.act(ctx, t.opts.RedisTimeout, "abandon", s, keys, t.markLife().Milliseconds(), maxMarks)
	return err
}

// A script is called by its hash, and by its text when the server does not know it yet. Both are strings.
type script struct{ text, hash any }

func newScript(text string) script { return script{text, redis.NewScript(text).Hash()} }

func (t *ticket) run(ctx context.Context, s script, keys []string, args []any) *redis.Cmd {
	cmd := t.sendOn(ctx, "evalsha", s.hash, keys, args)
	if err := cmd.Err(); err != nil && redis.HasErrorPrefix(err, "NOSCRIPT") {
		cmd = t.sendOn(ctx, "eval", s.text, keys, args)
	}
	return cmd
}

// sendOn sends a command, and sends it again while a replica answers. After a failover behind one address that is the
// old master, to which the pool of the client still has connections. The client closes each that says so.
func (t *ticket) sendOn(ctx context.Context, name string, script any, keys []string, args []any) *redis.Cmd {
	sent := t.sent.Load()
	cmd := t.send(ctx, name, script, keys, args)
	if !redis.IsReadOnlyError(cmd.Err()) {
		return cmd
	}
	for range t.client.Redis.PoolStats().TotalConns + 1 {
		t.sent.Store(sent) // what a replica has answered is not in doubt
		if cmd = t.send(ctx, name, script, keys, args); !redis.IsReadOnlyError(cmd.Err()) || ctx.Err() != nil {
			break
		}
	}
	return cmd
}

func (t *ticket) send(ctx context.Context, name string, script any, keys []string, args []any) *redis.Cmd {
	all := append(make([]any, 0, 3+len(keys)+len(args)), name, script, len(keys))
	for _, key := range keys {
		all = append(all, key)
	}
	cmd := once{redis.NewCmd(ctx, append(all, args...)...), &t.sent}
	cmd.SetFirstKeyPos(3)
	_ = t.client.Redis.Process(ctx, cmd) // cmd has the error
	return cmd.Cmd
}

// once is a command that is sent once, and notes when it is. When the client tries again by itself, its last error
// hides what may have become of the tries before: a lock that was granted, its reply lost, and then a connection
// refused. This package tries again itself, and remembers.
type once struct {
	*redis.Cmd
	sent *atomic.Bool
}

func (once) NoRetry() bool { return true }

// Args is asked for when the command is written to a connection, so not while there is none. A hook may ask too;
// what was not sent then passes for sent, which does no harm.
func (c once) Args() []any {
	c.sent.Store(true)
	return c.Cmd.Args()
}

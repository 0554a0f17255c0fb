package lock

import (
	"context"
	_ "embed"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
)

// A kind is what a mutex, a fair mutex and a semaphore do differently: one step on the server each.
type kind interface {
	acquire(ctx context.Context, t *ticket, within time.Duration, wait bool) (reply, error)
	renew(ctx context.Context, t *ticket) (held bool, err error)
	release(ctx context.Context, t *ticket, within time.Duration) (released bool, err error)
	abandon(ctx context.Context, t *ticket) error
	queues() bool // waiters have places in a queue
}

// A ticket is what one call of Acquire asks with, and what it holds if it is granted. Its token is new, so that
// nothing done with it can touch what another one holds. Every command may arrive twice: the second one changes
// nothing.
type ticket struct {
	*Locker
	token string
	sent  atomic.Bool // a command has been written to a connection
}

// A reply is acquire's answer.
type reply struct {
	state  string
	number int64 // held: the fence; busy: in how many ms to ask again at the latest; otherSize: that size
	ahead  int64 // waiters who come first
}

const (
	held      = "held"
	busy      = "busy"
	otherSize = "size"
)

const (
	// fenceLife is how long the last fence is kept. It guards against a server's clock that is put back by less.
	fenceLife = 24 * time.Hour
)

// markLife is how long it is kept that an attempt has been released or abandoned. Release is tried for RedisTimeout
// and then for TTL, and a command may arrive later than the one sent after it.
func (l *Locker) markLife() time.Duration {
	if longest := time.Duration(1 << 62); l.opts.TTL > longest {
		return longest
	}
	return l.opts.TTL + 2*l.opts.RedisTimeout
}

// keys are the Redis keys of one name, all in one slot. No key of a cache begins with a brace, and no two keys of locks
// end alike, so no names meet.
type keys struct {
	lock, fence, tombstone, queue, alive, details string
}

func keysOf(name string) keys {
	lock := "{" + client.HashTag(name) + "}:lock"
	return keys{
		lock: lock, fence: lock + ":fence", tombstone: lock + ":ended:",
		queue: lock + ":queue", alive: lock + ":alive", details: lock + ":details",
	}
}

// ask runs a script that takes or queues.
func (t *ticket) ask(ctx context.Context, within time.Duration, s script, keys []string, args ...any) (reply, error) {
	keys = append([]string{t.keys.lock, t.keys.fence, t.keys.tombstone + t.token}, keys...)
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
	ok := len(fields) >= 2
	if ok {
		r.state, ok = fields[0].(string)
	}
	if ok {
		r.number, ok = fields[1].(int64)
	}
	if ok && len(fields) > 2 {
		r.ahead, ok = fields[2].(int64)
	}
	if !ok {
		return r, fmt.Errorf("unexpected reply %v", answer)
	}
	return r, nil
}

// act runs a script that does something to what the ticket may hold.
func (t *ticket) act(ctx context.Context, within time.Duration, op string, s script, life time.Duration, keys ...string) (bool, error) {
	return client.DoWithin(ctx, t.client, within, op, keys[0], func(ctx context.Context) (bool, error) {
		done, err := t.run(ctx, s, keys, []any{t.token, life.Milliseconds()}).Int()
		return done == 1, err
	})
}

// A script is called by its hash, and by its text when the server does not know it yet. Both are strings.
type script struct{ text, hash any }

func newScript(text string) script { return script{text, redis.NewScript(text).Hash()} }

func (t *ticket) run(ctx context.Context, s script, keys []string, args []any) *redis.Cmd {
	cmd := t.send(ctx, "evalsha", s.hash, keys, args)
	if err := cmd.Err(); err != nil && redis.HasErrorPrefix(err, "NOSCRIPT") {
		cmd = t.send(ctx, "eval", s.text, keys, args)
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

var (
	//go:embed lua/mutex_acquire.lua
	mutexAcquireLua string
	//go:embed lua/mutex_renew.lua
	mutexRenewLua string
	//go:embed lua/mutex_release.lua
	mutexReleaseLua string
	//go:embed lua/mutex_abandon.lua
	mutexAbandonLua string
	//go:embed lua/fair_acquire.lua
	fairAcquireLua string
	//go:embed lua/fair_abandon.lua
	fairAbandonLua string
	//go:embed lua/semaphore_acquire.lua
	semaphoreAcquireLua string
	//go:embed lua/semaphore_renew.lua
	semaphoreRenewLua string
	//go:embed lua/semaphore_release.lua
	semaphoreReleaseLua string
	//go:embed lua/semaphore_abandon.lua
	semaphoreAbandonLua string

	mutexAcquire     = newScript(mutexAcquireLua)
	mutexRenew       = newScript(mutexRenewLua)
	mutexRelease     = newScript(mutexReleaseLua)
	mutexAbandon     = newScript(mutexAbandonLua)
	fairAcquire      = newScript(fairAcquireLua)
	fairAbandon      = newScript(fairAbandonLua)
	semaphoreAcquire = newScript(semaphoreAcquireLua)
	semaphoreRenew   = newScript(semaphoreRenewLua)
	semaphoreRelease = newScript(semaphoreReleaseLua)
	semaphoreAbandon = newScript(semaphoreAbandonLua)
)

// mutex is a key that holds the token of the holder.
type mutex struct{}

func (mutex) acquire(ctx context.Context, t *ticket, within time.Duration, _ bool) (reply, error) {
	return t.ask(ctx, within, mutexAcquire, nil)
}

func (mutex) renew(ctx context.Context, t *ticket) (bool, error) {
	return t.act(ctx, t.opts.RedisTimeout, "renew", mutexRenew, t.opts.TTL, t.keys.lock)
}

func (mutex) release(ctx context.Context, t *ticket, within time.Duration) (bool, error) {
	return t.act(ctx, within, "release", mutexRelease, t.markLife(), t.keys.lock, t.keys.tombstone+t.token)
}

func (mutex) abandon(ctx context.Context, t *ticket) error {
	_, err := t.act(ctx, t.opts.RedisTimeout, "abandon", mutexAbandon, t.markLife(), t.keys.lock, t.keys.tombstone+t.token)
	return err
}

func (mutex) queues() bool { return false }

// fair is a mutex with a queue before it. Who holds it is not in the queue any more.
type fair struct{ mutex }

func (fair) acquire(ctx context.Context, t *ticket, within time.Duration, wait bool) (reply, error) {
	enqueue := 0
	if wait {
		enqueue = 1
	}
	return t.ask(ctx, within, fairAcquire, []string{t.keys.queue, t.keys.alive}, t.opts.WaiterTTL.Milliseconds(), enqueue)
}

func (fair) abandon(ctx context.Context, t *ticket) error {
	_, err := t.act(ctx, t.opts.RedisTimeout, "abandon", fairAbandon, t.markLife(),
		t.keys.lock, t.keys.tombstone+t.token, t.keys.queue, t.keys.alive)
	return err
}

func (fair) queues() bool { return true }

// semaphore is a set of holders, each with the end of its lease.
type semaphore struct{ size int }

func (s semaphore) acquire(ctx context.Context, t *ticket, within time.Duration, _ bool) (reply, error) {
	return t.ask(ctx, within, semaphoreAcquire, []string{t.keys.details}, s.size)
}

func (semaphore) renew(ctx context.Context, t *ticket) (bool, error) {
	return t.act(ctx, t.opts.RedisTimeout, "renew", semaphoreRenew, t.opts.TTL, t.keys.lock, t.keys.details)
}

func (semaphore) release(ctx context.Context, t *ticket, within time.Duration) (bool, error) {
	return t.act(ctx, within, "release", semaphoreRelease, t.markLife(), t.keys.lock, t.keys.tombstone+t.token, t.keys.details)
}

func (semaphore) abandon(ctx context.Context, t *ticket) error {
	_, err := t.act(ctx, t.opts.RedisTimeout, "abandon", semaphoreAbandon, t.markLife(),
		t.keys.lock, t.keys.tombstone+t.token, t.keys.details)
	return err
}

func (semaphore) queues() bool { return false }

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
	acquire(ctx context.Context, a *attempt, within time.Duration, wait bool) (reply, error)
	renew(ctx context.Context, l *Lease) (held bool, err error)
	release(ctx context.Context, l *Lease, within time.Duration) (released bool, err error)
	abandon(ctx context.Context, a *attempt) error
	queues() bool // waiters have places in a queue
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

// keys are the Redis keys of one name, all in one slot: the braces hold the name as the hash tag, up to its first
// '}' if it has one. A leading '}' would make that tag empty and split them, so it is escaped, and the '%' that
// escapes it too. No key of a cache begins with a brace, and no two keys of locks end alike, so no names meet.
type keys struct {
	lock, fence, tombstone, queue, alive, details string
}

func keysOf(name string) keys {
	switch name[0] {
	case '}':
		name = "%7D" + name[1:]
	case '%':
		name = "%25" + name[1:]
	}
	lock := "{" + name + "}:lock"
	return keys{
		lock: lock, fence: lock + ":fence", tombstone: lock + ":ended:",
		queue: lock + ":queue", alive: lock + ":alive", details: lock + ":details",
	}
}

// ask runs a script that takes or queues.
func (a *attempt) ask(ctx context.Context, within time.Duration, script *redis.Script, keys []string, args ...any) (r reply, err error) {
	keys = append([]string{a.keys.lock, a.keys.fence, a.keys.tombstone + a.token}, keys...)
	args = append([]any{a.token, a.opts.TTL.Milliseconds(), fenceLife.Milliseconds()}, args...)
	return client.DoWithin(ctx, a.client, within, "acquire", func(ctx context.Context) (reply, error) {
		fields, err := script.Run(ctx, once{a.client.Redis, &a.sent}, keys, args...).Slice()
		if err != nil {
			return reply{}, err
		}
		return parse(fields)
	})
}

func parse(fields []any) (r reply, err error) {
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
		return r, fmt.Errorf("unexpected reply %v", fields)
	}
	return r, nil
}

// act runs a script that does something to what token may hold.
func (l *Locker) act(ctx context.Context, within time.Duration, op string, script *redis.Script, keys []string, token string, life time.Duration, sent *atomic.Bool) (bool, error) {
	return client.DoWithin(ctx, l.client, within, op, func(ctx context.Context) (bool, error) {
		done, err := script.Run(ctx, once{l.client.Redis, sent}, keys, token, life.Milliseconds()).Int()
		return done == 1, err
	})
}

// once sends each command once, and notes when it does. When the client tries again by itself, its last error
// hides what may have become of the tries before: a lock that was granted, its reply lost, and then a connection
// refused. This package tries again itself, and remembers.
type once struct {
	redis.UniversalClient
	sent *atomic.Bool
}

type onceCmd struct {
	*redis.Cmd
	sent *atomic.Bool
}

func (onceCmd) NoRetry() bool { return true }

// Args is asked for when the command is written to a connection, so not while there is none. A hook may ask too;
// what was not sent then passes for sent, which does no harm.
func (c onceCmd) Args() []any {
	c.sent.Store(true)
	return c.Cmd.Args()
}

func (c once) EvalSha(ctx context.Context, sha string, keys []string, args ...any) *redis.Cmd {
	return c.run(ctx, "evalsha", sha, keys, args)
}

func (c once) Eval(ctx context.Context, script string, keys []string, args ...any) *redis.Cmd {
	return c.run(ctx, "eval", script, keys, args)
}

func (c once) run(ctx context.Context, name, script string, keys []string, args []any) *redis.Cmd {
	all := []any{name, script, len(keys)}
	for _, key := range keys {
		all = append(all, key)
	}
	cmd := onceCmd{redis.NewCmd(ctx, append(all, args...)...), c.sent}
	cmd.SetFirstKeyPos(3)
	_ = c.Process(ctx, cmd) // cmd has the error
	return cmd.Cmd
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

	mutexAcquire     = redis.NewScript(mutexAcquireLua)
	mutexRenew       = redis.NewScript(mutexRenewLua)
	mutexRelease     = redis.NewScript(mutexReleaseLua)
	mutexAbandon     = redis.NewScript(mutexAbandonLua)
	fairAcquire      = redis.NewScript(fairAcquireLua)
	fairAbandon      = redis.NewScript(fairAbandonLua)
	semaphoreAcquire = redis.NewScript(semaphoreAcquireLua)
	semaphoreRenew   = redis.NewScript(semaphoreRenewLua)
	semaphoreRelease = redis.NewScript(semaphoreReleaseLua)
	semaphoreAbandon = redis.NewScript(semaphoreAbandonLua)
)

// mutex is a key that holds the token and the fence of the holder.
type mutex struct{}

func (mutex) acquire(ctx context.Context, a *attempt, within time.Duration, _ bool) (reply, error) {
	return a.ask(ctx, within, mutexAcquire, nil)
}

func (mutex) renew(ctx context.Context, l *Lease) (bool, error) {
	return l.locker.act(ctx, l.locker.opts.RedisTimeout, "renew", mutexRenew, []string{l.locker.keys.lock}, l.token, l.locker.opts.TTL, &l.sent)
}

func (mutex) release(ctx context.Context, l *Lease, within time.Duration) (bool, error) {
	return l.locker.act(ctx, within, "release", mutexRelease,
		[]string{l.locker.keys.lock, l.locker.keys.tombstone + l.token}, l.token, l.locker.markLife(), &l.sent)
}

func (mutex) abandon(ctx context.Context, a *attempt) error {
	_, err := a.act(ctx, a.opts.RedisTimeout, "abandon", mutexAbandon,
		[]string{a.keys.lock, a.keys.tombstone + a.token}, a.token, a.markLife(), &a.sent)
	return err
}

func (mutex) queues() bool { return false }

// fair is a mutex with a queue before it. Who holds it is not in the queue any more.
type fair struct{ mutex }

func (fair) acquire(ctx context.Context, a *attempt, within time.Duration, wait bool) (reply, error) {
	enqueue := 0
	if wait {
		enqueue = 1
	}
	return a.ask(ctx, within, fairAcquire, []string{a.keys.queue, a.keys.alive}, a.opts.WaiterTTL.Milliseconds(), enqueue)
}

func (fair) abandon(ctx context.Context, a *attempt) error {
	_, err := a.act(ctx, a.opts.RedisTimeout, "abandon", fairAbandon,
		[]string{a.keys.lock, a.keys.tombstone + a.token, a.keys.queue, a.keys.alive}, a.token, a.markLife(), &a.sent)
	return err
}

func (fair) queues() bool { return true }

// semaphore is a set of holders, each with the end of its lease.
type semaphore struct{ size int }

func (s semaphore) acquire(ctx context.Context, a *attempt, within time.Duration, _ bool) (reply, error) {
	return a.ask(ctx, within, semaphoreAcquire, []string{a.keys.details}, s.size)
}

func (semaphore) renew(ctx context.Context, l *Lease) (bool, error) {
	return l.locker.act(ctx, l.locker.opts.RedisTimeout, "renew", semaphoreRenew,
		[]string{l.locker.keys.lock, l.locker.keys.details}, l.token, l.locker.opts.TTL, &l.sent)
}

func (semaphore) release(ctx context.Context, l *Lease, within time.Duration) (bool, error) {
	return l.locker.act(ctx, within, "release", semaphoreRelease,
		[]string{l.locker.keys.lock, l.locker.keys.tombstone + l.token, l.locker.keys.details}, l.token, l.locker.markLife(), &l.sent)
}

func (semaphore) abandon(ctx context.Context, a *attempt) error {
	_, err := a.act(ctx, a.opts.RedisTimeout, "abandon", semaphoreAbandon,
		[]string{a.keys.lock, a.keys.tombstone + a.token, a.keys.details}, a.token, a.markLife(), &a.sent)
	return err
}

func (semaphore) queues() bool { return false }

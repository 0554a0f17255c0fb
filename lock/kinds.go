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
	acquire(ctx context.Context, t *ticket, within time.Duration, q question) (reply, error)
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
	stray bool        // a command to acquire was not answered, and may still arrive; not written once it is held
	sent  atomic.Bool // a command has been written to a connection
}

// A question is what acquire says of its attempt, beside the token.
type question struct {
	wait   bool     // it is to have a place in the queue
	since  int64    // the server's time at which its process began to wait, if it is to be the next; else 0
	others []string // the tokens of other waiters whose places in the queue are to be kept
}

// A reply is acquire's answer.
type reply struct {
	state  string
	number int64         // held: the fence; busy: in how many ms to ask again at the latest; otherSize: that size
	ahead  int64         // how many waiters come first; -1: unknown
	last   int64         // the fence of the last grant
	age    time.Duration // since then
	place  int64         // in the queue; 0: none
	lost   []string      // those of the others who have lost their places
}

const (
	held      = "held"
	busy      = "busy"
	otherSize = "size"
)

const (
	// fenceLife is how long the last fence is kept. It guards against a server's clock that is put back by less.
	fenceLife = 24 * time.Hour

	// maxMarks is how many attempts of a name are known to have ended.
	maxMarks = 500

	// maxMarkLife is how long that is known at most, and a little more. A command that arrives even later may take the
	// lock, which is free again after TTL.
	maxMarkLife = time.Minute
)

// markLife is how long it is known that an attempt has ended: a release is tried for RedisTimeout and then for TTL. Where a
// command to acquire may arrive late it is longer, so that those marks are the last to go when there are too many.
func (t *ticket) markLife() time.Duration {
	life := min(t.opts.TTL, maxMarkLife) + 2*t.opts.RedisTimeout
	if t.stray {
		life *= 2
	}
	return life
}

// keys are the Redis keys of one name, all in one slot. No key of a cache begins with a brace, and no two keys of locks
// end alike, so no names meet.
type keys struct {
	lock, fence, ended, next, queue, alive, details string
}

func keysOf(name string) keys {
	lock := "{" + client.HashTag(name) + "}:lock"
	return keys{
		lock: lock, fence: lock + ":fence", ended: lock + ":ended", next: lock + ":next",
		queue: lock + ":queue", alive: lock + ":alive", details: lock + ":details",
	}
}

// ask runs a script that takes or queues.
func (t *ticket) ask(ctx context.Context, within time.Duration, s script, keys []string, args ...any) (reply, error) {
	keys = append([]string{t.keys.lock, t.keys.fence, t.keys.ended}, keys...)
	args = append([]any{t.token, t.opts.TTL.Milliseconds(), fenceLife.Milliseconds()}, args...)
	return client.DoWithin(ctx, t.client, within, "acquire", func(ctx context.Context) (reply, error) {
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
	return client.DoWithin(ctx, t.client, within, op, func(ctx context.Context) (bool, error) {
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

func (mutex) acquire(ctx context.Context, t *ticket, within time.Duration, q question) (reply, error) {
	life, since := t.reservation(q)
	return t.ask(ctx, within, mutexAcquire, []string{t.keys.next, t.keys.queue}, life, since)
}

// reservation returns for how many ms the ticket wants to be the next, and since when its process waits.
func (t *ticket) reservation(q question) (life int64, since string) {
	if q.since == 0 {
		return 0, ""
	}
	return (t.opts.RedisTimeout + 2*maxPause).Milliseconds(), fmt.Sprintf("%020d", q.since)
}

func (mutex) renew(ctx context.Context, t *ticket) (bool, error) {
	return t.renewBy(ctx, mutexRenew, t.keys.lock, t.keys.ended)
}

func (mutex) release(ctx context.Context, t *ticket, within time.Duration) (bool, error) {
	return t.releaseBy(ctx, within, mutexRelease, t.keys.lock, t.keys.ended)
}

func (mutex) abandon(ctx context.Context, t *ticket) error {
	return t.abandonBy(ctx, mutexAbandon, t.keys.lock, t.keys.ended, t.keys.next)
}

func (mutex) queues() bool { return false }

// fair is a mutex with a queue before it. Its holder is not in the queue any more.
type fair struct{ mutex }

func (fair) acquire(ctx context.Context, t *ticket, within time.Duration, q question) (reply, error) {
	enqueue := 0
	if q.wait {
		enqueue = 1
	}
	args := append(make([]any, 0, 2+len(q.others)), t.opts.WaiterTTL.Milliseconds(), enqueue)
	for _, other := range q.others {
		args = append(args, other)
	}
	return t.ask(ctx, within, fairAcquire, []string{t.keys.queue, t.keys.alive}, args...)
}

func (fair) abandon(ctx context.Context, t *ticket) error {
	return t.abandonBy(ctx, fairAbandon, t.keys.lock, t.keys.ended, t.keys.queue, t.keys.alive)
}

func (fair) queues() bool { return true }

// semaphore is a set of holders, each with the end of its lease.
type semaphore struct{ size int }

func (s semaphore) acquire(ctx context.Context, t *ticket, within time.Duration, q question) (reply, error) {
	life, since := t.reservation(q)
	return t.ask(ctx, within, semaphoreAcquire, []string{t.keys.next, t.keys.details}, life, since, s.size)
}

func (semaphore) renew(ctx context.Context, t *ticket) (bool, error) {
	return t.renewBy(ctx, semaphoreRenew, t.keys.lock, t.keys.ended, t.keys.details)
}

func (semaphore) release(ctx context.Context, t *ticket, within time.Duration) (bool, error) {
	return t.releaseBy(ctx, within, semaphoreRelease, t.keys.lock, t.keys.ended, t.keys.details)
}

func (semaphore) abandon(ctx context.Context, t *ticket) error {
	return t.abandonBy(ctx, semaphoreAbandon, t.keys.lock, t.keys.ended, t.keys.next, t.keys.details)
}

func (semaphore) queues() bool { return false }

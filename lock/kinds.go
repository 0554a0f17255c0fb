package lock

import (
	"context"
	_ "embed"
	"fmt"
	"sync/atomic"
	"time"

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

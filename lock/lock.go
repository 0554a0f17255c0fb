package lock

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
)

// A Locker acquires leases of one name. It holds nothing itself, and each lease is independent. It
// is safe for concurrent use.
//
// The waiters of a process ask Redis together if their Lockers have the same client, kind, name and
// options, apart from [Options.MaxHold], [Options.Holder] and [Options.Trace]. So a program may make a Locker for each
// request.
type Locker struct {
	target
	*shared
	trace atomic.Pointer[Trace] // never nil
}

// NewMutex returns a [Locker] of which one lease is held at a time in the whole fleet.
//
// The waiters of one process are served in order of arrival. Waiters of different processes compete,
// but none starves: a process that has seen two grants to others reserves the next one. A waiter
// that dies with a reservation keeps the free lock from others for [Options.RedisTimeout] and
// 200 ms.
//
// Each name, also of the other kinds, costs Redis some 200 bytes for a day after its last grant, for
// the fence (see [Lease.Fence]): a million names a day are 200 MB. If ids are many, let them share some
// thousand names, such as "order " and a hash of the id modulo 5000; then ids of one name wait for each
// other.
//
// Do not give a mutex and a fair mutex the same name. While waiters queue for the fair mutex, the
// mutex returns [ErrConflict]; without waiters it does not notice the fair mutex.
//
// NewMutex does no I/O. It returns an error that names the argument, its value and what is allowed
// when rdb is nil or a pipeline, name is empty, or opts are incoherent. The same holds for
// [NewFairMutex] and [NewSemaphore].
func NewMutex(rdb redis.UniversalClient, name string, opts *Options) (*Locker, error) {
	return newLocker(rdb, name, mutex{}, opts, keysOf)
}

// NewFairMutex returns a [Locker] of which one lease is held at a time, granted in the order in
// which the waiters' first commands reached the server. [Locker.TryAcquire] does not overtake
// waiters.
//
// The first waiter of each process keeps the places of all its waiters in the queue by asking, at least three
// times in [Options.WaiterTTL]. The waiters of a dead process are skipped together, WaiterTTL after it was last
// heard of. So the order is lost when Redis cannot be reached for longer than WaiterTTL: the process that reaches
// it first keeps its places, and the others queue again.
//
// The price of the order is that the waiters of each process ask at least six times in WaiterTTL, and
// that a dead waiter at the head of the queue keeps the released lock from the others until it is
// skipped.
func NewFairMutex(rdb redis.UniversalClient, name string, opts *Options) (*Locker, error) {
	return newLocker(rdb, name, fair{}, opts, keysOf)
}

// NewSemaphore returns a [Locker] of which at most size leases are held at a time. Each lease ends
// and is renewed independently. Waiters are served like the waiters of a mutex.
//
// While processes have different sizes, as during a deployment, the largest one counts for all: while a
// process that has it holds a lease and, if other leases are held then, for up to [Options.TTL] longer. Holders
// keep their leases when a smaller size applies; the next one is granted when fewer than size are held.
func NewSemaphore(rdb redis.UniversalClient, name string, size int, opts *Options) (*Locker, error) {
	if size < 1 {
		return nil, fmt.Errorf("lock: size of %.100q is %d: at least 1 is allowed", name, size)
	}
	return newLocker(rdb, name, semaphore{size}, opts, keysOf)
}

func newLocker(rdb redis.UniversalClient, name string, kind kind, opts *Options,
	keysOf func(name string) keys) (*Locker, error) {
	if err := client.Check(rdb); err != nil {
		return nil, fmt.Errorf("lock: %w", err)
	}
	if name == "" {
		return nil, fmt.Errorf("lock: name is empty")
	}
	if opts == nil {
		opts = &Options{}
	}
	o, err := opts.withDefaults(kind.queues())
	if err != nil {
		return nil, err
	}
	l := &Locker{target: target{name: name, kind: kind, keys: keysOf(name), opts: o}}
	l.trace.Store(new(Trace))
	if o.Trace != nil {
		l.AddTrace(o.Trace)
	}
	l.client = client.New(rdb, o.RedisTimeout, l.redisFailed, nil, nil)
	l.shared = sharedOf(&l.target)
	return l, nil
}

// AddTrace adds functions for the leases that are acquired from now on. The functions of
// [Options.Trace] are called before them. They cannot be removed.
func (l *Locker) AddTrace(t *Trace) {
	for {
		old := l.trace.Load()
		if l.trace.CompareAndSwap(old, join(old, t)) {
			return
		}
	}
}

func (l *Locker) redisFailed(ctx context.Context, op string, err error) {
	if t := l.trace.Load(); t.RedisError != nil {
		t.RedisError(ctx, op, err)
	}
}

// Acquire waits until a lease is granted or ctx ends. The lease outlives ctx: see [Lease].
//
// The first waiter of a process asks Redis on behalf of all of them. After its second command it
// listens: whatever frees the lock wakes one waiter that can have it, and without a message a waiter
// asks at the end of the holder's lease, and at least every five seconds.
//
// Where Redis refuses to publish or to subscribe, or loses messages, waiters poll. The pause between two
// commands grows from 2 ms to 100 ms, with a random factor between a half and one and a half, and
// never lasts beyond the end of the holder's lease. Once the waiter is known to be the next, the pause
// is an eighth of the time for which the lease has been held; it grows with the number of waiters
// ahead of it. A waiter holds no connection during a pause, but for the one of the process that
// listens.
//
// A waiter outlasts a Redis that does not answer or cannot write: it retries with the same token,
// and keeps its place in the queue, until ctx ends. If ctx has no deadline, a waiter retries for
// [Options.TTL] after the last answer, and a caller that has had no answer yet for
// [Options.RedisTimeout], or behind others of its process for up to twice that.
//
// The error is one of those in the documentation of the package, and says what is known. It is [ErrBusy] if
// ctx ended, and by the last answer the lock was busy. [ErrAmbiguous] and [ErrUnavailable] come after as long
// as said above, or when ctx ends.
//
// If ctx has ended, the error also is ctx.Err(), by errors.Is. If no answer came before, its text says
// so: perhaps only ctx was too short.
//
// An Acquire that fails leaves no place in a queue, and a command of it that arrives late acquires
// nothing. While Redis answers, its place and its reservation have been given back when Acquire
// returns, so the client may be closed and the process may end. That takes one command, and
// RedisTimeout at most. While Redis does not answer, or if ctx ended during a command, it happens in
// the background.
func (l *Locker) Acquire(ctx context.Context) (*Lease, error) { return l.acquire(ctx, true) }

// TryAcquire is [Locker.Acquire] without waiting: it returns [ErrBusy] with the first reply. A lock
// is also busy when it is reserved for a waiter, and a fair mutex when waiters queue for it.
// TryAcquire tries to reach Redis for [Options.RedisTimeout].
func (l *Locker) TryAcquire(ctx context.Context) (*Lease, error) { return l.acquire(ctx, false) }

// Do calls fn while holding a lease. The context of fn ends with ctx, and when the lease is lost, with
// a cause that is [ErrLost] and says why: fn has to stop then, since another caller may acquire the
// lock. Do releases the lease when fn returns or panics; the panic continues.
//
// Do returns an error of fn unchanged, with one exception: if the lease was lost and fn returns the
// error of its context, Do returns that cause with it, since ctx itself need not have ended. If fn
// returns nil, Do returns
//
//   - nil when the lease was held to the end and has been given back;
//   - ErrLost when the lease was lost, so that another holder may have worked at the same time;
//   - [ErrNotReleased] when the lease could not be given back.
//
// All other errors of this package mean that fn has not run.
func (l *Locker) Do(ctx context.Context, fn func(ctx context.Context) error) (err error) {
	if fn == nil {
		return fmt.Errorf("lock: do %.100q: fn is nil: a function is needed", l.name)
	}
	lease, err := l.Acquire(ctx)
	if err != nil {
		return err
	}
	defer func() {
		failed := lease.Release(ctx)
		switch {
		case err != nil || failed == nil:
		case errors.Is(failed, ErrLost):
			err = failed
		default: // its text only: wrapped, it could pass for an error of Acquire
			err = fmt.Errorf("%w: %v", ErrNotReleased, failed)
		}
	}()
	inside, end := context.WithCancelCause(ctx)
	defer end(nil)
	stop := context.AfterFunc(lease.Context(), func() { end(context.Cause(lease.Context())) })
	defer stop()
	err = fn(inside)
	// The cause may also be the loss of another lock, whose context is ctx.
	if why := context.Cause(inside); why != nil && why == context.Cause(lease.Context()) && errors.Is(err, inside.Err()) {
		return fmt.Errorf("%w: %w", why, err)
	}
	return err
}

func (l *Locker) acquire(ctx context.Context, wait bool) (*Lease, error) {
	if err := checkContext(ctx, "acquire", l.name); err != nil {
		return nil, err
	}
	trace := l.trace.Load()
	a := newAttempt(ctx, &owner{target: &l.target, token: l.waiters.newToken(l.opts.Holder)}, l.shared, trace)
	ask := a.try
	if wait {
		ask = a.wait
	}
	got, err := ask(ctx)
	if err != nil {
		a.leave(ctx)
	}
	if a.waited && trace.Waited != nil {
		_, r, _ := l.waiters.reason(a)
		trace.Waited(ctx, LeaseInfo{Name: l.name, Holder: holderOf(r.holder), Duration: time.Since(a.begun), Err: err})
	}
	if err != nil {
		return nil, err
	}
	lease := &Lease{owner: a.owner, grant: got, waiters: &a.waiters, cleanup: &a.cleanup, trace: trace}
	lease.start(ctx)
	return lease, nil
}

package lock

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
)

// Options tune a [Locker]. A nil *Options, like the zero value, is the default. In every field zero means the
// default; negative means off, where off has a meaning. Those who share a name should agree on them.
type Options struct {
	// TTL is the life of a lease that is not renewed: the time after which a dead holder is replaced. It is
	// renewed at a third of it while held. More than 3 × RedisTimeout. Default: 10 s.
	TTL time.Duration

	// MaxHold is how long after its grant a lease is renewed; then it is lost, at most TTL later.
	// At least 1 ms. Default: off.
	MaxHold time.Duration

	// WaiterTTL is how long a waiter of a fair mutex keeps its place in the queue without being heard of.
	// Waiters ask at least three times as often. More than 3 × RedisTimeout. The other kinds ignore it. Default: 5 s.
	WaiterTTL time.Duration

	// RedisTimeout bounds each Redis command, whatever the client's own settings. At least 1 ms. Default: 500 ms.
	RedisTimeout time.Duration

	// Trace is told what happens. Default: nobody.
	Trace *Trace
}

// A Locker acquires leases of one name. It holds nothing itself: any number of goroutines may use it at once,
// and each lease is its own. Make one per name and process: the waiters of one Locker ask Redis together, those of two
// ask for themselves.
type Locker struct {
	name   string
	kind   kind
	keys   keys
	client *client.Client
	opts   Options
	trace  Trace
	line   line
	debts  debts
}

// NewMutex returns a [Locker] of which one lease is held at a time in the whole fleet. The waiters of a Locker are served
// in their order. Those of different processes compete, but none is passed over for long: a process that has seen two
// grants to others reserves the next one. A waiter that dies with a reservation keeps a free lock from the others for
// [Options.RedisTimeout] and 200 ms.
//
// A mutex does not go with a fair mutex of the same name. While others wait for that one, it returns [ErrConflict];
// but it does not see a fair mutex for which no caller waits.
//
// It does no I/O. It returns an error that names the argument, its value and what is allowed when rdb is nil or
// a pipeline, name is empty, or opts are incoherent. So do [NewFairMutex] and [NewSemaphore].
func NewMutex(rdb redis.UniversalClient, name string, opts *Options) (*Locker, error) {
	return newLocker(rdb, name, mutex{}, opts)
}

// NewFairMutex returns a [Locker] of which one lease is held at a time, and that is granted in the order in which
// the waiters' first commands arrived at the server. [Locker.TryAcquire] does not overtake them.
//
// A waiter keeps its place by asking, at least three times in a WaiterTTL. Those who have died are passed over
// together, WaiterTTL after they were last heard of. The price of order is that a lease that comes free stays so
// until the next in line asks again: for about an eighth of the time for which it was held, and 100 ms at most.
func NewFairMutex(rdb redis.UniversalClient, name string, opts *Options) (*Locker, error) {
	return newLocker(rdb, name, fair{}, opts)
}

// NewSemaphore returns a [Locker] of which at most size leases are held at a time. Each ends and is renewed by
// itself. Waiters are served as those of a mutex are.
//
// While one is held, a caller with another size gets [ErrConflict]. Waiters that came before the holders of another size
// go on waiting, until the holders agree with them, or their context ends: then they get ErrConflict, too.
func NewSemaphore(rdb redis.UniversalClient, name string, size int, opts *Options) (*Locker, error) {
	if size < 1 {
		return nil, fmt.Errorf("lock: size of %.100q is %d: at least 1 is allowed", name, size)
	}
	return newLocker(rdb, name, semaphore{size: size}, opts)
}

func newLocker(rdb redis.UniversalClient, name string, kind kind, opts *Options) (*Locker, error) {
	if err := client.Check(rdb); err != nil {
		return nil, fmt.Errorf("lock: %w", err)
	}
	if name == "" {
		return nil, fmt.Errorf("lock: name is empty")
	}
	if opts == nil {
		opts = &Options{}
	}
	l := &Locker{name: name, kind: kind, keys: keysOf(name), opts: *opts}
	l.opts.TTL = orDefault(opts.TTL, 10*time.Second)
	l.opts.MaxHold = max(0, opts.MaxHold)
	l.opts.WaiterTTL = orDefault(opts.WaiterTTL, 5*time.Second)
	l.opts.RedisTimeout = orDefault(opts.RedisTimeout, 500*time.Millisecond)
	if opts.Trace != nil {
		l.trace = *opts.Trace
	}
	if err := l.opts.check(kind.queues() || opts.WaiterTTL != 0); err != nil {
		return nil, err
	}
	l.opts.TTL = l.opts.TTL.Truncate(time.Millisecond) // as the server counts
	l.client = client.New(rdb, l.opts.RedisTimeout, l.redisFailed, nil, nil)
	return l, nil
}

func (o Options) check(waiters bool) error {
	switch {
	case o.RedisTimeout < time.Millisecond:
		return fmt.Errorf("lock: Options.RedisTimeout is %v: at least 1ms is allowed", o.RedisTimeout)
	case o.TTL/3 <= o.RedisTimeout:
		return fmt.Errorf("lock: Options.TTL is %v: more than three times RedisTimeout (%v) is allowed, so that a renewal can fail and be tried again", o.TTL, o.RedisTimeout)
	case waiters && o.WaiterTTL/3 <= o.RedisTimeout:
		return fmt.Errorf("lock: Options.WaiterTTL is %v: more than three times RedisTimeout (%v) is allowed, so that a waiter can miss a reply and keep its place", o.WaiterTTL, o.RedisTimeout)
	case o.MaxHold > 0 && o.MaxHold < time.Millisecond:
		return fmt.Errorf("lock: Options.MaxHold is %v: at least 1ms is allowed, or 0 for no end", o.MaxHold)
	}
	return nil
}

func orDefault[V comparable](v, def V) V {
	var zero V
	if v == zero {
		return def
	}
	return v
}

// Acquire waits until a lease is granted or ctx ends. The lease outlives ctx: see [Lease].
//
// The first waiter of a Locker asks for all of them. Its pause grows from 2 ms to 100 ms, at random by half shorter or
// longer, and never past the end of the holder's lease. When it is known to be the next, the pause is an eighth of the
// time for which the lease is held; it grows with the number of waiters in a queue before it. In between it holds no
// connection.
//
// A caller that waits outlasts a Redis that does not answer, or refuses to write: it goes on under the same token, and
// keeps its place in a queue, until ctx ends. If ctx has no deadline, it goes on for [Options.TTL] after the last
// answer, and a caller that has had none yet for [Options.RedisTimeout].
//
// The error says what is known:
//
//   - [ErrBusy] and ctx.Err(), both by errors.Is: others held it until ctx ended;
//   - [ErrUnavailable]: Redis could not be reached, or refused to write anything now, for as long as said above;
//     nothing was taken;
//   - [ErrAmbiguous]: a command was sent and not answered; what it may have taken is being given back behind
//     this call, or ends with TTL. If ctx ended in the middle of a command, that is ctx.Err() too;
//   - [ErrConflict]: a lock of another kind or size, or something else, has this name;
//   - any other: something to be changed, such as a missing right.
//
// However it ends without a lease, no place is left in a queue, and a command that arrives late takes nothing. While
// Redis answers, its place and its reservation have been given back when Acquire returns, which takes one command, and
// RedisTimeout at most: the client may be closed and the process may end then. Otherwise that is done behind the call.
func (l *Locker) Acquire(ctx context.Context) (*Lease, error) { return l.acquire(ctx, true) }

// TryAcquire is [Locker.Acquire] that does not wait: [ErrBusy] comes with the first reply. A lock is busy also when it is
// reserved for a waiter, and a fair mutex when others wait for it. It tries to reach Redis for [Options.RedisTimeout].
func (l *Locker) TryAcquire(ctx context.Context) (*Lease, error) { return l.acquire(ctx, false) }

// Do calls fn while holding a lease. The context of fn ends with ctx, and with cause [ErrLost] when the lease is
// lost: fn has to stop then, since others may go on. The lease is released when fn returns or panics; a panic
// goes on.
//
// An error of fn comes back as it is. But if the lease was lost, and fn returns the error of its context, [ErrLost] comes
// with it: fn was perhaps not alone, and ctx need not have ended. If fn returns nil, Do returns nil when the lease was held
// to the end and has been given back, ErrLost when it was lost, and [ErrNotReleased] when it could not be given back. All
// other errors of this package mean that fn has not run.
func (l *Locker) Do(ctx context.Context, fn func(ctx context.Context) error) (err error) {
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
		default: // its text, not itself: it could pass for an error of Acquire
			err = fmt.Errorf("%w: %v", ErrNotReleased, failed)
		}
	}()
	inside, end := context.WithCancelCause(ctx)
	defer end(nil)
	stop := context.AfterFunc(lease.Context(), func() { end(context.Cause(lease.Context())) })
	defer stop()
	err = fn(inside)
	if ended := inside.Err(); ended != nil && errors.Is(err, ended) && context.Cause(inside) == ErrLost {
		return fmt.Errorf("%w: %w", ErrLost, err)
	}
	return err
}

func (l *Locker) acquire(ctx context.Context, wait bool) (*Lease, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	_, deadline := ctx.Deadline()
	a := &attempt{
		ticket: &ticket{Locker: l, token: rand.Text()}, begun: time.Now(), deadline: deadline, wake: make(chan struct{}, 1),
	}
	ask := a.try
	if wait {
		ask = a.wait
	}
	lease, err := ask(ctx)
	if lease == nil {
		a.leave(ctx)
	}
	if a.waited && l.trace.Waited != nil {
		l.trace.Waited(ctx, LeaseInfo{Name: l.name, Duration: time.Since(a.begun), Err: err})
	}
	if lease != nil {
		lease.begin(ctx)
	}
	return lease, err
}

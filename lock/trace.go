package lock

import (
	"context"
	"time"
)

// Trace is a set of optional functions that a [Locker] calls as things happen. They are called
// synchronously, from many goroutines at once: they must be quick and must not panic.
//
// For each lease, Acquired is called once, before the first renewal. After that, either Released or
// Lost is called once, unless the process dies.
type Trace struct {
	// Acquired is called when a lease was granted.
	Acquired func(ctx context.Context, info LeaseInfo)

	// Released is called when the lease was given back, also if it is gone after a release that was not answered.
	Released func(ctx context.Context, info LeaseInfo)

	// Lost is called when the lease ended before it was released, and also when Redis refuses the
	// release for good (see [Lease.Release]) or cannot be asked until the lease has ended. Err wraps
	// [ErrLost].
	Lost func(ctx context.Context, info LeaseInfo)

	// Renewed is called when the server has prolonged the lease.
	Renewed func(ctx context.Context, info LeaseInfo)

	// Expired is called when a command of this Locker has found that the lease of another caller ended
	// without a release: its process was killed, or could not reach Redis, or the lock was broken by hand.
	// One process of all reports each such lease, if a reply is not lost. For a mutex it is
	// the process that gets the lock next, within a day. For a semaphore it is the first process that asks
	// for a place while other leases are held, or within a minute.
	Expired func(ctx context.Context, info LeaseInfo)

	// Waited is called when an Acquire ends that had to wait. Err is what it returns.
	Waited func(ctx context.Context, info LeaseInfo)

	// RedisError is called for every command that failed. op names what it was for: acquire, renew,
	// release or abandon.
	RedisError func(ctx context.Context, op string, err error)
}

// LeaseInfo describes the lease, or the wait for one, that a function of [Trace] is called for.
type LeaseInfo struct {
	// Name is the name of the lock.
	Name string

	// Holder is the [Options.Holder] of another caller: for Expired, of the caller whose lease ended;
	// for Waited, of the caller that held the lock by the last busy answer. Otherwise it is empty.
	Holder string

	// Fence is [Lease.Fence]. It is 0 for Waited and Expired.
	Fence int64

	// Duration is the time since the command was sent that acquired the lease. For Waited it is the
	// time since Acquire was called, and 0 for Expired.
	Duration time.Duration

	// Err is why the lease was lost, for Lost, and the error of Acquire, for Waited. Else it is
	// nil.
	Err error
}

// join returns a Trace that calls the functions of a, and then the functions of b.
func join(a, b *Trace) *Trace {
	t := &Trace{
		Acquired: then(a.Acquired, b.Acquired),
		Released: then(a.Released, b.Released),
		Lost:     then(a.Lost, b.Lost),
		Renewed:  then(a.Renewed, b.Renewed),
		Expired:  then(a.Expired, b.Expired),
		Waited:   then(a.Waited, b.Waited),
	}
	if t.RedisError = a.RedisError; a.RedisError == nil {
		t.RedisError = b.RedisError
	} else if b.RedisError != nil {
		t.RedisError = func(ctx context.Context, op string, err error) {
			a.RedisError(ctx, op, err)
			b.RedisError(ctx, op, err)
		}
	}
	return t
}

func then(f, g func(context.Context, LeaseInfo)) func(context.Context, LeaseInfo) {
	switch {
	case f == nil:
		return g
	case g == nil:
		return f
	}
	return func(ctx context.Context, info LeaseInfo) { f(ctx, info); g(ctx, info) }
}

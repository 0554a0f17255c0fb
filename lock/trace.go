package lock

import (
	"context"
	"time"
)

// Trace is a set of optional functions that a [Locker] calls as things happen. They are called
// synchronously, from many goroutines at once: they must be quick and must not panic.
//
// For each lease, Acquired is called once, before the first renewal. After that, either Released or
// Lost is called once. Neither is called only in three cases: the process dies, Redis refuses the
// release for good (see [Lease.Release]), or Redis cannot be asked until the lease has ended.
type Trace struct {
	// Acquired is called when a lease was granted.
	Acquired func(ctx context.Context, info LeaseInfo)

	// Released is called when the lease was given back.
	Released func(ctx context.Context, info LeaseInfo)

	// Lost is called when the lease ended before it was released. Err wraps [ErrLost].
	Lost func(ctx context.Context, info LeaseInfo)

	// Renewed is called when the server has prolonged the lease.
	Renewed func(ctx context.Context, info LeaseInfo)

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

	// Fence is [Lease.Fence]. It is 0 for Waited.
	Fence int64

	// Duration is the time since the command was sent that acquired the lease. For Waited it is the
	// time since Acquire was called.
	Duration time.Duration

	// Err is why the lease was lost, for Lost, and the error of Acquire, for Waited. Else it is
	// nil.
	Err error
}

func (l *Locker) redisFailed(ctx context.Context, op string, err error) {
	if l.trace.RedisError != nil {
		l.trace.RedisError(ctx, op, err)
	}
}

package lock

import (
	"context"
	"time"
)

// Trace is a set of optional functions that a [Locker] calls as things happen. They are called synchronously, from
// many goroutines at once: they must be quick and must not panic.
//
// For each lease Acquired is called once, before it is renewed for the first time, and then either Released or Lost
// once; neither of these only if the process dies, or if it is being released and Redis refuses that for good (see
// [Lease.Release]), or cannot be asked any more until the lease has ended.
type Trace struct {
	Acquired func(ctx context.Context, info LeaseInfo) // a lease was granted
	Released func(ctx context.Context, info LeaseInfo) // and given back
	Lost     func(ctx context.Context, info LeaseInfo) // or it was not ours any more; Err wraps ErrLost
	Renewed  func(ctx context.Context, info LeaseInfo) // the server has prolonged it

	// Waited is called when an Acquire ends that had to wait. Err is what it returns.
	Waited func(ctx context.Context, info LeaseInfo)

	// RedisError is called for every command that failed. op is acquire, renew, release or abandon.
	RedisError func(ctx context.Context, op string, err error)
}

// LeaseInfo tells the functions of a [Trace] what an event is about.
type LeaseInfo struct {
	Name     string
	Fence    int64         // of the lease; 0 for Waited
	Duration time.Duration // since the lease was asked for; for Waited, since Acquire was called
	Err      error
}

func (l *Locker) redisFailed(ctx context.Context, op string, err error) {
	if l.trace.RedisError != nil {
		l.trace.RedisError(ctx, op, err)
	}
}

package lock

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/renew"
)

// A Lease is what [Locker.Acquire] grants. It is renewed in the background until it is released or
// lost: because Redis has lost it, because Redis could not be asked in time, or because of
// [Options.MaxHold]. Release every lease; otherwise it is held for as long as the process lives.
//
// All methods are safe at any time, also on a nil *Lease and on the zero Lease, which hold nothing.
type Lease struct {
	owner *owner
	grant
	waiters *waitQueue // one of which may ask after the release
	cleanup *cleanupQueue
	trace   *Trace
	told    atomic.Bool // its end, to trace

	ctx     context.Context
	end     context.CancelCauseFunc
	renewal *time.Timer
	outcome atomic.Int32 // of the release

	// ended tells that the lease is lost or its release has begun. The goroutine that sets it reports the
	// end.
	ended atomic.Bool

	// mayRetry tells that a call of Release has failed, so that another one may ask again.
	mayRetry atomic.Bool

	ambiguous atomic.Bool // a release was not answered, so that it may have been executed
}

// Outcomes of a release.
const (
	unknown int32 = iota
	released
	lost
)

// errReleased is why a lease is lost for another call of Release.
var errReleased = errors.New("it has been released already")

// start begins to renew the lease.
func (l *Lease) start(ctx context.Context) {
	ctx = context.WithoutCancel(ctx)
	l.ctx, l.end = context.WithCancelCause(ctx)
	opts := l.owner.opts
	if l.trace.Acquired != nil {
		l.trace.Acquired(ctx, l.info(nil))
	}
	renewal := renew.Lease{
		TTL: opts.TTL, Taken: l.sentAt, Margin: l.owner.margin(), MaxHold: opts.MaxHold,
		Renew: func(ctx context.Context, sent *time.Time) (bool, error) {
			held, err := l.owner.kind.renew(ctx, l.owner, sent)
			if held && !l.ended.Load() && l.trace.Renewed != nil {
				l.trace.Renewed(ctx, l.info(nil))
			}
			return held, err
		},
	}
	l.renewal = renewal.Start(l.ctx, func(why error) {
		if !l.ended.CompareAndSwap(false, true) {
			return
		}
		l.end(errLost(l.owner.name, why))
		l.traceLost(ctx, why)
		// A renewal may have arrived, so the server may still hold the lease. It is given back, but not
		// before the end that its holder was promised. See TestLease_LostUnanswered.
		if why != renew.ErrGone {
			time.Sleep(renewal.Margin)
			l.cleanup.abandon(ctx, l.owner)
		}
	})
}

func (l *Lease) traceLost(ctx context.Context, why error) {
	if l.told.CompareAndSwap(false, true) && l.trace.Lost != nil {
		l.trace.Lost(ctx, l.info(errLost(l.owner.name, why)))
	}
}

func (l *Lease) traceReleased(ctx context.Context) {
	if l.told.CompareAndSwap(false, true) && l.trace.Released != nil {
		l.trace.Released(ctx, l.info(nil))
	}
}

// traceUnknown reports the end of a lease whose release has ended with err.
func (l *Lease) traceUnknown(ctx context.Context, err error) {
	if err == errForgotten {
		l.traceReleased(ctx)
	} else {
		l.traceLost(ctx, err)
	}
}

func (l *Lease) info(err error) LeaseInfo {
	return LeaseInfo{Name: l.owner.name, Fence: l.fence, Duration: time.Since(l.sentAt), Err: err}
}

// Context returns a context that ends with the lease and has the values of the context passed to
// [Locker.Acquire]. When the lease is lost, the cause is [ErrLost] and says why, and the context ends before
// another caller can hold the lock, unless Redis has lost the lease or this process is stalled.
// The context of a Lease that holds nothing has ended.
func (l *Lease) Context() context.Context {
	if l == nil || l.ctx == nil {
		ctx, end := context.WithCancelCause(context.Background())
		end(ErrLost)
		return ctx
	}
	return l.ctx
}

// Fence returns a number that grows with every grant of this name. Pass it to the resource that the
// lease protects, and let the resource reject a number smaller than the largest it has seen: no
// lease protects from a holder that was frozen and continues after the lease has ended. With a
// semaphore a smaller number may belong to another holder. The fence of a Lease that holds nothing
// is 0.
//
// The fence is the server's clock in µs at the grant, or the last fence plus one if that is larger.
// So it grows also after Redis has lost its data, unless the clock was put back to before the last
// grant.
func (l *Lease) Fence() int64 {
	if l == nil {
		return 0
	}
	return l.fence
}

// Release gives the lease back. It uses the values of ctx but ignores its end, and takes
// [Options.RedisTimeout] at most. It returns
//
//   - nil, once, when the lease was held to the end, also if the reply to an earlier try was lost;
//   - [ErrLost] when the lease was lost earlier or has been released already;
//   - [ErrUnavailable] or [ErrAmbiguous] while Redis cannot be asked. Release then retries in the
//     background until the lease ends by itself. It is ErrAmbiguous, too, if the lease is gone and an
//     earlier try was not answered, so that it may have released it;
//   - any other error when Redis refuses for good, for example because of a missing permission. After
//     that, and with a closed client, the lease ends by itself.
//
// After an error other than ErrLost, Release may be called again and returns what is known then. On
// a Lease that holds nothing it does nothing.
func (l *Lease) Release(ctx context.Context) error {
	if l == nil || l.ctx == nil {
		return nil
	}
	if ctx == nil {
		return checkContext(ctx, "release", l.owner.name)
	}
	first := l.ended.CompareAndSwap(false, true)
	if !first && !l.mayRetry.CompareAndSwap(true, false) {
		<-l.ctx.Done() // what has set ended ends it next
		if why := context.Cause(l.ctx); errors.Is(why, ErrLost) {
			return why
		}
		return errLost(l.owner.name, errReleased)
	}
	if first {
		l.end(nil) // no renewal begins any more, and one in flight brings nothing back
		l.renewal.Stop()
	}
	if outcome := l.outcome.Load(); outcome != unknown { // the background has found out
		return l.finish(ctx, outcome)
	}
	ctx = client.Detach(ctx)
	outcome, err := l.releaseNow(ctx)
	if err == nil {
		return l.finish(ctx, outcome)
	}
	switch {
	case !first:
	case isTemporary(err):
		l.releaseLater(ctx, err)
	default:
		l.traceUnknown(ctx, err)
	}
	defer l.mayRetry.Store(true)
	if l.ambiguous.Load() {
		return fmt.Errorf("%w: release %.100q: %w", ErrAmbiguous, l.owner.name, err)
	}
	return explain("release", l.owner.name, err)
}

// releaseNow releases the lease within the time that one command may take. That includes a wait for a connection.
func (l *Lease) releaseNow(ctx context.Context) (outcome int32, err error) {
	timeout := l.owner.opts.RedisTimeout
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	outcome, err = l.tryRelease(ctx, timeout)
	if end := ctx.Err(); end != nil && (err == end || client.Unsent(err) && errors.Unwrap(err) == end) {
		err = fmt.Errorf("no answer within %v: %w", timeout, err)
	}
	return outcome, err
}

// releaseLater retries in the background, until the lease ends by itself.
func (l *Lease) releaseLater(ctx context.Context, err error) {
	try := func() (done bool) {
		var outcome int32
		if outcome, err = l.tryRelease(ctx, l.owner.opts.RedisTimeout); err == nil {
			_ = l.finish(ctx, outcome) // the call has returned
		}
		return err == nil || !isTemporary(err)
	}
	l.cleanup.add(l.owner.target, cleanupTask{
		try: try, end: time.Now().Add(l.owner.opts.TTL),
		over: func() { l.traceUnknown(ctx, err) }, // unless it is known to be released
	})
}

func (l *Lease) tryRelease(ctx context.Context, within time.Duration) (outcome int32, err error) {
	r := l.owner.kind.release(ctx, l.owner, within)
	if r.Lost {
		l.ambiguous.Store(true)
	}
	switch {
	case r.Err != nil:
		return unknown, r.Err
	case r.Value:
		return released, nil
	case l.ambiguous.Load():
		return unknown, errForgotten
	}
	return lost, nil
}

// finish notes the outcome of the release, and reports it to Trace once.
func (l *Lease) finish(ctx context.Context, outcome int32) error {
	first := l.outcome.CompareAndSwap(unknown, outcome)
	switch outcome = l.outcome.Load(); {
	case first && outcome == lost:
		l.traceLost(ctx, renew.ErrGone)
	case first:
		l.traceReleased(ctx)
		l.waiters.wakeFirst()
	}
	if outcome == lost {
		return errLost(l.owner.name, renew.ErrGone)
	}
	return nil
}

package lock

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/renew"
)

// A Lease is what [Locker.Acquire] has granted. It is renewed in the background until it is released, or lost: because
// Redis has lost it, because Redis could not be asked in time, or because of [Options.MaxHold]. Release every lease, or it
// is held for as long as the process lives. All methods are safe at any time, and on a nil
// *Lease or a zero one, which holds nothing.
type Lease struct {
	ticket *ticket
	fence  int64
	taken  time.Time // when the command was sent that took it

	ctx     context.Context
	end     context.CancelCauseFunc
	renewal *time.Timer
	over    atomic.Bool  // lost, or its release has begun: the goroutine that sets it has to tell
	asked   atomic.Bool  // a call of Release has failed, so another one may ask again
	inDoubt bool         // a release was not answered; of the call that has set over, or taken asked
	outcome atomic.Int32 // of the release
}

// What may come of a release.
const (
	unknown int32 = iota
	released
	lost
)

// margin returns by how much a holder gives up a lease before its end, so that its context has ended before anyone
// else can hold it: a twentieth of its life, and at least what rounding to milliseconds can make of it.
func margin(ttl time.Duration) time.Duration { return max(ttl/20, 2*time.Millisecond) }

// begin starts renewing.
func (l *Lease) begin(ctx context.Context) {
	ctx = context.WithoutCancel(ctx)
	l.ctx, l.end = context.WithCancelCause(ctx)
	opts, trace := l.ticket.opts, &l.ticket.trace
	if trace.Acquired != nil {
		trace.Acquired(ctx, l.info(nil))
	}
	renewal := renew.Lease{
		TTL: opts.TTL, Taken: l.taken, Margin: margin(opts.TTL), MaxHold: opts.MaxHold,
		Renew: func(ctx context.Context) (bool, error) {
			held, err := l.ticket.kind.renew(ctx, l.ticket)
			if held && !l.over.Load() && trace.Renewed != nil {
				trace.Renewed(ctx, l.info(nil))
			}
			return held, err
		},
	}
	l.renewal = renewal.Start(l.ctx, func(why error) {
		if !l.over.CompareAndSwap(false, true) {
			return
		}
		l.end(ErrLost)
		l.tellLost(ctx, why)
		if why != renew.ErrGone { // a renewal may have arrived: the others are not to wait for its end
			time.Sleep(renewal.Margin)
			l.ticket.giveUp(ctx)
		}
	})
}

func (l *Lease) tellLost(ctx context.Context, why error) {
	if l.ticket.trace.Lost != nil {
		l.ticket.trace.Lost(ctx, l.info(fmt.Errorf("%w: %w", ErrLost, why)))
	}
}

func (l *Lease) info(err error) LeaseInfo {
	return LeaseInfo{Name: l.ticket.name, Fence: l.fence, Duration: time.Since(l.taken), Err: err}
}

// Context returns a context with the values of the one given to [Locker.Acquire], which ends when the lease does: with
// cause [ErrLost] when it is lost, and before anyone else can hold it, unless Redis has lost it or this process is
// held up itself. That of a Lease which holds nothing has ended.
func (l *Lease) Context() context.Context {
	if l == nil || l.ctx == nil {
		ctx, end := context.WithCancelCause(context.Background())
		end(ErrLost)
		return ctx
	}
	return l.ctx
}

// Fence returns a number that grows with every grant of this name. Give it to the resource that the lease
// protects, and let that refuse a number smaller than the largest it has seen: no lease protects from a holder
// that was frozen and goes on after its end. (With a semaphore a smaller number may be that of another holder.)
// That of a Lease which holds nothing is 0.
//
// It is the server's clock in µs when the lease was granted, or one more than the last one. So it grows also
// after Redis has lost its data, unless that clock has been put back meanwhile, to before the last grant.
func (l *Lease) Fence() int64 {
	if l == nil {
		return 0
	}
	return l.fence
}

// Release gives the lease back. It uses the values of ctx, not its end, and takes [Options.RedisTimeout] at most.
//
// It returns nil once, when it is known that the lease was held to the end, also if the reply to an earlier try
// was lost; and [ErrLost] when it was lost before, or has been released already. While Redis cannot be asked it
// returns [ErrUnavailable] or [ErrAmbiguous], and goes on trying behind the call, until the lease ends by itself. Any
// other error is a refusal for good, such as a missing right; after that, and with a client that is closed, the
// lease ends by itself. After an error other than ErrLost Release may be called again: it says what is known then. On a
// Lease which holds nothing Release does nothing.
func (l *Lease) Release(ctx context.Context) error {
	if l == nil || l.ctx == nil {
		return nil
	}
	first := l.over.CompareAndSwap(false, true)
	if !first && !l.asked.CompareAndSwap(true, false) {
		return ErrLost
	}
	if first {
		l.end(nil) // no renewal is begun any more, and none that is in flight brings anything back
		l.renewal.Stop()
	}
	if outcome := l.outcome.Load(); outcome != unknown { // it was found out behind the call before
		return l.settle(ctx, outcome)
	}
	ctx = client.Detach(ctx)
	outcome, err := l.insist(ctx)
	if err == nil {
		return l.settle(ctx, outcome)
	}
	if first && mayPass(err) {
		l.ticket.owe(l.ticket.opts.TTL, func() bool {
			outcome, err := l.release(ctx, l.ticket.opts.RedisTimeout)
			if err == nil {
				_ = l.settle(ctx, outcome) // the call has returned
			}
			return err == nil || !mayPass(err)
		})
	}
	defer l.asked.Store(true)
	if l.inDoubt {
		return fmt.Errorf("%w: release %.100q: %w", ErrAmbiguous, l.ticket.name, err)
	}
	return explain("release", l.ticket.name, err)
}

// insist asks until there is an answer, for as long as one command may take.
func (l *Lease) insist(ctx context.Context) (int32, error) {
	l.ticket.sent.Store(false)
	return client.Retry(ctx, l.ticket.opts.RedisTimeout, mayPass, func(within time.Duration) (int32, error) {
		outcome, err := l.release(ctx, within)
		l.inDoubt = l.inDoubt || mayHaveArrived(err) && l.ticket.sent.Load()
		return outcome, err
	})
}

func (l *Lease) release(ctx context.Context, within time.Duration) (int32, error) {
	ours, err := l.ticket.kind.release(ctx, l.ticket, within)
	if ours {
		return released, err
	}
	return lost, err
}

// settle notes how a lease has ended that was released, and tells it once.
func (l *Lease) settle(ctx context.Context, outcome int32) error {
	first := l.outcome.CompareAndSwap(unknown, outcome)
	switch outcome = l.outcome.Load(); {
	case first && outcome == lost:
		l.tellLost(ctx, renew.ErrGone)
	case first:
		if l.ticket.trace.Released != nil {
			l.ticket.trace.Released(ctx, l.info(nil))
		}
		l.ticket.line.wakeFirst()
	}
	if outcome == lost {
		return ErrLost
	}
	return nil
}

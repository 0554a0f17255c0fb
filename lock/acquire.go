package lock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
)

// An attempt is one call of Acquire.
type attempt struct {
	*ticket
	begun    time.Time
	deadline bool          // its context has one
	wake     chan struct{} // has an element when it is to look again what it has to do
	waited   bool

	queued     bool // there may be a place in a queue, or a reservation, to leave
	unanswered bool // since the last answer a command was sent, which may have been executed
	answered   bool // the last command

	place int64 // in the line; protected by its mutex
	over  error // why it is to end, though its context has not; protected by the line's mutex
}

const (
	firstPause = 2 * time.Millisecond
	maxPause   = 100 * time.Millisecond
)

func (a *attempt) wakeUp() {
	select {
	case a.wake <- struct{}{}:
	default:
	}
}

// try asks once.
func (a *attempt) try(ctx context.Context) (*Lease, error) {
	r, sent, err := a.ask(ctx, question{})
	switch {
	case err != nil:
		return nil, a.explain(ctx, err)
	case r.state == held:
		return &Lease{ticket: a.ticket, fence: r.number, taken: sent}, nil
	case r.state == busy:
		return nil, ErrBusy
	}
	return nil, a.refused(r)
}

// wait asks until there is a lease, when its turn has come.
func (a *attempt) wait(ctx context.Context) (lease *Lease, err error) {
	line := &a.line
	line.enter(a)
	defer func() { line.leave(a, lease != nil) }()
	for backoff := firstPause; line.await(ctx, a); backoff = min(2*backoff, maxPause) {
		r, sent, err := a.ask(ctx, line.question(a))
		switch {
		case err == nil && r.state == held:
			return &Lease{ticket: a.ticket, fence: r.number, taken: sent}, nil
		case err == nil && r.state == busy:
			line.busy(a, r)
		case err == nil:
			if err := a.refused(r); r.state != otherSize || !line.conflicts(err) {
				return nil, err
			}
		case !mayPass(err) || ctx.Err() != nil || !line.endures(a, err):
			return nil, a.explain(ctx, err)
		}
		a.sleep(ctx, a.pause(backoff, r))
	}
	return nil, a.gaveUp(ctx)
}

// pause returns how long to sleep before asking again. Where it is known how many waiters come
// first, that follows their number and the age of the present lease: the handing over is to cost a
// small part of it, and all waiters together ask no more often than grows with the logarithm of
// their number. Else it is backoff. It does not go past the time at which the holder's lease ends,
// nor is it so long that a place in the queue could be lost.
func (a *attempt) pause(backoff time.Duration, r reply) time.Duration {
	d := backoff
	known := r.state == busy && r.ahead >= 0
	if ahead := time.Duration(min(r.ahead, 10_000)); known {
		d = min(max(firstPause, r.age/8)*(1+ahead), maxPause+ahead*maxPause/16)
	}
	d = time.Duration(float64(d) * (0.5 + rand.Float64()))
	if r.state == busy {
		left := time.Duration(min(r.number, int64(time.Hour/time.Millisecond))) * time.Millisecond
		d = min(d, left+time.Millisecond+rand.N(4*time.Millisecond))
	}
	if a.kind.queues() {
		d = min(d, a.opts.WaiterTTL/6)
	}
	return d
}

// sleep returns earlier when the attempt is woken, or ctx ends.
func (a *attempt) sleep(ctx context.Context, d time.Duration) {
	a.waited = true
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-a.wake:
	case <-ctx.Done():
	}
}

// ask returns a reply that is not older than a lease lives. Otherwise this process was held up, and
// what was granted may be another one's: asked again, the server prolongs the lease, or grants it
// again, or says that it is busy.
func (a *attempt) ask(ctx context.Context, q question) (r reply, sent time.Time, err error) {
	a.queued = a.queued || q.wait && a.kind.queues() || q.since != 0
	for {
		r, sent, err = a.insist(ctx, q)
		if err != nil || r.state != held || time.Since(sent) < a.opts.TTL-margin(a.opts.TTL) {
			return r, sent, err
		}
		a.stray, a.unanswered = true, true
		if err = ctx.Err(); err != nil {
			return r, sent, err
		}
	}
}

// insist asks until there is a reply, for as long as one command may take.
func (a *attempt) insist(ctx context.Context, q question) (r reply, sent time.Time, err error) {
	again := func(err error) bool { return client.Unreachable(err) || redis.IsReadOnlyError(err) }
	r, err = client.Retry(ctx, a.opts.RedisTimeout, again, func(within time.Duration) (reply, error) {
		sent = time.Now()
		r, err := a.kind.acquire(ctx, a.ticket, within, q)
		unknown := mayHaveArrived(err)
		a.unanswered = err != nil && a.unanswered || unknown
		a.stray = a.stray || unknown
		a.answered = err == nil || !client.Unreachable(err)
		return r, err
	})
	return r, sent, err
}

// mayHaveArrived reports whether a command that failed may have reached the server, or still reach
// it.
func mayHaveArrived(err error) bool {
	if err == nil {
		return false
	}
	var reply redis.Error
	var op *net.OpError
	switch {
	case errors.As(err, &reply) || errors.Is(err, redis.ErrClosed) || errors.Is(err, redis.ErrPoolTimeout):
		return false
	case errors.As(err, &op) && op.Op == "dial":
		return false
	}
	return true
}

// refused returns what a reply means to the caller that is neither held nor busy.
func (a *attempt) refused(r reply) error {
	if s, ok := a.kind.(semaphore); ok && r.state == otherSize {
		return fmt.Errorf("%w: size of %.100q is %d here, and %d with its holders", ErrConflict, a.name, s.size, r.number)
	}
	return fmt.Errorf("lock: acquire %.100q: unexpected state %q", a.name, r.state)
}

// gaveUp says why there is no lease to a caller that has waited.
func (a *attempt) gaveUp(ctx context.Context) error {
	why, silent := a.line.reason(a)
	switch {
	case silent:
		return a.explain(ctx, why)
	case why != nil:
		return fmt.Errorf("%w: %w", why, ctx.Err())
	}
	return fmt.Errorf("%w: %w", ErrBusy, ctx.Err())
}

// explain says what a failed command means to the caller.
func (a *attempt) explain(ctx context.Context, err error) error {
	switch {
	case a.unanswered && a.sent.Load():
		return fmt.Errorf("%w: acquire %.100q: %w", ErrAmbiguous, a.name, cmp.Or(ctx.Err(), err))
	case a.unanswered:
		return fmt.Errorf("%w: acquire %.100q: %w", ErrUnavailable, a.name, cmp.Or(ctx.Err(), err))
	case ctx.Err() != nil: // perhaps in the pause after a refusal, which says nothing of others
		return fmt.Errorf("%w: acquire %.100q: %w: %w", ErrUnavailable, a.name, ctx.Err(), err)
	}
	return explain("acquire", a.name, err)
}

// leave cleans up behind an attempt that ends without a lease: a place in a queue, and what a
// command that was not answered may have taken, or may still take. While the server answers, that
// is done when leave returns: the process may be about to end.
func (a *attempt) leave(ctx context.Context) {
	if !a.stray && !a.queued {
		return
	}
	ctx = client.Detach(ctx)
	if _, silent := a.line.reason(a); silent || !a.answered || mayPass(a.kind.abandon(ctx, a.ticket)) {
		a.giveUp(ctx)
	}
}

package lock

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/pause"
)

// An attempt is one call of Acquire.
type attempt struct {
	*owner
	*shared
	trace       *Trace
	begun       time.Time
	hasDeadline bool          // its context has one
	wake        chan struct{} // has an element when the attempt has to look for what to do
	waited      bool

	hasPlace   bool // it may have a place in a queue, or a reservation, to give back
	unanswered bool // since the last answer a command was sent, which may have been executed
	answered   bool // the last command
	silent     bool // Redis did not answer the line when the attempt left it

	place  int64      // in the waitQueue; protected by its mutex, as all fields below
	others []*attempt // whose tokens are in its command
	taken  taken      // by commands of other attempts
	failed error      // why it has to end before its context does
	busy   int        // number of busy answers to it as the first waiter
	asked  asked      // the last command
	next   nextAsk
	quiet  quiet // only the attempt itself changes it
}

func newAttempt(ctx context.Context, o *owner, s *shared, trace *Trace) *attempt {
	_, deadline := ctx.Deadline()
	return &attempt{owner: o, shared: s, trace: trace, begun: time.Now(), hasDeadline: deadline, wake: make(chan struct{}, 1)}
}

// A grant is what an attempt gets.
type grant struct {
	fence  int64
	sentAt time.Time // when the command was sent that acquired it
}

// try asks once.
func (a *attempt) try(ctx context.Context) (grant, error) {
	r, err := a.ask(ctx, request{})
	switch {
	case endedBy(ctx, err):
		return grant{}, a.noAnswer(ctx)
	case err != nil:
		return grant{}, a.explain(ctx, err)
	case r.state == held:
		return grant{r.number, r.sent}, nil
	case r.state == busy:
		return grant{}, a.busyWith(r)
	}
	return grant{}, a.refused(r)
}

// wait asks, whenever it is the attempt's turn, until a lease is granted.
func (a *attempt) wait(ctx context.Context) (got grant, err error) {
	q := &a.waiters
	q.join(a)
	defer func() { q.leave(a, err == nil) }()
	for backoff := pause.Min; q.awaitTurn(ctx, a); backoff = min(2*backoff, maxPause) {
		r, err := a.ask(ctx, q.request(a))
		switch {
		case err == nil && r.state == held:
			q.noteHeld(a, r)
			return grant{r.number, r.sent}, nil
		case err == nil && r.state == busy:
			q.noteBusy(a, r)
			if q.isStray(r) { // it lives for as long as this process asks, so a refusal would keep the lock for ever
				err = a.kind.abandon(ctx, &owner{target: a.target, token: r.holder})
				if err != nil && !isTemporary(err) && ctx.Err() == nil {
					return grant{}, a.explain(ctx, err)
				}
			}
		case err == nil:
			return grant{}, a.refused(r)
		case endedBy(ctx, err):
			return grant{}, a.gaveUp(ctx)
		case !isTemporary(err) || ctx.Err() != nil || !q.noteFailure(a, err):
			return grant{}, a.explain(ctx, err)
		}
		q.sleep(ctx, a, a.pause(backoff, r))
	}
	return grant{}, a.gaveUp(ctx)
}

// pause returns how long to sleep before asking again.
//
// If the number of waiters ahead is known, the pause follows that number and the age of the present
// lease: the hand-over costs a small part of that age, and the commands of all waiters together
// grow with the logarithm of their number only. Otherwise the pause is backoff. It never lasts
// beyond the end of the holder's lease, nor for so long that a place in the queue could be lost.
//
// While the attempt would hear of a release, it only asks to find out that wake-ups get lost.
func (a *attempt) pause(backoff time.Duration, r reply) time.Duration {
	d := backoff
	known := r.state == busy && r.ahead >= 0
	if ahead := time.Duration(min(r.ahead, 10_000)); known {
		d = min(max(pause.Min, min(r.age, time.Hour)/8)*(1+ahead), maxPause+ahead*maxPause/16)
	}
	d = vary(d)
	if r.state == busy && a.quiet.complete {
		d = pause.Vary(listeningPause, pause.Jitter)
	}
	if r.state == busy {
		d = pause.WithinLease(d, r.left())
	}
	if a.kind.queues() {
		d = min(d, a.opts.WaiterTTL/6)
	}
	return d
}

// ask returns a reply that is younger than a lease lives. After an older grant this process was
// stalled, and another process may hold the lock by now. So ask sends the same token again: the
// server prolongs the lease, grants it again, or says that the lock is busy. See
// TestAcquire_StalledForLongerThanTTL.
func (a *attempt) ask(ctx context.Context, req request) (r reply, err error) {
	for {
		r, err = a.send(ctx, req)
		if err != nil || r.state != held || time.Since(r.sent) < a.opts.TTL-a.margin() {
			return r, err
		}
		a.inTransit, a.unanswered = true, true
		if err = ctx.Err(); err != nil {
			return r, err
		}
	}
}

// send sends the command, and notes what is known of it.
func (a *attempt) send(ctx context.Context, req request) (reply, error) {
	r, err := a.kind.acquire(ctx, a.owner, a.opts.RedisTimeout, req)
	a.unanswered = err != nil && (a.unanswered || r.unknown)
	a.inTransit = a.inTransit || r.unknown
	sent := r.unknown || !client.Unsent(err)
	a.hasPlace = a.hasPlace || sent && (req.enqueue && a.kind.queues() || req.reserves || req.listens)
	a.answered = err == nil || !client.Unreachable(err)
	a.reportExpired(ctx, r)
	return r, err
}

// reportExpired reports leases of other attempts that ended without a release.
func (a *attempt) reportExpired(ctx context.Context, r reply) {
	if a.trace.Expired == nil {
		return
	}
	for _, token := range r.expired {
		a.trace.Expired(ctx, LeaseInfo{Name: a.name, Holder: holderOf(token)})
	}
}

// refused returns the caller's error for a reply that is neither held nor busy.
func (a *attempt) refused(r reply) error {
	return fmt.Errorf("lock: acquire %.100q: unexpected state %q", a.name, r.state)
}

// endedBy reports whether err is that ctx has ended, which says nothing about Redis.
//
// A context that ends during a command is ErrBusy if the last answer was busy. The command is in
// doubt, and undone like any other, but the caller learns what is known. Only without an earlier
// answer it is ErrAmbiguous, or ErrUnavailable if nothing was sent; then the text says that no
// answer came in time, and not that Redis is unavailable. See TestErrors_ContextEnds.
func endedBy(ctx context.Context, err error) bool {
	return err != nil && ctx.Err() != nil && errors.Is(err, ctx.Err())
}

// gaveUp returns the caller's error for an attempt that has waited until ctx ended, or failed.
func (a *attempt) gaveUp(ctx context.Context) error {
	last, r, why := a.waiters.reason(a)
	switch {
	case last == silent:
		return a.explain(ctx, why)
	case last == none:
		return a.noAnswer(ctx)
	}
	return fmt.Errorf("%w: %w", a.busyWith(r), ctx.Err())
}

// busyWith returns the caller's error for a lock that is busy by the reply.
func (a *attempt) busyWith(r reply) error {
	switch holder, size := holderOf(r.holder), a.kind.places(); {
	case holder == "":
		return fmt.Errorf("%w: %.100q", ErrBusy, a.name)
	case r.free:
		return fmt.Errorf("%w: %.100q is held by, or kept for, %q", ErrBusy, a.name, holder)
	case size > 1:
		return fmt.Errorf("%w: %.100q is held by %q and others", ErrBusy, a.name, holder)
	default:
		return fmt.Errorf("%w: %.100q is held by %q", ErrBusy, a.name, holder)
	}
}

// noAnswer returns the caller's error for an attempt that had no answer until ctx ended.
func (a *attempt) noAnswer(ctx context.Context) error {
	if a.unanswered {
		return noAnswer{a.name, ErrAmbiguous, ctx.Err()}
	}
	return noAnswer{a.name, ErrUnavailable, ctx.Err()}
}

// explain returns the caller's error for a command that failed with err, perhaps just before ctx ended.
func (a *attempt) explain(ctx context.Context, err error) error {
	said := explain("acquire", a.name, err)
	if a.unanswered {
		said = fmt.Errorf("%w: acquire %.100q: %w", ErrAmbiguous, a.name, err)
	}
	if ended := ctx.Err(); ended != nil && !errors.Is(err, ended) {
		return fmt.Errorf("%w: %w", said, ended)
	}
	return said
}

// leave cleans up after an attempt without a lease. It gives back a place in a queue, and what an
// unanswered command has acquired or may still acquire. While the server answers, that is done when
// leave returns, since the process may be about to end. The time for it includes a wait for a connection: see
// TestRelease_BehindALongQueue.
//
// A waiter that gives up wakes another one if the lock is free. It may have been woken for it. See
// TestWakeUp_PassedOn.
func (a *attempt) leave(ctx context.Context) {
	if !a.inTransit && !a.hasPlace {
		return
	}
	ctx = client.Detach(ctx)
	bounded, cancel := context.WithTimeout(ctx, a.opts.RedisTimeout)
	defer cancel()
	if a.silent || !a.answered || isTemporary(a.kind.abandon(bounded, a.owner)) {
		a.cleanup.abandon(ctx, a.owner)
	}
}

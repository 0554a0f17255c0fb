// Package renew keeps a lease in Redis alive while its holder works: the fill lock of the cache,
// and the leases of package lock.
package renew

import (
	"context"
	"errors"
	"math"
	"time"
)

// firstNudge is how soon after a try the first nudge may cause another one.
const firstNudge = 10 * time.Millisecond

// A Lease is held on a server until a time that each renewal puts off.
type Lease struct {
	TTL   time.Duration
	Taken time.Time // when the command was sent that took it

	// Renew tries once, bounded by ctx. It may set sent, which is when it was called, to when the command was sent.
	Renew func(ctx context.Context, sent *time.Time) (held bool, err error)

	// Nudge makes Keep check sooner whether the lease is held. It may be nil.
	Nudge <-chan struct{}

	// Margin is how long before the end of a lease that could not be renewed its holder gives it
	// up. Zero: never, where going on does no harm until the server says that the lease is lost.
	Margin time.Duration

	// MaxHold is how long after Taken renewing ends. Zero: never. It requires a Margin.
	MaxHold time.Duration
}

var (
	// ErrGone is returned by Keep when the server says that the lease is not held any more.
	ErrGone = errors.New("it is gone from Redis")

	// ErrNotRenewed is returned by Keep when the lease may have ended because Redis did not answer.
	ErrNotRenewed = errors.New("it could not be renewed in time")

	// ErrMaxHold is returned by Keep when the lease has ended after MaxHold.
	ErrMaxHold = errors.New("it was held for MaxHold")
)

// Keep renews the lease at a third of its life, counted from the last success, until ctx ends; then
// it returns nil. If the lease is lost earlier, it returns why.
func (l Lease) Keep(ctx context.Context) error {
	k := l.newKeeper()
	timer := time.NewTimer(time.Until(k.next()))
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-l.Nudge:
			k.nudge()
		case <-timer.C:
			if over, why := k.renew(ctx); over {
				return why
			}
		}
		timer.Reset(time.Until(k.next()))
	}
}

// Start is Keep in the background, without a goroutine while nothing is due, and without a Nudge.
// If the lease is lost before ctx ends, Start calls lost with the reason. Stop the timer once ctx
// has ended.
func (l Lease) Start(ctx context.Context, lost func(why error)) *time.Timer {
	k := l.newKeeper()
	var timer *time.Timer
	timer = time.AfterFunc(math.MaxInt64, func() { // not before timer is assigned
		if ctx.Err() != nil {
			return // stopped during the last renewal
		}
		over, why := false, error(nil)
		defer func() { // also if Renew, which may call functions of the user, ends by runtime.Goexit
			if !over {
				timer.Reset(time.Until(k.next()))
			}
		}()
		if over, why = k.renew(ctx); why != nil {
			lost(why)
		}
	})
	timer.Reset(time.Until(k.next()))
	return timer
}

// A keeper knows when its lease has to be renewed, and when it ends.
type keeper struct {
	Lease
	renewed    time.Time     // when the command was sent that renewed the lease last, or took it
	due        time.Time     // of the next renewal
	lastTry    time.Time     // or the beginning
	nudgePause time.Duration // between lastTry and the renewal that a nudge causes
}

func (l Lease) newKeeper() *keeper {
	return &keeper{Lease: l, renewed: l.Taken, due: l.Taken.Add(l.TTL / 3), lastTry: time.Now(), nudgePause: firstNudge}
}

// next returns when renew has to be called.
func (k *keeper) next() time.Time {
	if end := k.end(); k.maxHoldIsOver() || k.Margin > 0 && end.Before(k.due) {
		return end
	}
	return k.due
}

// end returns when the lease has to be given up.
func (k *keeper) end() time.Time { return k.renewed.Add(k.TTL - k.Margin) }

// maxHoldIsOver reports whether the lease must not be renewed any more.
func (k *keeper) maxHoldIsOver() bool { return k.MaxHold > 0 && k.due.Sub(k.Taken) > k.MaxHold }

// nudge brings the next renewal forward. The pause before it doubles with each renewal, so that any
// number of nudges causes few renewals.
func (k *keeper) nudge() {
	if at := k.lastTry.Add(k.nudgePause); at.Before(k.due) {
		k.due = at
	}
}

// renew does what is due. It reports whether keeping is over, because ctx has ended or because of
// why.
func (k *keeper) renew(ctx context.Context) (over bool, why error) {
	k.lastTry, k.nudgePause = time.Now(), min(2*k.nudgePause, k.TTL)
	if k.Margin > 0 && !k.lastTry.Before(k.end()) {
		if k.maxHoldIsOver() {
			return true, ErrMaxHold
		}
		return true, ErrNotRenewed
	}
	k.due = k.lastTry.Add(k.TTL / 10) // if the try does not return
	sent := k.lastTry
	held, err := k.try(ctx, &sent)
	switch {
	case ctx.Err() != nil:
		return true, nil // the holder may just have released it
	case err == nil && !held:
		return true, ErrGone
	case err == nil:
		k.renewed = sent
		k.due = k.renewed.Add(k.TTL / 3)
	default:
		k.due = time.Now().Add(k.TTL / 10)
	}
	return false, nil
}

func (k *keeper) try(ctx context.Context, sent *time.Time) (held bool, err error) {
	if k.Margin > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, k.end())
		defer cancel()
	}
	return k.Renew(ctx, sent)
}

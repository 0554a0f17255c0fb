// Package renew keeps a lease in Redis alive while its holder works: that of the cache's fill lock, and those of
// package lock.
package renew

import (
	"context"
	"errors"
	"math"
	"time"
)

// soonest is how soon after a lease was looked after a nudge may cause that again.
const soonest = 10 * time.Millisecond

// A Lease is something held on a server until a time that renewing puts off.
type Lease struct {
	TTL   time.Duration
	Taken time.Time                                        // when the command was sent by which it was taken
	Renew func(ctx context.Context) (held bool, err error) // one try; ctx bounds it
	Nudge <-chan struct{}                                  // makes Keep look sooner whether the lease is still held; may be nil

	// Margin is how long before the end of a lease that could not be renewed its holder gives it up. Zero: never,
	// where it harms nobody to go on until the server says that the lease is lost.
	Margin time.Duration

	// MaxHold is how long after Taken renewing ends. Zero: never. It takes a Margin.
	MaxHold time.Duration
}

var (
	// ErrGone is Keep's answer when the server says that somebody else holds the lease, or nobody.
	ErrGone = errors.New("it is gone from Redis")

	// ErrNotRenewed is Keep's answer when the lease may have ended because Redis was not heard of.
	ErrNotRenewed = errors.New("it could not be renewed in time")

	// ErrMaxHold is Keep's answer when the lease has ended after MaxHold.
	ErrMaxHold = errors.New("it was held for MaxHold")
)

// Keep renews the lease at a third of its life, counted from the last success, until ctx ends: it returns nil
// then. If the lease is lost before, it returns why.
func (l Lease) Keep(ctx context.Context) error {
	s := l.standing()
	timer := time.NewTimer(time.Until(s.wake()))
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-l.Nudge:
			s.nudge()
		case <-timer.C:
			if over, why := s.renew(ctx); over {
				return why
			}
		}
		timer.Reset(time.Until(s.wake()))
	}
}

// Start is Keep behind the call, without a goroutine while there is nothing to do, and without a Nudge. If the lease
// is lost before ctx ends it calls lost with why. Stop the timer once ctx has ended.
func (l Lease) Start(ctx context.Context, lost func(why error)) *time.Timer {
	s := l.standing()
	var timer *time.Timer
	timer = time.AfterFunc(math.MaxInt64, func() { // not before timer is assigned
		if ctx.Err() != nil {
			return // stopped while it was renewed
		}
		over, why := s.renew(ctx)
		switch {
		case !over:
			timer.Reset(time.Until(s.wake()))
		case why != nil:
			lost(why)
		}
	})
	timer.Reset(time.Until(s.wake()))
	return timer
}

// standing is how it stands with a lease that is kept.
type standing struct {
	Lease
	held time.Time     // when the command was sent that has prolonged it last, or by which it was taken
	due  time.Time     // when it is to be renewed
	last time.Time     // when it was looked after
	soon time.Duration // see nudge
}

func (l Lease) standing() *standing {
	return &standing{Lease: l, held: l.Taken, due: l.Taken.Add(l.TTL / 3), last: time.Now(), soon: soonest}
}

// end returns when the lease is to be given up.
func (s *standing) end() time.Time { return s.held.Add(s.TTL - s.Margin) }

// enough reports whether it is not to be renewed any more.
func (s *standing) enough() bool { return s.MaxHold > 0 && s.due.Sub(s.Taken) > s.MaxHold }

// wake returns when there is something to do.
func (s *standing) wake() time.Time {
	if end := s.end(); s.enough() || s.Margin > 0 && end.Before(s.due) {
		return end
	}
	return s.due
}

// nudge brings the next renewal forward, to soonest after the first one and twice as long after each later one: any number
// of nudges causes few renewals.
func (s *standing) nudge() {
	if at := s.last.Add(s.soon); at.Before(s.due) {
		s.due = at
	}
}

// renew does what is due. It reports whether that was the last time, because ctx has ended or because of why.
func (s *standing) renew(ctx context.Context) (over bool, why error) {
	s.last, s.soon = time.Now(), min(2*s.soon, s.TTL)
	if s.Margin > 0 && !s.last.Before(s.end()) {
		if s.enough() {
			return true, ErrMaxHold
		}
		return true, ErrNotRenewed
	}
	held, err := s.try(ctx)
	switch {
	case ctx.Err() != nil:
		return true, nil // it may just have been given back
	case err == nil && !held:
		return true, ErrGone
	case err == nil:
		s.held = s.last
		s.due = s.held.Add(s.TTL / 3)
	default:
		s.due = time.Now().Add(s.TTL / 10)
	}
	return false, nil
}

func (s *standing) try(ctx context.Context) (held bool, err error) {
	if s.Margin > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, s.end())
		defer cancel()
	}
	return s.Renew(ctx)
}

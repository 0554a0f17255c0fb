// Package renew keeps a lease in Redis alive while its holder works: that of the cache's fill lock, and those of
// package lock.
package renew

import (
	"context"
	"errors"
	"time"
)

// recheck is how soon after a renewal a nudge may cause another one.
const recheck = 10 * time.Millisecond

// A Lease is something held on a server until a time that renewing puts off.
type Lease struct {
	TTL   time.Duration
	Taken time.Time                                        // when the command was sent by which it was taken
	Renew func(ctx context.Context) (held bool, err error) // one try; ctx bounds it
	Nudge <-chan struct{}                                  // makes Keep look soon whether the lease is still held; may be nil

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
	held, last := l.Taken, time.Now()
	due := held.Add(l.TTL / 3)
	timer := time.NewTimer(time.Until(due))
	defer timer.Stop()
	for {
		end, wake := held.Add(l.TTL-l.Margin), due
		enough := l.MaxHold > 0 && due.Sub(l.Taken) > l.MaxHold
		if enough || l.Margin > 0 && end.Before(due) {
			wake = end
		}
		timer.Reset(time.Until(wake))
		select {
		case <-ctx.Done():
			return nil
		case <-l.Nudge:
			if soon := last.Add(recheck); soon.Before(due) {
				due = soon
			}
			continue
		case <-timer.C:
		}
		last = time.Now()
		switch over := l.Margin > 0 && !last.Before(end); {
		case over && enough:
			return ErrMaxHold
		case over:
			return ErrNotRenewed
		}
		ok, err := l.try(ctx, end)
		switch {
		case ctx.Err() != nil:
			return nil // it may just have been given back
		case err == nil && !ok:
			return ErrGone
		case err == nil:
			held = last
			due = held.Add(l.TTL / 3)
		default:
			due = time.Now().Add(l.TTL / 10)
		}
	}
}

func (l Lease) try(ctx context.Context, end time.Time) (held bool, err error) {
	if l.Margin > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, end)
		defer cancel()
	}
	return l.Renew(ctx)
}

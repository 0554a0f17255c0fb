package singlefill

import (
	"context"
	"errors"
	"sync"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/lock"
)

// newFleet makes the semaphore of MaxFleetLoads; nil: no limit. Its leases end like the fill lock, and no load
// outlives LoadTimeout.
func newFleet[T any](rdb redis.UniversalClient, namespace string, s settings[T], failed func(ctx context.Context, op string, err error)) (*lock.Locker, error) {
	if s.maxFleetLoads == 0 {
		return nil, nil
	}
	return lock.NewSemaphore(rdb, namespace+":loads", s.maxFleetLoads, &lock.Options{
		TTL: s.lockTTL, MaxHold: s.loadTimeout, RedisTimeout: s.redisTimeout,
		Trace: &lock.Trace{RedisError: func(ctx context.Context, op string, err error) {
			failed(ctx, "fleet", err)
		}},
	})
}

// A claim is one flight's right to load: a place of MaxLoads in this process, then one of MaxFleetLoads in the
// fleet. Only the flight's own goroutine uses it. It is complete before the fill lock is taken, and given up
// while another process loads the key, so that nobody holds the one and waits for the other.
type claim struct {
	place   *flight.Place
	fleet   *lock.Locker // nil: no place in the fleet is needed, or it could not be asked for
	lease   *lock.Lease
	turn    chan struct{} // taken by the one flight of this process that asks for a lease; the others wait behind it
	waiting *fleetWait
	failed  func(ctx context.Context, op string, err error)
	running *sync.WaitGroup
}

// A fleetWait is the waiting for a lease. The others are set when done has a value.
type fleetWait struct {
	leave context.CancelFunc
	done  chan bool
	lease *lock.Lease
	err   error
}

func (c *Cache[T]) newClaim() *claim {
	return &claim{place: flight.NewPlace(c.places), fleet: c.fleet, turn: c.fleetTurn, failed: c.redisFailed, running: &c.flights.Running}
}

// try completes the claim if that takes no asking outside of this process.
func (m *claim) try() bool { return m.place.Try() && (m.fleet == nil || m.lease != nil) }

// queue stands in line for what is missing. When a value has come over the channel, enter is to be called.
func (m *claim) queue(ctx context.Context) <-chan bool {
	if m.fleet == nil || !m.place.Try() { // a place may have come free since try
		return m.place.Queue()
	}
	if m.waiting == nil {
		w, fleet := &fleetWait{done: make(chan bool, 1)}, m.fleet
		ctx, w.leave = context.WithCancel(ctx)
		m.running.Go(func() {
			select {
			case m.turn <- struct{}{}:
				w.lease, w.err = fleet.Acquire(ctx)
				<-m.turn
			case <-ctx.Done():
				w.err = ctx.Err()
			}
			w.done <- true
		})
		m.waiting = w
	}
	return m.waiting.done
}

// tryFleet completes the claim without waiting, though not without asking the fleet.
func (m *claim) tryFleet(ctx context.Context) bool {
	if m.try() || !m.place.Try() || m.waiting != nil {
		return m.try()
	}
	lease, err := m.fleet.TryAcquire(ctx)
	if errors.Is(err, lock.ErrBusy) {
		return false
	}
	m.take(ctx, lease, err)
	return true
}

// enter takes that for which queue has waited.
func (m *claim) enter(ctx context.Context) {
	w := m.waiting
	if w == nil {
		m.place.Enter()
		return
	}
	w.leave()
	m.waiting = nil
	m.take(ctx, w.lease, w.err)
}

// take notes a lease. If the fleet could not be asked there is no limit to it: each process still has its own,
// and a read that the source could serve is not to fail.
func (m *claim) take(ctx context.Context, lease *lock.Lease, err error) {
	m.lease = lease
	if err == nil {
		return
	}
	m.fleet = nil
	var reply redis.Error
	if !errors.Is(err, lock.ErrUnavailable) && !errors.Is(err, lock.ErrAmbiguous) && !errors.As(err, &reply) { // of these it has been told
		m.failed(ctx, "fleet", err)
	}
}

// exempt makes the claim need nothing: the load runs in the place of the one from inside of which it was asked for.
func (m *claim) exempt(ctx context.Context) {
	m.place.Exempt()
	m.leaveFleet(ctx)
}

// free gives back what there is of the claim.
func (m *claim) free(ctx context.Context) {
	m.place.Free()
	m.freeFleet(ctx)
}

// leaveFleet makes a place in this process enough.
func (m *claim) leaveFleet(ctx context.Context) {
	m.freeFleet(ctx)
	m.fleet = nil
}

// freeFleet works behind the call.
func (m *claim) freeFleet(ctx context.Context) {
	if w := m.waiting; w != nil {
		m.waiting = nil
		w.leave()
		m.running.Go(func() {
			<-w.done
			m.release(ctx, w.lease)
		})
	}
	if lease := m.lease; lease != nil {
		m.lease = nil
		m.running.Go(func() { m.release(ctx, lease) })
	}
}

// release gives a lease back. If that fails Redis has been told of, or it has ended by itself: the load was slower
// than LoadTimeout, or Redis has lost it.
func (m *claim) release(ctx context.Context, lease *lock.Lease) { _ = lease.Release(ctx) }

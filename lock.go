package singlefill

import (
	"context"
	"errors"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/event"
	"github.com/singlefill/singlefill/internal/fill"
	"github.com/singlefill/singlefill/internal/fleetlock"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/lock"
)

// A fleet limits the loads of all processes to MaxFleetLoads. While Redis does not answer there is no such
// limit: MaxLoads still bounds each process, and a read that the source could serve must not fail.
//
// A slot expires like the fill lock, and no load outlives LoadTimeout. A load acquires its slot
// before its fill lock, and releases it while another process loads the key. So no process holds
// one of the two and waits for the other.
type fleet struct {
	slots  fleetlock.Semaphore
	opts   settings
	client *client.Client
	fills  *flight.Fills[fill.Result]
	events *event.Sink
}

// newFleet returns the fleet of a namespace; f has all but its slots.
func newFleet(rdb redis.UniversalClient, namespace string, f fleet) (*fleet, error) {
	s, err := f.opts, error(nil)
	f.slots, err = fleetlock.New(rdb, fleetlock.Options{
		Name: namespace + ":loads",
		// No value key ends with ":loads", so this key is no key of a caller.
		Key:  namespace + ":{" + client.HashTag(namespace) + "}:loads",
		Size: s.maxFleetLoads, TTL: s.lockTTL, MaxHold: s.loadTimeout, RedisTimeout: s.redisTimeout,
		RedisError: func(ctx context.Context, _ string, err error) { f.events.RedisError(ctx, "fleet", err) },
	})
	return &f, err
}

// Lease acquires a slot and returns a function to release it.
func (f *fleet) Lease(ctx context.Context, wait bool) (release func(), ok bool) {
	give, err := f.slots.Acquire(ctx, false)
	for wait && errors.Is(err, lock.ErrBusy) && ctx.Err() == nil {
		// Redis may stop answering during the wait. To try reports that sooner than to wait.
		bounded, cancel := context.WithTimeout(ctx, 4*f.opts.redisTimeout)
		give, err = f.slots.Acquire(bounded, true)
		cancel()
		if err != nil && ctx.Err() == nil {
			give, err = f.slots.Acquire(ctx, false)
		}
	}
	switch {
	case errors.Is(err, lock.ErrBusy) || err != nil && ctx.Err() != nil:
		return nil, false
	case err != nil:
		f.events.LoadUnlimited()
		f.refused(ctx, err)
		return nil, true
	}
	return func() {
		// A failed release has been reported as a RedisError, or the lease has ended: the load
		// was slower than LoadTimeout, or Redis has lost the lease.
		f.fills.Behind(func() { _ = give(ctx) })
	}, true
}

// refused reports an error of the semaphore. Errors of its commands have been reported already.
func (f *fleet) refused(ctx context.Context, err error) {
	var reply redis.Error
	if !errors.Is(err, lock.ErrUnavailable) && !errors.Is(err, lock.ErrAmbiguous) && !errors.As(err, &reply) {
		f.events.RedisError(ctx, "fleet", err)
	}
}

// Away reports that no slot can be acquired now.
func (f *fleet) Away() bool { return f.client.AnyAway() }

// Behind runs a function that Close waits for.
func (f *fleet) Behind(run func()) { f.fills.Behind(run) }

// Aborting is closed when Shutdown waits for no load any more.
func (f *fleet) Aborting() <-chan struct{} { return f.fills.Aborting().Done() }

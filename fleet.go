package singlefill

import (
	"context"
	"errors"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/fleetlock"
	"github.com/singlefill/singlefill/lock"
)

// fleet returns a function that acquires a slot of MaxFleetLoads and returns a function to release
// it. While Redis does not answer there is no such limit: MaxLoads still bounds each process, and a
// read that the source could serve must not fail.
//
// A slot expires like the fill lock, and no load outlives LoadTimeout. A load acquires its slot
// before its fill lock, and releases it while another process loads the key. So no process holds
// one of the two and waits for the other.
func (c *engine) fleet(rdb redis.UniversalClient) (func(ctx context.Context, wait bool) (func(), bool), error) {
	s := c.opts
	newSemaphore := fleetlock.NewSemaphore.(func(redis.UniversalClient, string, string, int, *lock.Options) (*lock.Locker, error))
	// No value key ends with ":loads", so this key is no key of a caller.
	key := c.namespace + ":{" + client.HashTag(c.namespace) + "}:loads"
	slots, err := newSemaphore(rdb, c.namespace+":loads", key, s.maxFleetLoads, &lock.Options{
		TTL: s.lockTTL, MaxHold: s.loadTimeout, RedisTimeout: s.redisTimeout,
		Trace: &lock.Trace{RedisError: func(ctx context.Context, _ string, err error) { c.redisFailed(ctx, "fleet", err) }},
	})
	c.fleetSlots = slots
	return func(ctx context.Context, wait bool) (func(), bool) {
		lease, err := slots.TryAcquire(ctx)
		for wait && errors.Is(err, lock.ErrBusy) && ctx.Err() == nil {
			// Redis may stop answering during the wait. TryAcquire reports that sooner than
			// Acquire.
			bounded, cancel := context.WithTimeout(ctx, 4*s.redisTimeout)
			lease, err = slots.Acquire(bounded)
			cancel()
			if err != nil && ctx.Err() == nil {
				lease, err = slots.TryAcquire(ctx)
			}
		}
		switch {
		case errors.Is(err, lock.ErrBusy) || ctx.Err() != nil && lease == nil:
			return nil, false
		case err != nil:
			c.counters.loadsUnlimited.Add(1)
			c.fleetRefused(ctx, err)
			return nil, true
		}
		return func() {
			// A failed Release has been reported as a RedisError, or the lease has ended: the load
			// was slower than LoadTimeout, or Redis has lost the lease.
			c.fills.Behind(func() { _ = lease.Release(ctx) })
		}, true
	}, err
}

// fleetRefused reports an error of the semaphore. Errors of its commands have been reported by its
// Trace.
func (c *engine) fleetRefused(ctx context.Context, err error) {
	var reply redis.Error
	if !errors.Is(err, lock.ErrUnavailable) && !errors.Is(err, lock.ErrAmbiguous) && !errors.As(err, &reply) {
		c.redisFailed(ctx, "fleet", err)
	}
}

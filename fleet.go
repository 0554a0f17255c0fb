package singlefill

import (
	"context"
	"errors"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/lock"
)

// fleet returns a function that acquires a place of MaxFleetLoads, and what gives it back. If Redis cannot be asked
// there is no such limit: each process still has that of MaxLoads, and a read that the source could serve must not
// fail.
//
// A place ends like the fill lock, and no load outlives LoadTimeout. A load has its place before it takes its fill
// lock, and gives it back while another process loads the key, so that no process holds the one and waits for the other.
func (c *Cache[T]) fleet(rdb redis.UniversalClient) (func(ctx context.Context, wait bool) (func(), bool), error) {
	s := c.opts
	places, err := lock.NewSemaphore(rdb, c.namespace+":loads", s.maxFleetLoads, &lock.Options{
		TTL: s.lockTTL, MaxHold: s.loadTimeout, RedisTimeout: s.redisTimeout,
		Trace: &lock.Trace{RedisError: func(ctx context.Context, _ string, err error) { c.redisFailed(ctx, "fleet", err) }},
	})
	return func(ctx context.Context, wait bool) (func(), bool) {
		lease, err := places.TryAcquire(ctx)
		for wait && errors.Is(err, lock.ErrBusy) && ctx.Err() == nil {
			// Redis may stop answering while this waits, and only TryAcquire tells that soon.
			bounded, cancel := context.WithTimeout(ctx, 4*s.redisTimeout)
			lease, err = places.Acquire(bounded)
			cancel()
			if err != nil && ctx.Err() == nil {
				lease, err = places.TryAcquire(ctx)
			}
		}
		switch {
		case errors.Is(err, lock.ErrBusy) || ctx.Err() != nil && lease == nil:
			return nil, false
		case err != nil:
			c.fleetRefused(ctx, err)
			return nil, true
		}
		return func() {
			// If that fails Redis has been told of, or the lease has ended by itself: the load was slower
			// than LoadTimeout, or Redis has lost it.
			c.fills.Behind(func() { _ = lease.Release(ctx) })
		}, true
	}, err
}

// fleetRefused tells of an error that is none of a command, which has been told.
func (c *Cache[T]) fleetRefused(ctx context.Context, err error) {
	var reply redis.Error
	if !errors.Is(err, lock.ErrUnavailable) && !errors.Is(err, lock.ErrAmbiguous) && !errors.As(err, &reply) {
		c.redisFailed(ctx, "fleet", err)
	}
}

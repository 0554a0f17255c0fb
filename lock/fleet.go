package lock

import (
	"context"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/fleetlock"
)

// A fleetSemaphore is a semaphore as package singlefill knows it.
type fleetSemaphore struct{ *Locker }

func init() {
	fleetlock.New = func(rdb redis.UniversalClient, o fleetlock.Options) (fleetlock.Semaphore, error) {
		l, err := newLocker(rdb, o.Name, semaphore{o.Size}, &Options{
			TTL: o.TTL, MaxHold: o.MaxHold, RedisTimeout: o.RedisTimeout, Trace: &Trace{RedisError: o.RedisError},
		}, func(string) keys { return keysAt(o.Key) })
		return fleetSemaphore{l}, err
	}
}

func (s fleetSemaphore) Acquire(ctx context.Context, wait bool) (release func(ctx context.Context) error, err error) {
	lease, err := s.acquire(ctx, wait)
	return lease.Release, err
}

// Package fleetlock is what package singlefill knows of the semaphore of MaxFleetLoads. Package lock makes it. Its
// keys begin with the namespace of the cache, so a single ACL pattern admits all keys of a namespace; the keys of
// other locks follow from their names.
package fleetlock

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"
)

// A Semaphore is a lock.Locker.
type Semaphore interface {
	// Acquire acquires a slot, as TryAcquire or Acquire of a Locker does, and returns the function that
	// releases it.
	Acquire(ctx context.Context, wait bool) (release func(ctx context.Context) error, err error)

	// Check returns an error if Redis refuses what the semaphore needs.
	Check(ctx context.Context) error
}

// Options of a semaphore.
type Options struct {
	Name string // in errors
	Key  string // the first of its keys, with a hash tag
	Size int    // while processes disagree on it, the largest one counts

	TTL, MaxHold, RedisTimeout time.Duration // as in lock.Options

	// RedisError is called for every command that failed.
	RedisError func(ctx context.Context, op string, err error)
}

// New makes a semaphore. Package lock sets it: to call lock here would be an import cycle. A semaphore of
// lock.NewSemaphore would not do: its keys begin with its own name, not with the namespace.
var New func(rdb redis.UniversalClient, opts Options) (Semaphore, error)

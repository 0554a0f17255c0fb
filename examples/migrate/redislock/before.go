// Package redislock replaces github.com/bsm/redislock by package lock.
package redislock

import (
	"context"
	"errors"
	"time"

	"github.com/bsm/redislock"
	"github.com/redis/go-redis/v9"
)

// Before runs fn while this process holds the lock. It waits until ctx ends, or for 10 s if ctx has
// no deadline.
func Before(ctx context.Context, rdb redis.UniversalClient, fn func(context.Context) error) (err error) {
	held, err := redislock.Obtain(ctx, rdb, "jobs", 10*time.Second, &redislock.Options{
		RetryStrategy: redislock.LinearBackoff(100 * time.Millisecond),
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, held.Release(context.WithoutCancel(ctx))) }()
	return fn(ctx)
}

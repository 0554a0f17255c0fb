package redislock

import (
	"context"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill/lock"
)

// After runs fn while this process holds the lock. It waits until ctx ends. The context of fn ends
// when the lock is lost.
func After(ctx context.Context, rdb redis.UniversalClient, fn func(context.Context) error) error {
	jobs, err := lock.NewMutex(rdb, "jobs", nil)
	if err != nil {
		return err
	}
	return jobs.Do(ctx, fn)
}

// Both excludes the processes of Before and those of After. It takes the locks in one order, so
// that two processes never wait for each other.
func Both(ctx context.Context, rdb redis.UniversalClient, fn func(context.Context) error) error {
	return Before(ctx, rdb, func(ctx context.Context) error {
		return After(ctx, rdb, fn)
	})
}

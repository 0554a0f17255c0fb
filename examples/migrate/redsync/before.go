// Package redsync replaces github.com/go-redsync/redsync/v4 by package lock.
package redsync

import (
	"context"
	"errors"

	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
)

// Before runs fn while this process holds the lock. It tries 32 times, for some five seconds.
func Before(ctx context.Context, rdb redis.UniversalClient, fn func(context.Context) error) (err error) {
	mutex := redsync.New(goredis.NewPool(rdb)).NewMutex("jobs")
	if err := mutex.LockContext(ctx); err != nil {
		return err
	}
	defer func() {
		_, unlockErr := mutex.UnlockContext(context.WithoutCancel(ctx))
		err = errors.Join(err, unlockErr)
	}()
	return fn(ctx)
}

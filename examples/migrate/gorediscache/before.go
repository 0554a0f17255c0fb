// Package gorediscache replaces github.com/go-redis/cache/v9.
package gorediscache

import (
	"context"
	"time"

	"github.com/go-redis/cache/v9"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/examples/migrate/users"
)

// Before caches users with go-redis/cache.
type Before struct {
	db    *users.DB
	cache *cache.Cache
}

// NewBefore keeps values in Redis, and for a minute in memory.
func NewBefore(rdb redis.UniversalClient, db *users.DB) *Before {
	return &Before{db, cache.New(&cache.Options{
		Redis:      rdb,
		LocalCache: cache.NewTinyLFU(10_000, time.Minute),
	})}
}

func (b *Before) User(ctx context.Context, id string) (users.User, error) {
	var user users.User
	err := b.cache.Once(&cache.Item{
		Ctx:   ctx,
		Key:   "user:" + id,
		Value: &user,
		TTL:   5 * time.Minute,
		Do: func(item *cache.Item) (any, error) {
			return b.db.User(item.Context(), id)
		},
	})
	return user, err
}

func (b *Before) Forget(ctx context.Context, id string) error {
	return b.cache.Delete(ctx, "user:"+id)
}

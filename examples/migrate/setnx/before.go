// Package setnx replaces singleflight with a lock by SETNX, written by hand.
package setnx

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"time"

	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/singleflight"

	"github.com/singlefill/singlefill/examples/migrate/users"
)

// Before caches users by hand.
type Before struct {
	db      *users.DB
	rdb     redis.UniversalClient
	lockTTL time.Duration
	group   singleflight.Group
}

func NewBefore(rdb redis.UniversalClient, db *users.DB, lockTTL time.Duration) *Before {
	return &Before{db: db, rdb: rdb, lockTTL: lockTTL}
}

func (b *Before) User(ctx context.Context, id string) (users.User, error) {
	user, err, _ := b.group.Do(id, func() (any, error) { return b.fill(ctx, id) })
	if err != nil {
		return users.User{}, err
	}
	return user.(users.User), nil
}

var release = redis.NewScript(`
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0`)

func (b *Before) fill(ctx context.Context, id string) (user users.User, err error) {
	key, lock, token := "user:"+id, "user:"+id+":lock", rand.Text()
	for {
		text, err := b.rdb.Get(ctx, key).Bytes()
		if err == nil {
			return user, json.Unmarshal(text, &user)
		}
		if !errors.Is(err, redis.Nil) {
			return user, err
		}
		locked, err := b.rdb.SetNX(ctx, lock, token, b.lockTTL).Result()
		if err != nil {
			return user, err
		}
		if locked {
			break
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return user, ctx.Err()
		}
	}
	defer release.Run(ctx, b.rdb, []string{lock}, token)

	user, err = b.db.User(ctx, id)
	if err != nil {
		return user, err
	}
	text, err := json.Marshal(user)
	if err != nil {
		return user, err
	}
	return user, b.rdb.Set(ctx, key, text, 5*time.Minute).Err()
}

func (b *Before) Forget(ctx context.Context, id string) error {
	return b.rdb.Del(ctx, "user:"+id).Err()
}

// Package rockscache replaces github.com/dtm-labs/rockscache.
package rockscache

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/dtm-labs/rockscache"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/examples/migrate/users"
)

// Before caches users with rockscache.
type Before struct {
	db    *users.DB
	cache *rockscache.Client
}

// NewBefore serves the old value after a Forget while a new one is loaded, unless strong is set.
func NewBefore(rdb redis.UniversalClient, db *users.DB, strong bool) *Before {
	opts := rockscache.NewDefaultOptions()
	opts.StrongConsistency = strong
	return &Before{db, rockscache.NewClient(rdb, opts)}
}

func (b *Before) User(ctx context.Context, id string) (users.User, error) {
	text, err := b.cache.Fetch2(ctx, "user:"+id, 5*time.Minute, func() (string, error) {
		user, err := b.db.User(ctx, id)
		if errors.Is(err, users.ErrNoUser) {
			return "", nil // remembered, for a minute
		}
		if err != nil {
			return "", err
		}
		text, err := json.Marshal(user)
		return string(text), err
	})
	if err != nil {
		return users.User{}, err
	}
	if text == "" {
		return users.User{}, users.ErrNoUser
	}
	var user users.User
	err = json.Unmarshal([]byte(text), &user)
	return user, err
}

func (b *Before) Forget(ctx context.Context, id string) error {
	return b.cache.TagAsDeleted2(ctx, "user:"+id)
}

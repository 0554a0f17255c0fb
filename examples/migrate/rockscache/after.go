package rockscache

import (
	"context"
	"errors"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill"

	"github.com/singlefill/singlefill/examples/migrate/users"
)

// After caches users with singlefill.
type After struct {
	db     *users.DB
	cache  *singlefill.Cache[users.User]
	strong bool
}

// NewAfter serves the old value after a Forget while a new one is loaded, unless strong is set.
func NewAfter(rdb redis.UniversalClient, db *users.DB, strong bool) (*After, error) {
	c, err := singlefill.New[users.User](rdb, "users", 5*time.Minute, &singlefill.Options[users.User]{
		Codec:                singlefill.JSON, // as before; MsgPack ignores json tags
		StaleWhileRevalidate: 10 * time.Second,
	})
	if err != nil {
		return nil, err
	}
	return &After{db, c, strong}, nil
}

func (a *After) User(ctx context.Context, id string) (users.User, error) {
	user, err := a.cache.GetOrLoad(ctx, id, func(ctx context.Context, id string) (users.User, error) {
		user, err := a.db.User(ctx, id)
		if errors.Is(err, users.ErrNoUser) {
			return user, singlefill.ErrNotFound // remembered, for a minute
		}
		return user, err
	})
	if errors.Is(err, singlefill.ErrNotFound) {
		return user, users.ErrNoUser
	}
	return user, err
}

func (a *After) Forget(ctx context.Context, id string) error {
	if a.strong {
		return a.cache.Delete(ctx, id)
	}
	return a.cache.Expire(ctx, id)
}

func (a *After) Close() error { return a.cache.Close() }

// Package rueidisaside replaces github.com/redis/rueidis/rueidisaside.
package rueidisaside

import (
	"context"
	"encoding/json"
	"time"

	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidisaside"

	"github.com/singlefill/singlefill/examples/migrate/users"
)

// Before caches users with rueidisaside.
type Before struct {
	db    *users.DB
	cache rueidisaside.CacheAsideClient
}

func NewBefore(addr string, db *users.DB) (*Before, error) {
	c, err := rueidisaside.NewClient(rueidisaside.ClientOption{
		ClientOption: rueidis.ClientOption{InitAddress: []string{addr}},
		ClientTTL:    5 * time.Second,
	})
	if err != nil {
		return nil, err
	}
	return &Before{db, c}, nil
}

func (b *Before) User(ctx context.Context, id string) (users.User, error) {
	text, err := b.cache.Get(ctx, 5*time.Minute, "user:"+id, func(ctx context.Context, _ string) (string, error) {
		user, err := b.db.User(ctx, id)
		if err != nil {
			return "", err
		}
		text, err := json.Marshal(user)
		return string(text), err
	})
	if err != nil {
		return users.User{}, err
	}
	var user users.User
	err = json.Unmarshal([]byte(text), &user)
	return user, err
}

func (b *Before) Forget(ctx context.Context, id string) error {
	return b.cache.Del(ctx, "user:"+id)
}

func (b *Before) Close() { b.cache.Close() }

package revoke

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/masters"
)

const (
	// planted is how many keys prove that SCAN finds keys. A client that sends each step to any of two
	// servers finds all of them once in 2³² times.
	planted = 32

	// plantedLife is longer than SCAN may take. As a rule Clear removes these keys as it does values.
	plantedLife = 24 * time.Hour
)

// plant stores keys of values that no caller can use.
func (s *Space) plant(ctx context.Context) ([]string, error) {
	group, keys := rand.Text(), make([]string, planted)
	for i := range keys {
		keys[i] = fmt.Sprintf("%s%s:%02d}", s.plantedPrefix(), group, i)
	}
	data, err := entry.Entry{FreshUntil: time.Now(), WrittenAt: time.Now(), NotFound: true}.Encode()
	if err != nil {
		return nil, err
	}
	_, err = client.Each(ctx, s.keys.client, clearing, keys, func(p redis.Pipeliner, key string) *redis.StatusCmd {
		return p.Set(ctx, key, data, plantedLife)
	})
	return keys, err
}

// plantedPrefix is no prefix of a value key of a caller: see HashTag.
func (s *Space) plantedPrefix() string { return s.namespace + ":{%check:" }

// Planted reports whether a key is one of those that prove that SCAN finds keys.
func (s *Space) Planted(key string) bool { return strings.HasPrefix(key, s.plantedPrefix()) }

// prove returns an error if some of the values may be left. SCAN should have found the keys that this client
// had stored before: a hook of the user's client may change the names of keys and not the pattern, and some
// types of clients send each step of SCAN to any server.
func (s *Space) prove(ctx context.Context, layout masters.Layout, keys []string) error {
	changed, err := client.Do(ctx, s.keys.client, clearing, "", func(ctx context.Context) (bool, error) {
		return s.masters.Changed(ctx, layout)
	})
	left, leftErr := s.left(ctx, keys)
	switch err = cmp.Or(err, leftErr); {
	case err != nil:
		return err
	case changed:
		return errors.New("slots of the Cluster have moved or are being moved, or a server was replaced or restarted: " +
			"call it again when that is over")
	case left > 0:
		return fmt.Errorf("SCAN has not found %d of %d keys that rdb, a %T, had stored: a hook changes the names of keys "+
			"but not the pattern, or rdb sends the steps of SCAN to several servers", left, planted, s.keys.client.Redis)
	}
	return nil
}

// left returns how many of the keys exist. It makes them end, by a command that no replica answers and
// that may be repeated.
func (s *Space) left(ctx context.Context, keys []string) (left int, err error) {
	cmds, err := client.Each(ctx, s.keys.client, clearing, keys, func(p redis.Pipeliner, key string) *redis.BoolCmd {
		return p.PExpire(ctx, key, s.lockTTL)
	})
	for _, cmd := range cmds {
		if cmd.Val() {
			left++
		}
	}
	return left, err
}

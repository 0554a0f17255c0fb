package singlefill

import (
	"context"
	"crypto/rand"
	"fmt"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
)

// checkNames returns an error if keys and channels have other names for Redis than for this process: a hook
// of the user's client changes some of them only, or the client spreads keys over several servers without
// telling.
func (c *check) checkNames(ctx context.Context, masters []client.Master) error {
	group := c.namespace + ":check:" + rand.Text() + ":"
	const several = 32 // as many as Clear proves
	var keys []string
	for i := range several {
		keys = append(keys, fmt.Sprint(group, "{", i, "}"))
	}
	if len(masters) > 1 || masters[0].Key() != "" {
		keys = keys[:1] // a script cannot ask for keys of several servers
	}
	_, err := client.Each(ctx, c.client, "check", keys, func(p redis.Pipeliner, key string) *redis.StatusCmd {
		return p.Set(ctx, key, "", c.lockTTL)
	})
	if err != nil {
		return c.refused("check", err)
	}
	defer func() {
		// Failures are traced.
		_, _ = client.Each(ctx, c.client, "check", keys, func(p redis.Pipeliner, key string) *redis.IntCmd { return p.Del(ctx, key) })
	}()
	if err := c.checkKeyNames(ctx, masters, keys, group); err != nil {
		return c.refused("names of keys", err)
	}
	if err := client.CheckWakes(ctx, c.client, c.checkKey()); err != nil {
		return c.refused("wake", err)
	}
	return nil
}

const namesLua = `
local found = {}
for _, key in ipairs(KEYS) do
  if redis.call('GET', key) then
    found[#found + 1] = key
  end
end
return found`

// checkKeyNames checks that scripts and SCAN find keys that exist. SCAN may have to look at all keys of the
// database: it is asked only if a script does not show their names.
func (c *check) checkKeyNames(ctx context.Context, masters []client.Master, keys []string, group string) error {
	seen, err := client.Do(ctx, c.client, "check", keys[0], func(ctx context.Context) ([]string, error) {
		seen, err := c.client.Redis.Eval(ctx, namesLua, keys).StringSlice()
		if client.ScriptsRefused(err) {
			return nil, nil
		}
		if err == nil && len(seen) < len(keys) {
			err = fmt.Errorf("a script finds %d of %d keys that SET has stored: a hook changes the names of some keys only, or rdb, a %T, spreads them over several servers", len(seen), len(keys), c.client.Redis)
		}
		return seen, err
	})
	if err != nil || slices.Equal(seen, keys) {
		return err
	}
	type step struct {
		keys   []string
		cursor uint64
	}
	found := make(map[string]bool)
	for _, master := range masters {
		for cursor := uint64(0); ; {
			s, err := client.Do(ctx, c.client, "clear", "", func(ctx context.Context) (s step, err error) {
				s.keys, s.cursor, err = master.Scan(ctx, cursor, client.Literal(group)+"*", client.ScanCount)
				return s, err
			})
			if err != nil {
				return err
			}
			for _, key := range s.keys {
				found[key] = strings.HasPrefix(key, group)
			}
			if cursor = s.cursor; cursor == 0 || len(found) == len(keys) {
				break
			}
		}
	}
	if len(found) < len(keys) {
		return fmt.Errorf("SCAN finds %d of %d keys that exist: a hook of rdb, a %T, changes the names of keys but not the pattern", len(found), len(keys), c.client.Redis)
	}
	return nil
}

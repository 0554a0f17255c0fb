package singlefill

import (
	"context"
	"crypto/rand"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/masters"
	"github.com/singlefill/singlefill/internal/wake"
)

// checkNames returns an error if keys and channels have other names for Redis than for this process: a hook
// of the user's client changes some of them only, or the client spreads keys over several servers without
// telling.
func (c *check) checkNames(ctx context.Context, servers []masters.Master) error {
	group := c.namespace + ":check:" + rand.Text() + ":"
	const several = 32 // as many as Clear proves
	var keys []string
	for i := range several {
		keys = append(keys, fmt.Sprint(group, "{", i, "}"))
	}
	if len(servers) > 1 || servers[0].Key() != "" {
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
	if err := c.checkKeyNames(ctx, servers, keys, group); err != nil {
		return c.refused("names of keys", err)
	}
	if err := c.checkWakes(ctx); err != nil {
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
func (c *check) checkKeyNames(ctx context.Context, servers []masters.Master, keys []string, group string) error {
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
	for _, master := range servers {
		for cursor := uint64(0); ; {
			s, err := client.Do(ctx, c.client, "clear", "", func(ctx context.Context) (s step, err error) {
				s.keys, s.cursor, err = master.Scan(ctx, cursor, masters.Literal(group)+"*", masters.ScanCount)
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

// checkWakes returns an error if messages of scripts do not arrive, although the server lets this user
// subscribe and publish.
func (c *check) checkWakes(ctx context.Context) error {
	key := c.checkKey()
	arrived := make(chan struct{}, 1)
	s := c.client.Listen(key, func(_ string, ok bool) {
		if ok {
			select {
			case arrived <- struct{}{}:
			default:
			}
		}
	})
	if s == nil {
		return nil
	}
	defer c.client.StopListening()
	defer s.Close()
	for end := time.Now().Add(c.client.Timeout); s.Pending() && time.Now().Before(end); {
		if !client.Sleep(ctx, time.Millisecond) {
			return ctx.Err()
		}
	}
	since := time.Now()
	if !s.Complete(since) { // the server refuses, or the client cannot subscribe: waiters poll
		return nil
	}
	heard, err := client.Do(ctx, c.client, "wake", key, func(ctx context.Context) (int64, error) {
		heard, err := c.client.Redis.Eval(ctx, wake.Lua+"local n = wake(KEYS[1], '') return type(n) == 'number' and n or -1", []string{key}).Int64()
		if client.ScriptsRefused(err) {
			return -1, nil
		}
		return heard, err
	})
	if err != nil || heard != 0 {
		return err
	}
	select { // the server counts its own clients: in a Cluster before Redis 7 another node may have sent it
	case <-arrived:
		return nil
	case <-time.After(c.client.Timeout):
	case <-ctx.Done():
		return ctx.Err()
	}
	if !s.Complete(since) {
		return nil
	}
	return fmt.Errorf("no client has received a message on the channel of a key: a hook of rdb, a %T, changes the names of keys but not those of channels", c.client.Redis)
}

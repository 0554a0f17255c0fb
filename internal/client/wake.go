package client

import (
	"context"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/wake"
)

// Wake wakes the waiters of keys, which are on one node. The scripts do so by themselves. Without
// scripts no waiter is woken.
func Wake(ctx context.Context, c *Client, keys []string) {
	_, _ = Do(ctx, c, "wake", keys[0], func(ctx context.Context) ([]redis.Cmder, error) { // failures are traced
		cmds, err := c.Redis.Pipelined(ctx, func(p redis.Pipeliner) error {
			for _, key := range keys { // EVAL, since a pipeline cannot fall back from EVALSHA
				p.Eval(ctx, wake.Lua+"wake(KEYS[1], '') return 1", []string{key})
			}
			return nil
		})
		if ScriptsRefused(err) {
			err = nil
		}
		return cmds, err
	})
}

// CheckWakes returns an error if messages of scripts do not arrive, although the server lets this user
// subscribe and publish.
func CheckWakes(ctx context.Context, c *Client, key string) error {
	arrived := make(chan struct{}, 1)
	s := c.Listen(key, func(_ string, ok bool) {
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
	defer c.StopListening()
	defer s.Close()
	for end := time.Now().Add(c.Timeout); s.Pending() && time.Now().Before(end); {
		if !Sleep(ctx, time.Millisecond) {
			return ctx.Err()
		}
	}
	since := time.Now()
	if !s.Complete(since) { // the server refuses, or the client cannot subscribe: waiters poll
		return nil
	}
	heard, err := Do(ctx, c, "wake", key, func(ctx context.Context) (int64, error) {
		heard, err := c.Redis.Eval(ctx, wake.Lua+"local n = wake(KEYS[1], '') return type(n) == 'number' and n or -1", []string{key}).Int64()
		if ScriptsRefused(err) {
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
	case <-time.After(c.Timeout):
	case <-ctx.Done():
		return ctx.Err()
	}
	if !s.Complete(since) {
		return nil
	}
	return fmt.Errorf("no client has received a message on the channel of a key: a hook of rdb, a %T, changes the names of keys but not those of channels", c.Redis)
}

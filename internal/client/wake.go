package client

import (
	"context"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/wake"
)

// Wake wakes the waiters of keys, which are on one node. The scripts do so by themselves. Without
// scripts no waiter is woken.
func Wake(ctx context.Context, c *Client, keys []string) {
	_, _ = Do(ctx, c, "wake", keys[0], func(ctx context.Context) ([]redis.Cmder, error) { // failures are traced
		cmds, err := Pipelined(ctx, c.Redis, func(p redis.Pipeliner) {
			for _, key := range keys { // EVAL, since a pipeline cannot fall back from EVALSHA
				p.Eval(ctx, wake.Lua+"wake(KEYS[1], '') return 1", []string{key})
			}
		})
		if ScriptsRefused(err) {
			err = nil
		}
		return cmds, err
	})
}

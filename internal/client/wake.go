package client

import (
	"context"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/wake"
)

// Listen listens for wake-ups of key at its node. It returns nil if there is no way to listen.
func (c *Client) Listen(key string, tell func(message string, ok bool)) *wake.Subscription {
	n := c.nodeOf(key)
	switch n.rdb.(type) {
	case *redis.ClusterClient, *redis.Ring: // which of their servers has the key is not known
		return nil
	}
	return n.wakes.Listen(key, tell)
}

// Wake wakes the waiters of keys, which are on one node. The scripts do so by themselves. Without
// scripts no waiter is woken.
func (c *Client) Wake(ctx context.Context, keys []string) {
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

// StopListening closes the connections for wake-ups that no waiter needs now.
func (c *Client) StopListening() {
	c.node.wakes.CloseIdle()
	c.nodes.of.Range(func(_, n any) bool {
		n.(*node).wakes.CloseIdle()
		return true
	})
}

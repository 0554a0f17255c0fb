package client

import (
	"context"

	"github.com/redis/go-redis/v9"
)

// Each sends a command for each key, in a pipeline for each node.
func Each[C redis.Cmder](ctx context.Context, c *Client, op string, keys []string,
	send func(p redis.Pipeliner, key string) C) (cmds []C, err error) {
	for _, keys := range ByNode(c, keys, func(key string) string { return key }) {
		some, err := Do(ctx, c, op, keys[0], func(ctx context.Context) (cmds []C, err error) {
			_, err = Pipelined(ctx, c.Redis, func(p redis.Pipeliner) {
				for _, key := range keys {
					cmds = append(cmds, send(p, key))
				}
			})
			return cmds, err
		})
		if err != nil {
			return nil, err
		}
		cmds = append(cmds, some...)
	}
	return cmds, nil
}

package client

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"
)

// Each sends a command for each key, in a pipeline for each node. It sends a pipeline again that is not answered,
// within the timeout in all.
func Each[C redis.Cmder](ctx context.Context, c *Client, op string, keys []string,
	send func(p redis.Pipeliner, key string) C) (cmds []C, err error) {
	for _, keys := range ByNode(c, keys, func(key string) string { return key }) {
		some, err := Retry(ctx, c.Timeout, Unreachable, func(within time.Duration) ([]C, error) {
			return DoWithin(ctx, c, Command{Op: op, Key: keys[0], Within: within}, func(ctx context.Context) (cmds []C, err error) {
				_, err = c.Redis.Pipelined(ctx, func(p redis.Pipeliner) error {
					for _, key := range keys {
						cmds = append(cmds, send(p, key))
					}
					return nil
				})
				return cmds, err
			})
		})
		if err != nil {
			return nil, err
		}
		cmds = append(cmds, some...)
	}
	return cmds, nil
}

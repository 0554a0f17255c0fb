package client

import (
	"context"
	"sync"

	"github.com/redis/go-redis/v9"
)

// Masters returns a client for each server that holds a part of the keys.
func (c *Client) Masters(ctx context.Context) ([]redis.Cmdable, error) {
	var mu sync.Mutex
	var masters []redis.Cmdable
	add := func(_ context.Context, master *redis.Client) error {
		mu.Lock()
		defer mu.Unlock()
		masters = append(masters, master)
		return nil
	}
	switch rdb := c.Redis.(type) {
	case *redis.ClusterClient:
		err := rdb.ForEachMaster(ctx, add)
		return masters, err
	case *redis.Ring:
		err := rdb.ForEachShard(ctx, add)
		return masters, err
	}
	return []redis.Cmdable{c.Redis}, nil
}

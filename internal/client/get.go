package client

import (
	"context"
	"errors"
	"time"

	"github.com/redis/go-redis/v9"
)

// Get is Do of a GET. While the server is away it sends nothing. asked is how long the server has been asked. ahead
// is a command that goes just ahead of the GET in the same pipeline, or nil. Unless Get returns an
// error, it has its reply.
func (c *Client) Get(ctx context.Context, ahead redis.Cmder, key string) (data []byte, asked time.Duration, err error) {
	what := Command{Op: "get", Key: key, Within: c.Timeout, Again: Always, Spared: true, Cached: c.traits.cached}
	r, asked := tries(ctx, c, what, func() parcel {
		p := parcel{cmd: redis.NewStringCmd(ctx, "get", key), ahead: ahead}
		if c.traits.fromMasters {
			p.more = []redis.Cmder{atMaster(ctx, key)}
		}
		return p
	}, func(_ context.Context, p parcel) ([]byte, error) { return p.cmd.(*redis.StringCmd).Bytes() })
	return r.Value, asked, r.Err
}

// GetMany sends one GET for each of keys, all of one node, in one pipeline. It returns an error if
// no key was answered; otherwise each reply has its own. Like Get it sends nothing while the server
// is away. asked is how long the server has been asked. ahead are commands to be sent just ahead of
// the GETs, one for each key, or nil.
func (c *Client) GetMany(ctx context.Context, ahead []redis.Cmder, keys []string) (replies []*redis.StringCmd, asked time.Duration, err error) {
	what := Command{Op: "get", Key: keys[0], Keys: len(keys), Within: c.Timeout, Again: Always, Spared: true, Cached: c.traits.cached}
	r, asked := tries(ctx, c, what, nothing, func(ctx context.Context, _ parcel) ([]*redis.StringCmd, error) {
		replies := make([]*redis.StringCmd, len(keys))
		_, _ = Pipelined(ctx, c.Redis, func(p redis.Pipeliner) { // each reply has its error
			for i, key := range keys {
				if ahead != nil {
					_ = p.Process(ctx, ahead[i])
				}
				replies[i] = p.Get(ctx, key)
			}
			if c.traits.fromMasters {
				_ = p.Process(ctx, atMaster(ctx, keys[0]))
			}
		})
		for _, reply := range replies {
			if err := reply.Err(); err != nil && !errors.Is(err, redis.Nil) {
				return replies, err
			}
		}
		return replies, nil
	})
	for _, reply := range r.Value {
		if !Unreachable(reply.Err()) {
			return r.Value, 0, nil
		}
	}
	return nil, asked, r.Err
}

// ReadFromMasters makes Get and GetMany read what the masters have, unless the type of the user's client
// shows that it does so anyway. A client within another type may read from replicas, or keep replies in
// memory. But a pipeline with a command that writes goes to the masters, and its replies are not kept.
func (c *Client) ReadFromMasters() {
	switch c.Redis.(type) {
	case *redis.Client, *redis.ClusterClient, *redis.Ring:
	default:
		c.traits.fromMasters = true
	}
}

// atMaster returns a command that has a GET of key that goes just ahead of it read at the master.
func atMaster(ctx context.Context, key string) redis.Cmder {
	return redis.NewIntCmd(ctx, "del", key+":none") // no key ends like this
}

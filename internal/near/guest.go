package near

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
)

// A guest is a process without memory, in a namespace where others may have it. It appends no records. It removes
// their log behind what it has invalidated, so they drop their memory. No call waits for that, and it needs only rights
// that Delete needs, too.
type guest struct {
	untold atomic.Int64 // invalidations since the guest began to look for the log
	looked time.Time    // only the goroutine that looks uses it
}

// lookEvery is the least time between two looks, except for the one of Close.
const lookEvery = time.Second

// NewGuest returns the log of a process without memory.
func NewGuest(c *client.Client, key string, background func(run func(closing <-chan struct{}))) *Log {
	return &Log{client: c, key: key, background: background, guest: new(guest)}
}

// tell tells the others of an invalidation that may have been executed: within lookEvery, or when the server answers
// again.
func (l *Log) tell() {
	g := l.guest
	if g.untold.Add(1) > 1 {
		return
	}
	l.background(func(closing <-chan struct{}) {
		for {
			_, open := pause(time.Until(g.looked.Add(lookEvery)), nil, closing)
			n, err := g.untold.Load(), l.client.Refusal(l.key)
			if g.looked = time.Now(); err == nil {
				err = l.removeFound()
			}
			away := client.Unreachable(err)
			if away && (!open || errors.Is(err, redis.ErrClosed)) || !away && g.untold.CompareAndSwap(n, 0) {
				return
			}
		}
	})
}

// removeFound removes the log, if there is one: what has no TTL is the key of another program. A process that begins a
// log has nothing in memory that it read before.
func (l *Log) removeFound() error {
	life, err := client.Do(context.Background(), l.client, op, l.key, func(ctx context.Context) (time.Duration, error) {
		var life *redis.DurationCmd
		_, err := client.Pipelined(ctx, l.client.Redis, func(p redis.Pipeliner) {
			life = p.PTTL(ctx, l.key)
			p.Del(ctx, l.key+":{"+l.key+"}:none") // a write, which no replica answers
		})
		return life.Val(), err
	})
	if err != nil || life <= 0 {
		return err
	}
	return l.Reset(context.Background())
}

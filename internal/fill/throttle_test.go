package fill_test

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// A process does not overload its own server with the pipelines of many keys. A busy server executes one at a time, and
// so long that it answers a few of them within RedisTimeout, but not one for each connection of the pool: two of them
// are on their way at a time. Each key is loaded once, with its lock, and stored. At a quick server there are more.
//
//fault:own-load
func TestSet_LoadsItsOwnServer(t *testing.T) {
	t.Parallel()
	const keys, batch = 2000, 20
	for name, test := range map[string]struct {
		takes time.Duration
		most  int64
	}{
		"busy":  {cachetest.Patient / 7, 2},
		"quick": {cachetest.Patient / 1000, 5},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m, _ := redistest.StartMini(t)
				rdb := redistest.NewMiniClient(t, m, func(o *redis.Options) { o.PoolSize = 20 })
				server := make(chan struct{}, 1)
				var now, most atomic.Int64
				rdb.AddHook(redistest.Pipelines(func(ctx context.Context, cmds []redis.Cmder, next redis.ProcessPipelineHook) error {
					if len(cmds) < batch {
						return next(ctx, cmds)
					}
					most.Store(max(most.Load(), now.Add(1)))
					defer now.Add(-1)
					select {
					case server <- struct{}{}:
					case <-ctx.Done():
						return ctx.Err()
					}
					time.Sleep(test.takes)
					<-server
					return next(ctx, cmds)
				}))
				opts := cachetest.Raw
				opts.MaxBatch, opts.RedisTimeout = batch, cachetest.Patient
				c := cachetest.NewCache(t, rdb, &opts)
				got, err := c.GetOrLoadMany(t.Context(), keysOf(keys), loadAll)
				if len(got) != keys || err != nil {
					t.Errorf("%d values, %v", len(got), err)
				}
				if s := c.Stats(); s.Loads != keys || s.Stored != keys || s.LoadsUnlocked+s.BreakerOpens != 0 {
					t.Errorf("%+v", s)
				}
				if most.Load() != test.most {
					t.Errorf("%d pipelines were on their way at a time, want %d", most.Load(), test.most)
				}
			})
		})
	}
}

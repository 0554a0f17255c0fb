package stale_test

import (
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// An early refresh is one load in the fleet, and no reader waits for it.
func TestEarlyRefresh_OneLoad(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
		opts := cachetest.StaleOptions(0, 0)
		opts.EarlyRefresh = 1e9 // every hit, if the load took any time
		opts.TTLFunc = func(string, string) time.Duration { return 10 * time.Second }
		fleet := cachetest.NewCaches(t, m, redistest.Namespace(t), 2, opts)
		src := &cachetest.TimedSource{Takes: 5 * time.Second, Value: "v1"}
		cachetest.Ask(t.Context(), fleet[0], "k", src.Load).Want(t, "a load", cachetest.Answer{Value: "v1", Took: src.Takes})
		src.Value = "v2"
		begun := time.Now()
		// Each read is a GET. The process that does not load asks for the lock once a second, by a script
		// of several commands.
		cachetest.WantCommands(t, m, "hammered", 800, 840, func() {
			for time.Since(begun) < 4*time.Second {
				for _, c := range fleet {
					cachetest.Ask(t.Context(), c, "k", src.Load).Want(t, "hammered", cachetest.Answer{
						Value: "v1", Info: singlefill.ValueInfo{Age: time.Since(begun)},
					})
				}
				time.Sleep(10 * time.Millisecond)
			}
		})
		src.WantLoads(t, "hammered", 2)
		time.Sleep(2 * time.Second)
		for _, c := range fleet {
			v, err := c.Get(t.Context(), "k")
			cachetest.WantValue(t, v, err, "v2")
		}
		time.Sleep(time.Hour)
		src.WantLoads(t, "not read any more", 2)
		for i, c := range fleet {
			if s := c.Stats(); s.Stale != 0 || s.LoadErrors != 0 || s.Refreshes != s.Loads+int64(i)-1 {
				t.Errorf("process %d: %+v, want nothing stale, and loads but the first to be refreshes", i, s)
			}
		}
	})
}

package stale_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// Close waits for a running refresh and its store, and not for a queued refresh.
func TestClose_WaitsForRefreshAndStore(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		opts := cachetest.StaleOptions(time.Minute, 0)
		opts.MaxLoads = 1
		c := cachetest.NewCacheIn(t, rdb, "ns", opts)
		for _, key := range []string{"queues", "k"} {
			redistest.Must(t, c.Set(t.Context(), key, "old"))
		}
		time.Sleep(cachetest.StaleLife)
		src := &cachetest.TimedSource{Takes: 10 * time.Second, Value: "new"}
		cachetest.Ask(t.Context(), c, "k", src.Load).WantOld(t, "the reader that begins it", 0, nil)
		src.WantLoads(t, "a refresh", 1)
		cachetest.Ask(t.Context(), c, "queues", src.Load).WantOld(t, "the reader that begins another", 0, nil)
		synctest.Wait()
		begun := time.Now()
		redistest.Must(t, c.Close())
		cachetest.WantElapsed(t, "Close returns", begun, 10*time.Second)
		cachetest.WantStored(t, rdb, "ns", "k", "new")
		cachetest.WantStored(t, rdb, "ns", "queues", "old")
		src.WantLoads(t, "one ran and one queued", 1)
		if s := c.Stats(); s.Stored != 1 || s.Loading != 0 {
			t.Errorf("%+v, want the refresh stored", s)
		}
	})
}

package stale_test

import (
	"context"
	"sync/atomic"
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

// By default no value is refreshed in the first half of its life, however many callers read it and however
// long its load takes: not with lives by Jitter and TTLFunc, not in memory.
func TestEarlyRefresh_NotInTheFirstHalf(t *testing.T) {
	for what, near := range map[string]*singlefill.Near{"redis": nil, "memory": {}} {
		cachetest.RunInBubble(t, what, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
			const keys, callers = 5, 20
			opts := &singlefill.Options[string]{
				Codec: singlefill.Raw, Jitter: 0.5, Near: near,
				TTLFunc: func(key string, _ string) time.Duration { return time.Duration(key[0]-'a'+1) * time.Second },
			}
			fleet := cachetest.NewCaches(t, m, "ns", 2, opts)
			var refreshes atomic.Int64
			load := func(ctx context.Context, key string) (string, error) {
				if _, info, ok := singlefill.Previous[string](ctx, key); ok {
					refreshes.Add(1)
					if _, e := cachetest.GetEntry(t, rdb, "ns", key); info.Age < e.FreshUntil.Sub(e.WrittenAt)/2 {
						t.Errorf("%s: refreshed after %v of the life of %v", key, info.Age, e.FreshUntil.Sub(e.WrittenAt))
					}
				}
				time.Sleep(time.Second)
				return "v", nil
			}
			for begun := time.Now(); time.Since(begun) < 30*time.Second; time.Sleep(50 * time.Millisecond) {
				for i := range keys * callers {
					go fleet[i%2].GetOrLoad(t.Context(), string(rune('a'+i%keys)), load)
				}
			}
			time.Sleep(5 * time.Second)
			if refreshes.Load() < keys {
				t.Errorf("%d refreshes, want several of each key", refreshes.Load())
			}
		})
	}
}

package stale_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// Readers of a busy key never wait, and each life costs one load.
//
// The workers read evenly, 62.5 times within the time that a load takes. So the refresh begins on
// average 2.4 s before the end of a life (62.5 times e^(-t/0.5s), added up, is 1 there, and
// somewhat less later); and never so late that the load, which takes 0.5 s, would end after that
// life: the odds are e^(-62.5/e), or 1 in 10^10. A cycle is then 18.1 s on average: 300 s are 16.5
// of them, or at least 14, which would be cycles of a whole life and a load each. More than 18
// would take an average of 4.7 s, every time as rare as 1 in 200.
func TestEarlyRefresh_NoReaderWaits(t *testing.T) {
	const life, loadTime, during = 20 * time.Second, 500 * time.Millisecond, 300 * time.Second
	const workers, pause = 50, 400 * time.Millisecond
	for _, processes := range []int{1, 5} {
		name := fmt.Sprint(processes, " processes")
		cachetest.RunInBubble(t, name, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
			fleet := cachetest.NewCaches(t, m, redistest.Namespace(t), processes, &singlefill.Options[int64]{
				Jitter: -1, TTLFunc: func(string, int64) time.Duration { return life },
			})
			var loads, loading, seen atomic.Int64
			load := func(context.Context, string) (int64, error) {
				if loading.Add(1) > 1 {
					t.Error("two loads at a time")
				}
				defer loading.Add(-1)
				defer time.Sleep(loadTime)
				return loads.Add(1), nil
			}
			if _, err := fleet[0].GetOrLoad(t.Context(), "k", load); err != nil {
				t.Fatal(err)
			}
			end := time.Now().Add(during)
			var wg sync.WaitGroup
			for i := range workers {
				wg.Go(func() {
					time.Sleep(time.Duration(i) * pause / workers)
					for last := int64(1); time.Now().Before(end); time.Sleep(pause) {
						begun := time.Now()
						v, info, err := fleet[i%processes].GetOrLoadInfo(t.Context(), "k", load)
						if took := time.Since(begun); err != nil || info.Stale || took > 0 || v < last || v > last+1 {
							t.Errorf("got %d, %+v, %v after %v; want %d or the next, fresh and at once", v, info, err, took, last)
						}
						last = v
						for n := seen.Load(); v > n && !seen.CompareAndSwap(n, v); n = seen.Load() {
						}
					}
				})
			}
			wg.Wait()
			again, changes := loads.Load()-1, seen.Load()-1
			if again < 14 || again > 18 {
				t.Errorf("%d loads after the first, want about 16", again)
			}
			if again != changes && again != changes+1 { // the last one may not be over
				t.Errorf("%d loads after the first, but the value has changed %d times", again, changes)
			}
		})
	}
}

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

package stale_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// The whole fleet asks a source that is down once in RetryAfter.
//
//fault:source-down
func TestRetryAfter_OneLoadInTheFleet(t *testing.T) {
	for _, kind := range windowKinds {
		for _, retryAfter := range []time.Duration{250 * time.Millisecond, time.Second, 5 * time.Second} {
			name := fmt.Sprint(kind.name, ", ", retryAfter)
			cachetest.RunInBubble(t, name, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
				outage := min(24*retryAfter, time.Minute)
				pause := max(50*time.Millisecond, min(retryAfter/10, 250*time.Millisecond))
				opts := kind.opts()
				opts.StaleWhileRevalidate *= 10
				opts.StaleIfError *= 10
				opts.RetryAfter = retryAfter
				fleet := cachetest.NewCaches(t, m, redistest.Namespace(t), 4, opts)
				cachetest.SetStale(t, fleet[0], "k", "old", 0)
				up := time.Now().Add(outage)
				var tried, trying atomic.Int64
				load := func(context.Context, string) (string, error) {
					if trying.Add(1) > 1 {
						t.Error("two loads at a time")
					}
					defer trying.Add(-1)
					if !time.Now().Before(up) {
						return "new", nil
					}
					tried.Add(1)
					return "", cachetest.ErrSource
				}
				var wg sync.WaitGroup
				for i, c := range fleet {
					wg.Go(func() {
						time.Sleep(time.Duration(i) * 13 * time.Millisecond)
						for value := "old"; value == "old"; time.Sleep(pause) {
							r := cachetest.Ask(t.Context(), c, "k", load)
							if value = r.Value; r.Err != nil || r.Took > 0 || value == "new" && time.Now().Before(up) {
								t.Errorf("got %+v", r)
								return
							}
						}
					})
				}
				wg.Wait()
				// A process that knows of the failure asks again 100 ms and a read after RetryAfter at most.
				most := retryAfter + 100*time.Millisecond + pause
				if late := time.Since(up); late > most+2*pause {
					t.Errorf("all have the new value %v after the source has come back, want %v", late, most)
				}
				if n := tried.Load(); n > int64(outage/retryAfter)+1 || n < int64(outage/most) {
					t.Errorf("%d loads in %v, want one every %v", n, outage, retryAfter)
				}
			})
		}
	}
}

// RetryAfter does not delay calls that have nothing to serve, nor after an Expire calls for which the value is too old.
func TestRetryAfter_NothingToServe(t *testing.T) {
	type cache = *singlefill.Cache[string]
	for name, act := range map[string]func(ctx context.Context, c cache, rdb *redis.Client) error{
		"Delete": func(ctx context.Context, c cache, _ *redis.Client) error { return c.Delete(ctx, "k") },
		"Expire": func(ctx context.Context, c cache, _ *redis.Client) error { return c.Expire(ctx, "k") },
		"age": func(ctx context.Context, _ cache, rdb *redis.Client) error {
			defer time.Sleep(31 * time.Second)
			return rdb.PExpire(ctx, "ns:{k}", time.Hour).Err()
		},
		"eviction": func(ctx context.Context, _ cache, rdb *redis.Client) error { return rdb.Del(ctx, "ns:{k}").Err() },
	} {
		for _, kind := range windowKinds {
			for asker := range 2 {
				cachetest.RunInBubble(t, fmt.Sprintf("%s, %s, by %d", name, kind.name, asker), func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
					opts := kind.opts()
					opts.RetryAfter = 2 * time.Minute // longer than LockTTL, and than the window
					fleet := cachetest.NewCaches(t, m, "ns", 2, opts)
					cachetest.SetStale(t, fleet[0], "k", "old", 0)
					src := &cachetest.TimedSource{Err: cachetest.ErrSource}
					cachetest.Ask(t.Context(), fleet[0], "k", src.Load)
					synctest.Wait()
					time.Sleep(29 * time.Second)
					for _, c := range fleet {
						r := cachetest.Ask(t.Context(), c, "k", src.Load)
						if kind.ifError {
							r.WantRemote(t, "within RetryAfter", 29*time.Second, cachetest.ErrSource.Error())
						} else {
							r.WantOld(t, "within RetryAfter", 29*time.Second, nil)
						}
					}
					src.WantLoads(t, "within RetryAfter", 1)

					redistest.Must(t, act(t.Context(), fleet[0], rdb))
					src.Value, src.Err = "new", nil
					r := cachetest.Ask(t.Context(), fleet[asker], "k", src.Load)
					if name == "Expire" && !kind.ifError {
						r.WantOld(t, "expired", 29*time.Second, nil)
					} else {
						r.WantFresh(t, "gone or to be loaded first", "new")
					}
					src.WantLoads(t, "at once", 2)
					cachetest.WantStored(t, rdb, "ns", "k", "new")
				})
			}
		}
	}
}

package stale_test

import (
	"context"
	"errors"
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

func failureOptions(ttl time.Duration) *singlefill.Options[string] {
	opts := cachetest.StaleOptions(0, 0)
	opts.FailureTTL = ttl
	opts.Errors = map[string]error{"down": cachetest.ErrSource}
	return opts
}

// wantRemembered wants a failure that Redis remembers.
func wantRemembered(t testing.TB, what string, err error) {
	t.Helper()
	remote, ok := errors.AsType[*singlefill.RemoteError](err)
	if !ok || remote.Message != cachetest.ErrSource.Error() || !errors.Is(err, cachetest.ErrSource) {
		t.Errorf("%s: got %v, want the failure that is remembered", what, err)
	}
}

// The whole fleet asks a source that is down once in FailureTTL for a key that has no value.
//
//fault:source-down
func TestFailureTTL_OneLoadInTheFleet(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
		opts := failureOptions(time.Second)
		opts.MaxFleetLoads = 2
		fleet := cachetest.NewCaches(t, m, redistest.Namespace(t), 3, opts)
		up := time.Now().Add(5*time.Second - time.Millisecond)
		var loads, own atomic.Int64
		load := func(context.Context, string) (string, error) {
			loads.Add(1)
			if time.Now().Before(up) {
				return "", cachetest.ErrSource
			}
			return "v", nil
		}
		var wg sync.WaitGroup
		for i, c := range fleet {
			wg.Go(func() {
				time.Sleep(time.Duration(i) * 7 * time.Millisecond)
				for v := ""; v == ""; time.Sleep(20 * time.Millisecond) {
					var err error
					if v, err = c.GetOrLoad(t.Context(), "k", load); err == cachetest.ErrSource {
						own.Add(1)
					} else if err != nil {
						wantRemembered(t, "a call", err)
					}
				}
			})
		}
		wg.Wait()
		if n := loads.Load(); n != 6 || own.Load() != 5 {
			t.Errorf("%d loads in 5 s, and %d calls got their errors; want one a second, and the value", n, own.Load())
		}
		if late := time.Since(up); late > time.Second+50*time.Millisecond {
			t.Errorf("all have the value %v after the source has come back", late)
		}
	})
}

// Delete, Set, Expire and Clear end what is remembered. A cache without FailureTTL leaves no failure to others,
// but gets the failures that they have left.
//
//fault:failed-load
func TestFailureTTL_Invalidation(t *testing.T) {
	t.Parallel()
	cachetest.UserEach(t, func(t *testing.T, rdb, look redis.UniversalClient) {
		ns := redistest.Namespace(t)
		here, there := cachetest.NewCacheIn(t, rdb, ns, failureOptions(time.Hour)), cachetest.NewCacheIn(t, rdb, ns, failureOptions(time.Hour))
		off := cachetest.NewCacheIn(t, rdb, ns, failureOptions(0))
		fails := cachetest.Fails[string](cachetest.ErrSource)
		for what, end := range map[string]func(key string) error{
			"delete": func(key string) error { return there.Delete(t.Context(), key) },
			"expire": func(key string) error { return there.Expire(t.Context(), key) },
			"set": func(key string) error {
				return errors.Join(there.Set(t.Context(), key, "v"), look.Del(t.Context(), ns+":{"+key+"}").Err())
			},
			"clear": func(string) error { return there.Clear(t.Context()) },
		} {
			cachetest.GoGet(t.Context(), here, what, fails).WantErr(t, cachetest.ErrSource)
			for _, c := range []*singlefill.Cache[string]{here, there, off} {
				_, err := c.GetOrLoad(t.Context(), what, cachetest.MustNotLoad[string](t))
				wantRemembered(t, what, err)
			}
			redistest.Must(t, end(what))
			cachetest.GoGet(t.Context(), here, what, cachetest.Gives("new")).Want(t, "new")
		}
		without := cachetest.NewCache(t, rdb, &cachetest.Raw)
		cachetest.GoGet(t.Context(), without, "k", fails).WantErr(t, cachetest.ErrSource)
		cachetest.GoGet(t.Context(), without, "k", cachetest.Gives("v")).Want(t, "v")
	})
}

// What says nothing about the next load is not remembered.
//
//fault:failed-load
func TestFailureTTL_NotRemembered(t *testing.T) {
	for what, load := range map[string]singlefill.Loader[string]{
		"cancelled":   cachetest.Fails[string](fmt.Errorf("query: %w", context.Canceled)),
		"deadline":    cachetest.Fails[string](context.DeadlineExceeded),
		"panic":       func(context.Context, string) (string, error) { panic("boom") },
		"not found":   cachetest.Fails[string](singlefill.ErrNotFound),
		"LoadTimeout": cachetest.Takes(time.Hour, "v", nil),
		"closed":      cachetest.Fails[string](singlefill.ErrClosed),
	} {
		cachetest.RunInBubble(t, what, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
			opts := failureOptions(time.Hour)
			opts.NotFoundTTL = -1
			c := cachetest.NewCacheIn(t, rdb, "ns", opts)
			if _, err := c.GetOrLoad(t.Context(), "k", load); err == nil {
				t.Error("no error")
			}
			cachetest.GoGet(t.Context(), c, "k", cachetest.Gives("v")).Want(t, "v")
			_, err := c.GetOrLoadMany(t.Context(), []string{"m"}, cachetest.OneByOne(load))
			if err == nil && what != "not found" {
				t.Error("no error of many")
			}
			cachetest.GoGet(t.Context(), c, "m", cachetest.Gives("v")).Want(t, "v")
			time.Sleep(2 * time.Hour) // the load that was abandoned is over
		})
	}
}

// A call with an old value to serve goes by RetryAfter.
func TestFailureTTL_OldValue(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		opts := failureOptions(time.Hour)
		opts.StaleIfError = time.Hour
		c := cachetest.NewCacheIn(t, rdb, "ns", opts)
		cachetest.SetStale(t, c, "k", "old", time.Second)
		cachetest.Ask(t.Context(), c, "k", cachetest.Fails[string](cachetest.ErrSource)).WantOld(t, "the failure", time.Second, cachetest.ErrSource)
		cachetest.Ask(t.Context(), c, "k", cachetest.MustNotLoad[string](t)).WantRemote(t, "within RetryAfter", time.Second, cachetest.ErrSource.Error())
		time.Sleep(2 * time.Second)
		cachetest.GoGet(t.Context(), c, "k", cachetest.Gives("new")).Want(t, "new")
		synctest.Wait()
	})
}

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

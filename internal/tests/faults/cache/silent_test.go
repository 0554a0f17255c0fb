package cache_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// onLink runs a subtest in a bubble: so its bounds are exact. The link is between the cache and a
// miniredis.
func onLink(t *testing.T, name string, run func(t *testing.T, link *redistest.MiniLink, c *cachetest.Cache),
	change ...func(*singlefill.Options[string])) {
	t.Run(name, func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			link, rdb := redistest.StartMiniLink(t)
			run(t, link, cachetest.New(t, rdb, "ns", cachetest.Impatient, change...))
		})
	})
}

// A silent Redis costs a call RedisTimeout, and nothing once the breaker is open.
//
//fault:unreachable
func TestBreaker_SilentRedis(t *testing.T) {
	t.Parallel()
	const loadTime = 70 * time.Millisecond
	for _, used := range []bool{false, true} {
		name := fmt.Sprintf("connected before=%t", used)
		onLink(t, name, func(t *testing.T, link *redistest.MiniLink, c *cachetest.Cache) {
			if used {
				c.MustLoad("before")
				c.WantHit("before")
			}
			c.During = func(string) { time.Sleep(loadTime) }
			link.BlackHole(true)
			call := func(key string) time.Duration {
				begun := time.Now()
				c.MustLoad(key)
				return time.Since(begun)
			}
			calls := 0
			for !c.Stats().BreakerOpen {
				if took := call("k"); took != cachetest.Impatient+loadTime {
					t.Fatalf("call %d took %v, want RedisTimeout and the time of the load", calls, took)
				}
				if calls++; calls > 10 {
					t.Fatal("the breaker does not open")
				}
			}
			c.AwaitLoads()
			synctest.Wait()
			commands, probes := link.Sent()
			for range 100 {
				if took := call("k"); took != loadTime {
					t.Fatalf("with the breaker open, a call took %v, want the time of the load", took)
				}
			}
			commandsAfter, probesAfter := link.Sent()
			if commandsAfter != commands {
				t.Errorf("%d commands were sent while the breaker was open", commandsAfter-commands)
			}
			if probesAfter == probes {
				t.Error("no PING was sent while the breaker was open")
			}
			begun := time.Now()
			if err := c.Delete(t.Context(), "k"); err == nil || time.Since(begun) > cachetest.Impatient {
				t.Errorf("Delete = %v after %v", err, time.Since(begun))
			}

			link.BlackHole(false)
			time.Sleep(2 * cachetest.Impatient) // two probes; no call is needed
			if s := c.Stats(); s.BreakerOpen || s.BreakerOpens != 1 {
				t.Fatalf("two probes after Redis was back: %+v", s)
			}
			c.MustLoad("k")
			c.WantHit("k")
		})
	}
}

// The first requests of an outage wait for one RedisTimeout in all, however many caches they ask and whatever they did
// when it began.
//
//fault:unreachable
//fault:frozen-for-many-caches
func TestBreaker_FirstRequests(t *testing.T) {
	t.Parallel()
	const callers, latency, loadTime = 16, 4 * time.Millisecond, 3 * time.Millisecond
	for _, bounded := range []bool{false, true} {
		for _, pool := range []int{10, 100} { // with 10, commands queue
			t.Run(fmt.Sprintf("ContextTimeoutEnabled=%t/PoolSize=%d", bounded, pool), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					link, rdb := redistest.StartMiniLink(t)
					opt := *rdb.Options()
					opt.ContextTimeoutEnabled, opt.PoolSize = bounded, pool
					rdb = redis.NewClient(&opt)
					defer rdb.Close()
					var over atomic.Bool
					rdb.AddHook(redistest.Trips(func([]redis.Cmder) error {
						if !over.Load() {
							time.Sleep(rand.N(latency))
						}
						return nil
					}))
					var caches []*cachetest.Cache
					for i := range 4 {
						c := cachetest.New(t, rdb, fmt.Sprint("ns", i), cachetest.Impatient)
						c.During = func(string) { time.Sleep(loadTime) }
						caches = append(caches, c)
					}
					ctx, stop := context.WithCancel(t.Context())
					var began time.Time // the outage
					var waits []time.Duration
					var mu sync.Mutex
					var wg sync.WaitGroup
					for caller := range callers {
						wg.Go(func() {
							for i := 0; ctx.Err() == nil; i++ {
								begun := time.Now()
								for _, c := range caches {
									c.MustLoad(fmt.Sprint(caller, "/", i))
								}
								mu.Lock()
								if !began.IsZero() && began.Before(time.Now()) {
									waits = append(waits, min(time.Since(begun), time.Since(began)))
								}
								mu.Unlock()
							}
						})
					}
					time.Sleep(cachetest.Impatient)
					mu.Lock()
					began = time.Now()
					mu.Unlock()
					link.BlackHole(true)
					time.Sleep(4 * cachetest.Impatient)
					stop()
					wg.Wait()
					most := slices.Max(waits)
					if limit := cachetest.Impatient + 4*(loadTime+3*latency); len(waits) < 2*callers || most > limit {
						t.Errorf("the slowest of %d requests took %v, want at most %v", len(waits), most, limit)
					}
					if !caches[0].Stats().BreakerOpen {
						t.Error("the breaker is closed")
					}
					over.Store(true)
					time.Sleep(latency) // a ping may be in the hook, and would stay there
				})
			})
		}
	}
}

// While the breaker is open a call waits for its load only: not for the store, if it began before the silence, nor
// for what its tags need.
//
//fault:unreachable
func TestBreaker_LoadAlone(t *testing.T) {
	t.Parallel()
	for name, tagged := range map[string]func(o *singlefill.Options[string]){
		"without tags": func(*singlefill.Options[string]) {},
		"with tags": func(o *singlefill.Options[string]) {
			o.Tags = func(string, string) []string { return []string{"tag"} }
		},
	} {
		onLink(t, name, func(t *testing.T, link *redistest.MiniLink, c *cachetest.Cache) {
			src := cachetest.NewSource[string](t)
			before, load := src.Begin(t.Context(), t, c.Cache, "before")
			link.BlackHole(true)
			for i := 0; !c.Stats().BreakerOpen; i++ {
				c.MustLoad(fmt.Sprint("other", i))
			}
			begun := time.Now()
			load.Give("v")
			before.Want(t, "v")
			values, err := c.GetOrLoadMany(t.Context(), keysOf("k", 2), loadMany(c, nil))
			if took := time.Since(begun); len(values) != 2 || err != nil || took != 0 {
				t.Errorf("%v, %v; both calls have waited for %v", values, err, took)
			}
		}, tagged)
	}
}

// A silence at any step costs one RedisTimeout, which the read and the lock share.
//
//fault:silence
func TestGetOrLoad_SilenceAtAnyStep(t *testing.T) {
	t.Parallel()
	for _, silentAt := range []string{"get", "evalsha", "store"} {
		onLink(t, silentAt, func(t *testing.T, link *redistest.MiniLink, c *cachetest.Cache) {
			c.MustLoad("before") // the server knows the scripts from here on
			if silentAt == "store" {
				c.During = func(string) { link.BlackHoleAt("evalsha") }
			} else {
				link.BlackHoleAt(silentAt)
			}
			begun := time.Now()
			c.MustLoad("k")
			if took := time.Since(begun); took != cachetest.Impatient {
				t.Errorf("took %v, want %v", took, cachetest.Impatient)
			}
			if !link.Swallows() {
				t.Error("the fault has not come about")
			}
			c.WantErrors()
			if unlocked := c.LastLoad().Unlocked; unlocked != (silentAt != "store") {
				t.Errorf("LoadInfo.Unlocked = %t", unlocked)
			}
		})
	}
}

// Without Redis each process loads a key once at a time, and all its callers get the value. LoadsUnlocked counts the
// load when it begins.
//
//fault:unreachable
func TestLoad_WithoutRedis(t *testing.T) {
	t.Parallel()
	const processes, callers = 4, 100
	synctest.Test(t, func(t *testing.T) {
		link, rdb := redistest.StartMiniLink(t)
		link.BlackHole(true)
		var caches []*cachetest.Cache
		for range processes {
			c := cachetest.New(t, rdb, "ns", cachetest.Impatient)
			c.During = func(string) {
				if c.Stats().LoadsUnlocked == 0 {
					t.Error("a load without the lock is not counted while it runs")
				}
				time.Sleep(time.Second)
			}
			caches = append(caches, c)
		}
		begun := time.Now()
		var wg sync.WaitGroup
		for _, c := range caches {
			for range callers {
				wg.Go(func() { c.MustLoad("k") })
			}
		}
		wg.Wait()
		if took := time.Since(begun); took != cachetest.Impatient+time.Second {
			t.Errorf("took %v, want RedisTimeout and one load", took)
		}
		for _, c := range caches {
			c.WantLoads(1)
		}
		for range callers { // one after another: they join the load that runs
			for _, c := range caches {
				wg.Go(func() { c.MustLoad("k") })
			}
			time.Sleep(30 * time.Millisecond)
		}
		wg.Wait()
		for _, c := range caches {
			if most := c.Most.Load(); most != 1 {
				t.Errorf("%d loads of one key ran at a time in one process", most)
			}
			// The last load is for callers that joined too late for a probe to help them.
			if n := c.Loads.Load(); n > 5 {
				t.Errorf("%d loads in 4 s at 1 s each", n)
			}
		}
	})
}

// While the breaker is open, all callers that join a load have its value, however short it is.
//
//fault:unreachable
//fault:joins-in-an-outage
func TestBreaker_OneLoadForAll(t *testing.T) {
	t.Parallel()
	const callers, within, load = 20, 40 * time.Millisecond, 50 * time.Millisecond
	onLink(t, "", func(t *testing.T, link *redistest.MiniLink, c *cachetest.Cache) {
		link.BlackHole(true)
		for i := 0; !c.Stats().BreakerOpen; i++ {
			c.MustLoad(fmt.Sprint("other", i))
		}
		before := c.Loads.Load()
		c.During = func(string) { time.Sleep(load) }
		begun := time.Now()
		var calls sync.WaitGroup
		for range callers {
			calls.Go(func() { c.WantValue("k") })
			time.Sleep(within / callers)
		}
		calls.Wait()
		if took := time.Since(begun); took != load {
			t.Errorf("the last of %d callers has its value after %v, want %v", callers, took, load)
		}
		c.WantLoads(before + 1)
	})
}

// A Delete, Set or Expire without Redis returns an error, and later callers in its process load again.
// They do not join a load that began before it, or while its command was being sent.
//
//fault:unreachable-delete
//fault:failed-delete
func TestDelete_WithoutRedis(t *testing.T) {
	t.Parallel()
	for name, invalidate := range map[string]func(context.Context, *cachetest.Cache) error{
		"delete": func(ctx context.Context, c *cachetest.Cache) error { return c.Delete(ctx, "k") },
		"expire": func(ctx context.Context, c *cachetest.Cache) error { return c.Expire(ctx, "k") },
		"set":    func(ctx context.Context, c *cachetest.Cache) error { return c.Set(ctx, "k", "set") },
	} {
		for _, begins := range []string{"before", "during the command"} {
			onLink(t, name+", a load begins "+begins, func(t *testing.T, link *redistest.MiniLink, c *cachetest.Cache) {
				link.BlackHole(true)
				src := cachetest.NewSource[string](t)
				var older *cachetest.Call[string]
				begin := func() { older = cachetest.GoGet(t.Context(), c.Cache, "k", src.Load) }
				if begins == "before" {
					begin()
					time.Sleep(2 * cachetest.Impatient)
				} else { // a load begins at once if the breaker is open
					for i := 0; !c.Stats().BreakerOpen; i++ {
						c.MustLoad(fmt.Sprint("other", i))
					}
				}
				begun := time.Now()
				done := make(chan error, 1)
				go func() { done <- invalidate(t.Context(), c) }()
				if begins == "during the command" {
					time.Sleep(cachetest.Impatient / 2)
					begin()
				}
				err := <-done
				if took := time.Since(begun); err == nil || took > cachetest.Impatient {
					t.Errorf("%s = %v after %v", name, err, took)
				}
				load := src.Next(t)
				cachetest.GoGet(t.Context(), c.Cache, "k", cachetest.Gives("newer")).Want(t, "newer")
				load.Give("older")
				older.Want(t, "older")
			})
		}
	}
}

// Without Redis a DeleteIf of a value from Redis returns an error. A DeleteIf of a value that was loaded in
// between has nothing to remove.
//
//fault:unreachable-delete
func TestDeleteIf_WithoutRedis(t *testing.T) {
	t.Parallel()
	onLink(t, "", func(t *testing.T, link *redistest.MiniLink, c *cachetest.Cache) {
		ctx := t.Context()
		_, stored, err := c.GetOrLoadInfo(ctx, "k", c.Source.Load)
		redistest.Must(t, err)
		link.BlackHole(true)
		_, unstored, err := c.GetOrLoadInfo(ctx, "k", c.Source.Load)
		redistest.Must(t, err)
		c.WantLoads(2)
		if left := time.Until(unstored.Expires); left <= 0 || left > time.Hour {
			t.Errorf("a value that was loaded without Redis expires in %v, want as if it were stored", left)
		}
		begun := time.Now()
		if deleted, err := c.DeleteIf(ctx, "k", unstored); deleted || err != nil || time.Since(begun) > 0 {
			t.Errorf("DeleteIf of a value that was not stored = %t, %v after %v", deleted, err, time.Since(begun))
		}
		if deleted, err := c.DeleteIf(ctx, "k", stored); deleted || err == nil || time.Since(begun) > cachetest.Impatient {
			t.Errorf("DeleteIf of a value in Redis = %t, %v after %v", deleted, err, time.Since(begun))
		}
	})
}

// A Delete of many keys without Redis takes RedisTimeout once, and its error comes at the caller's
// deadline at the latest.
//
//fault:unreachable-delete
//fault:delete-many
func TestDelete_ManyKeysWithoutRedis(t *testing.T) {
	t.Parallel()
	onLink(t, "", func(t *testing.T, link *redistest.MiniLink, c *cachetest.Cache) {
		link.BlackHole(true)
		keys := keysOf("k", 5000)
		begun := time.Now()
		if err := c.Delete(t.Context(), keys...); err == nil || time.Since(begun) != cachetest.Impatient {
			t.Errorf("Delete = %v after %v, want an error after %v", err, time.Since(begun), cachetest.Impatient)
		}
		synctest.Wait() // the breaker opens
		ctx, cancel := context.WithTimeout(t.Context(), cachetest.Impatient/2)
		defer cancel()
		if err := c.Delete(ctx, keys...); err != context.DeadlineExceeded {
			t.Errorf("at the caller's deadline: %v", err)
		}
		for i := 0; i < 10 || !c.Stats().BreakerOpen; i++ {
			begun := time.Now()
			if err := c.Delete(t.Context(), keys...); err == nil || time.Since(begun) > cachetest.Impatient {
				t.Errorf("Delete = %v after %v", err, time.Since(begun))
			}
		}
		_ = c.Close()
		time.Sleep(time.Minute)
	})
}

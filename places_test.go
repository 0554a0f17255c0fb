package singlefill_test

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

// A gauge counts loads that run.
type gauge struct{ loads, running, most atomic.Int64 }

// takes is a Loader that runs for d and is counted.
func (g *gauge) takes(d time.Duration) singlefill.Loader[string] {
	return func(context.Context, string) (string, error) { return g.run(context.Background(), d) }
}

// heeds is a Loader that runs for d, or until its context ends, and is counted.
func (g *gauge) heeds(d time.Duration) singlefill.Loader[string] {
	return func(ctx context.Context, _ string) (string, error) { return g.run(ctx, d) }
}

func (g *gauge) run(ctx context.Context, d time.Duration) (string, error) {
	g.loads.Add(1)
	n := g.running.Add(1)
	for most := g.most.Load(); n > most && !g.most.CompareAndSwap(most, n); most = g.most.Load() {
	}
	defer g.running.Add(-1)
	select {
	case <-time.After(d):
		return "v", nil
	case <-ctx.Done():
		return "", ctx.Err()
	}
}

// getAll asks for n keys at once, and waits for them.
func getAll(ctx context.Context, t testing.TB, c *singlefill.Cache[string], n int, load singlefill.Loader[string]) {
	var callers sync.WaitGroup
	for i := range n {
		callers.Go(func() {
			v, err := c.GetOrLoad(ctx, fmt.Sprint(i), load)
			wantValue(t, v, err, "v")
		})
	}
	callers.Wait()
}

// A Loader that asks for many keys at once lends its place to one of them at a time.
//
//fault:nested-loads
func TestMaxLoads_NestedLoads(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := newCache(t, rdb, &singlefill.Options[string]{MaxLoads: 4})
		var nested gauge
		goGet(t.Context(), c, "outer", func(ctx context.Context, _ string) (string, error) {
			getAll(ctx, t, c, 250, nested.takes(10*time.Millisecond))
			return "v", nil
		}).want(t, "v")
		if nested.loads.Load() != 250 || nested.most.Load() != 4 {
			t.Errorf("%d nested loads, %d at a time, want 250 and 4", nested.loads.Load(), nested.most.Load())
		}
	})
}

// A context kept from a load that is over gives no place.
//
//fault:nested-loads
func TestMaxLoads_ContextOfAnEndedLoad(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := newCache(t, rdb, &singlefill.Options[string]{MaxLoads: 1})
		var kept context.Context
		goGet(t.Context(), c, "outer", func(ctx context.Context, _ string) (string, error) {
			kept = context.WithoutCancel(ctx)
			return "v", nil
		}).want(t, "v")
		var g gauge
		getAll(kept, t, c, 100, g.takes(10*time.Millisecond))
		if g.loads.Load() != 100 || g.most.Load() != 1 {
			t.Errorf("%d loads, %d at a time, want 100 and 1", g.loads.Load(), g.most.Load())
		}
	})
}

// A Loader may start a load that it does not wait for, and which needs the Loader's own key.
func TestErrRecursive_Prefetch(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := newCache(t, rdb, &singlefill.Options[string]{MaxLoads: 1})
		prefetched := make(chan *call[string], 1)
		a := goGet(t.Context(), c, "a", func(ctx context.Context, _ string) (string, error) {
			prefetched <- goGet(context.WithoutCancel(ctx), c, "b", func(ctx context.Context, _ string) (string, error) {
				return c.GetOrLoad(ctx, "a", mustNotLoad[string](t))
			})
			time.Sleep(time.Second)
			return "v", nil
		})
		prefetch := <-prefetched
		synctest.Wait()
		outsider := goGet(t.Context(), c, "b", mustNotLoad[string](t))
		a.want(t, "v")
		prefetch.want(t, "v")
		outsider.want(t, "v")
	})
}

// However many keys wait for a place, they send a few commands a second; and they are loaded in
// their order.
//
//fault:long-queue
func TestMaxLoads_LongQueue(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		const keys = 500
		var commands atomic.Int64
		rdb.AddHook(cmdHook(func(redis.Cmder) error { commands.Add(1); return nil }))
		c := newCache(t, rdb, &singlefill.Options[string]{MaxLoads: 1})
		src := newSource[string](t)
		busy := goGet(t.Context(), c, "busy", src.load)
		load := src.next(t)
		var want, got []string
		var queue []*call[string]
		for i := range keys {
			key := fmt.Sprint(i)
			want = append(want, key)
			queue = append(queue, goGet(t.Context(), c, key, func(_ context.Context, key string) (string, error) {
				got = append(got, key) // one at a time
				return "v", nil
			}))
			synctest.Wait()
		}
		if n := c.Stats().Queued; n != keys {
			t.Errorf("%d loads are queued, want %d", n, keys)
		}
		commands.Store(0)
		time.Sleep(20 * time.Second)
		if n := commands.Load(); n > 20*6 {
			t.Errorf("%d commands within 20s, want 6 a second at most", n)
		}
		load.give("v")
		busy.want(t, "v")
		for _, a := range queue {
			a.want(t, "v")
		}
		if !slices.Equal(got, want) {
			t.Error("the keys were not loaded in the order in which they came")
		}
	})
}

// A key that waits for a place costs one goroutine beside its caller's.
//
//fault:long-queue
func TestMaxLoads_GoroutinesOfTheQueue(t *testing.T) { // not parallel: it counts all goroutines
	synctest.Test(t, func(t *testing.T) {
		const keys = 500
		_, rdb := redistest.StartMini(t)
		c := newCache(t, rdb, &singlefill.Options[string]{MaxLoads: 1})
		src := newSource[string](t)
		busy := goGet(t.Context(), c, "busy", src.load)
		load := src.next(t)
		var queue []*call[string]
		join := func(n int) {
			for range n {
				queue = append(queue, goGet(t.Context(), c, fmt.Sprint(len(queue)), gives("v")))
				synctest.Wait()
			}
		}
		join(10) // there are connections now
		before := runtime.NumGoroutine()
		join(keys)
		if n := runtime.NumGoroutine() - before; n > 2*keys+10 {
			t.Errorf("%d goroutines for %d keys, want at most two for each", n, keys)
		}
		load.give("v")
		busy.want(t, "v")
		for _, a := range queue {
			a.want(t, "v")
		}
	})
}

// Callers that join a load all the time bring few renewals forward.
//
//fault:many-joiners
func TestRenewal_Arrivals(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		const loads, arrivals = 32, 100
		var renewals atomic.Int64
		isRenewal := isScript(t, "renew")
		rdb.AddHook(cmdHook(func(cmd redis.Cmder) error {
			if isRenewal(argsOf(cmd)) {
				renewals.Add(1)
			}
			return nil
		}))
		c := newCache[string](t, rdb, nil)
		var g gauge
		var callers sync.WaitGroup
		for range arrivals {
			callers.Go(func() { getAll(t.Context(), t, c, loads, g.takes(2*time.Second)) })
			time.Sleep(15 * time.Millisecond)
		}
		callers.Wait()
		if n := g.loads.Load(); n != loads {
			t.Errorf("%d loads, want %d", n, loads)
		}
		if n := renewals.Load(); n > 10*loads {
			t.Errorf("%d renewals of %d loads within 2s, want 10 for each at most", n, loads)
		}
	})
}

// Loads that no caller can be given any more are cancelled, and free their places.
//
//fault:deleted-again
func TestDelete_VoidLoadsAreCancelled(t *testing.T) {
	for name, test := range map[string]struct {
		heedsItsContext bool
		most            int64
	}{
		"the Loader heeds its context":   {true, 3},
		"the Loader ignores its context": {false, 32}, // it has its place until it returns
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				c := newCache(t, rdb, &singlefill.Options[string]{MaxLoads: 32})
				var g gauge
				load := g.takes(500 * time.Millisecond)
				if test.heedsItsContext {
					load = g.heeds(500 * time.Millisecond)
				}
				var callers sync.WaitGroup
				for range 200 {
					callers.Go(func() {
						ctx, cancel := context.WithTimeout(t.Context(), 8*time.Millisecond)
						defer cancel()
						_, _ = c.GetOrLoad(ctx, "k", load)
					})
					time.Sleep(5 * time.Millisecond)
					if err := c.Delete(t.Context(), "k"); err != nil {
						t.Fatal(err)
					}
				}
				callers.Wait()
				if n := g.most.Load(); n > test.most || !test.heedsItsContext && n != test.most {
					t.Errorf("%d loads at a time, want %d at most", n, test.most)
				}
				begun := time.Now()
				goGet(t.Context(), c, "other", gives("v")).want(t, "v")
				if test.heedsItsContext {
					wantElapsed(t, "another key is loaded", begun, 0)
				}
				goGet(t.Context(), c, "k", gives("v")).want(t, "v")
			})
		})
	}
}

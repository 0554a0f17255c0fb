package singlefill_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"
)

// The loads themselves say how many run: as many as the limit at a time, and never one more.
func TestMaxFleetLoadsBoundsTheLoadsOfAllCachesOfTheNamespace(t *testing.T) {
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		const limit, caches, keys = 3, 3, 12
		ns := redistest.Namespace(t)
		src := newSource[string](t)
		var calls []*call[string]
		for range caches {
			c := newCacheIn(t, rdb, ns, patient(&singlefill.Options[string]{MaxFleetLoads: limit}))
			for k := range keys {
				calls = append(calls, goGet(t.Context(), c, fmt.Sprint(k), src.load))
			}
		}
		running := make(chan *loading[string], limit)
		for range limit {
			running <- src.next(t)
		}
		for begun := int64(limit); begun <= keys; begun++ {
			src.want(t, begun)
			(<-running).give("v")
			if begun < keys {
				running <- src.next(t)
			}
		}
		for range limit - 1 {
			(<-running).give("v")
		}
		for _, a := range calls {
			a.want(t, "v")
		}
		src.want(t, keys)
		redistest.Await(t, "no place is held any more", func() bool {
			n, err := rdb.Exists(t.Context(), "{"+ns+":loads}:lock").Result()
			return n == 0 && err == nil
		})
	})
}

func TestWithoutRedisMaxLoadsAloneBoundsTheLoads(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := newCache(t, rdb, &singlefill.Options[string]{MaxFleetLoads: 1, MaxLoads: 2})
		m.SetError("LOADING dataset")
		src := newSource[string](t)
		var calls []*call[string]
		for k := range 4 {
			calls = append(calls, goGet(t.Context(), c, fmt.Sprint(k), src.load))
		}
		for begun := range 2 {
			first, second := src.next(t), src.next(t)
			time.Sleep(time.Second)
			src.want(t, 2*int64(begun)+2)
			first.give("v")
			second.give("v")
		}
		for _, a := range calls {
			a.want(t, "v")
		}
		m.SetError("")
	})
}

// While a load waits for a place in the fleet it holds no fill lock, so that whoever has a place can load the key.
func TestWhoWaitsForAPlaceInTheFleetHoldsNoLockAndTakesAValueThatComes(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ns := redistest.Namespace(t)
		a := newCacheIn(t, rdb, ns, &singlefill.Options[string]{MaxFleetLoads: 1})
		src := newSource[string](t)
		busy := goGet(t.Context(), a, "busy", src.load)
		load := src.next(t)
		waits := goGet(t.Context(), a, "k", mustNotLoad[string](t))
		time.Sleep(time.Second)
		wantUnlocked(t, rdb, ns, "k")
		free := newCacheIn(t, rdb, ns, &singlefill.Options[string]{}) // without the limit
		goGet(t.Context(), free, "k", gives("v")).want(t, "v")
		waits.want(t, "v")
		load.give("v")
		busy.want(t, "v")
	})
}

func TestARefreshWaitsForNoPlaceInTheFleet(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := oldCache(t, rdb, singlefill.Options[string]{StaleWhileRevalidate: time.Hour, MaxFleetLoads: 1}, "old", time.Second)
		src := newSource[string](t)
		busy := goGet(t.Context(), c, "busy", src.load)
		load := src.next(t)
		for range 5 {
			if a := <-goAsk(t.Context(), c, "k", mustNotLoad[string](t)); a.value != "old" || a.took != 0 {
				t.Errorf("answered %+v", a)
			}
			time.Sleep(time.Second)
		}
		load.give("v")
		busy.want(t, "v")
		synctest.Wait()
		time.Sleep(time.Second)
		<-goAsk(t.Context(), c, "k", gives("new"))
		synctest.Wait()
		wantGet(t, c, "k", "new", nil)
	})
}

func TestALoadFromInsideALoadNeedsNoPlaceInTheFleet(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := newCache(t, rdb, &singlefill.Options[string]{MaxFleetLoads: 1, MaxLoads: 1})
		goGet(t.Context(), c, "outer", func(ctx context.Context, _ string) (string, error) {
			return c.GetOrLoad(ctx, "inner", gives("v"))
		}).want(t, "v")
	})
}

//fault:killed-fleet-load
func TestADeadProcessKeepsItsPlaceInTheFleetForLockTTL(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ns := redistest.Namespace(t)
		dieHolding(t, m, ns)
		c := newCacheIn(t, rdb, ns, &singlefill.Options[string]{MaxFleetLoads: 1})
		begun := time.Now()
		goGet(t.Context(), c, "k", gives("v")).want(t, "v")
		if d := time.Since(begun); d < 5*time.Second || d > 6*time.Second {
			t.Errorf("the place of the dead was taken after %v, want LockTTL, 5s, and a pause", d)
		}
	})
}

// dieHolding takes the only place of a namespace and never renews it, as a process that has died.
func dieHolding(t *testing.T, m *miniredis.Miniredis, ns string) {
	t.Helper()
	dies := make(chan struct{})
	rdb := redistest.NewMiniClient(t, m)
	rdb.AddHook(cmdHook(func(cmd redis.Cmder) error {
		select {
		case <-dies:
			return redis.ErrClosed
		default:
			return nil
		}
	}))
	l, err := lock.NewSemaphore(rdb, ns+":loads", 1, &lock.Options{TTL: 5 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	lease, err := l.TryAcquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	close(dies)
	t.Cleanup(func() { _ = lease.Release(context.Background()) }) // for its goroutine
}

//fault:disagreement
func TestProcessesThatDisagreeOnMaxFleetLoadsAreTold(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ns := redistest.Namespace(t)
		var mu sync.Mutex
		var told []string // protected by mu
		one := newCacheIn(t, rdb, ns, &singlefill.Options[string]{MaxFleetLoads: 1})
		two := newCacheIn(t, rdb, ns, &singlefill.Options[string]{MaxFleetLoads: 2, Trace: &singlefill.Trace{
			RedisError: func(_ context.Context, op string, err error) {
				mu.Lock()
				defer mu.Unlock()
				told = append(told, op+": "+err.Error())
			},
		}})
		src := newSource[string](t)
		busy := goGet(t.Context(), one, "busy", src.load)
		load := src.next(t)
		goGet(t.Context(), two, "k", gives("v")).want(t, "v") // not bound, but served
		mu.Lock()
		defer mu.Unlock()
		if len(told) != 1 || !strings.HasPrefix(told[0], "fleet: ") || !strings.Contains(told[0], "is 2 here, and 1 with") {
			t.Errorf("told %q", told)
		}
		load.give("v")
		busy.want(t, "v")
	})
}

package singlefill_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// Stats counts each event once, and Trace reports it once.
func TestStats_Exact(t *testing.T) {
	t.Parallel()
	redistest.EachCache(t, func(t *testing.T, rdb redis.UniversalClient) {
		if cachetest.HitsMayBeLate(t) {
			return
		}
		ns, ctx := redistest.Namespace(t), t.Context()
		redistest.Must(t, rdb.Set(ctx, ns+":{bad}", "garbage", time.Hour).Err())
		var e cachetest.Events
		c := cachetest.NewCacheIn(t, rdb, ns, &singlefill.Options[any]{Trace: e.Trace()})
		src := cachetest.NewSource[any](t)

		_, _ = c.Get(ctx, "a") // a miss
		first, load := src.Begin(ctx, t, c, "a")
		if n := c.Stats().Loading; n != 1 {
			t.Errorf("%d loading, want 1", n)
		}
		if load.Ctx.Value(cachetest.TraceKey{}) != "by LoadStart" {
			t.Error("the Loader's context is not the one of LoadStart")
		}
		second := cachetest.GoGet(ctx, c, "a", src.Load).Waits(t)
		load.Give("v")
		first.Want(t, "v")
		second.Want(t, "v")

		_, _ = c.GetOrLoad(ctx, "none", cachetest.Fails[any](singlefill.ErrNotFound))
		_, _ = c.GetOrLoad(ctx, "none", cachetest.MustNotLoad[any](t)) // a hit
		_, _ = c.Get(ctx, "a")                                         // another one
		_, _ = c.GetOrLoad(ctx, "fails", cachetest.Fails[any](errors.New("no")))
		_, _ = c.GetOrLoad(ctx, "panics", func(context.Context, string) (any, error) { panic("no") })
		_, _ = c.GetOrLoad(ctx, "odd", cachetest.Gives[any](func() {})) // cannot be encoded
		_, _ = c.GetOrLoad(ctx, "bad", cachetest.Gives[any]("v"))       // cannot be decoded
		_, _ = c.GetOrLoad(ctx, "fenced", func(ctx context.Context, key string) (any, error) { return "v", c.Set(ctx, key, "w") })
		_ = c.Close() // LoadDone may come later than the answer

		want := singlefill.Stats{
			Hits: 2, Misses: 9, Shared: 1, Loads: 7, LoadsNotFound: 1, LoadErrors: 2, LoadPanics: 1,
			Stored: 3, StoreErrors: 1, Fenced: 1, BadValues: 1,
		}
		if got := c.Stats(); got != want {
			t.Errorf("got  %+v\nwant %+v", got, want)
		}
		var events []string
		for _, load := range []struct {
			key, err                 string
			storeErr, stored, fenced bool
		}{
			{"a", "<nil>", false, true, false},
			{"none", singlefill.ErrNotFound.Error(), false, true, false},
			{"fails", "no", false, false, false},
			{"panics", "singlefill: Loader panicked: no", false, false, false},
			{"odd", "<nil>", true, false, false},
			{"bad", "<nil>", false, true, false},
			{"fenced", "<nil>", false, false, true},
		} {
			events = append(events, "miss "+load.key, "start "+load.key, fmt.Sprintf("done %s %s, store error %t, stored %t, fenced %t, unlocked false",
				load.key, load.err, load.storeErr, load.stored, load.fenced))
		}
		e.Want(t, "all calls", append(events, "miss a", "miss a", "hit none", "hit a", "bad bad")...)
	})
}

// A bad value is traced with a context that has the caller's values and does not end.
//
// A function that writes the value down may take longer than the caller waits.
func TestTrace_ContextOfABadValue(t *testing.T) {
	t.Parallel()
	rdb := redistest.Shared(t).Client(t)
	ns := redistest.Namespace(t)
	type tenant struct{}
	var bad []context.Context
	c := cachetest.NewCacheIn(t, rdb, ns, &singlefill.Options[string]{Trace: &singlefill.Trace{
		BadValue: func(ctx context.Context, _ string, _ error) { bad = append(bad, ctx) },
	}})
	redistest.Must(t, rdb.Set(t.Context(), ns+":{k}", "garbage", time.Hour).Err())
	ctx, cancel := context.WithTimeout(context.WithValue(t.Context(), tenant{}, "t"), time.Hour)
	defer cancel()
	_, err := c.Get(ctx, "k")
	if err != singlefill.ErrMiss {
		t.Fatal(err)
	}
	cachetest.GoGet(ctx, c, "k", cachetest.Gives("v")).Want(t, "v")
	if err := c.Close(); err != nil || len(bad) < 2 {
		t.Fatalf("%v, %d bad values", err, len(bad))
	}
	for _, ctx := range bad {
		if ctx.Done() != nil || ctx.Value(tenant{}) != "t" {
			t.Errorf("%v", ctx)
		}
	}
}

// AddTrace adds functions to those that there are, which are called first. Without functions, or with nil,
// it adds nothing.
func TestAddTrace(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, _ *miniredis.Miniredis, rdb *redis.Client) {
		var seen []string
		trace := func(name string) *singlefill.Trace {
			add := func(format string, args ...any) { seen = append(seen, name+" "+fmt.Sprintf(format, args...)) }
			return &singlefill.Trace{
				Hit:   func(_ context.Context, key string) { add("hit %s", key) },
				Miss:  func(_ context.Context, key string) { add("miss %s", key) },
				Stale: func(_ context.Context, key string, _ singlefill.ValueInfo) { add("stale %s", key) },
				LoadStart: func(ctx context.Context, key string) context.Context {
					before, _ := ctx.Value(cachetest.TraceKey{}).(string)
					return context.WithValue(ctx, cachetest.TraceKey{}, before+name)
				},
				LoadDone: func(ctx context.Context, info singlefill.LoadInfo) {
					add("done %s in %v, ended: %v", info.Key, ctx.Value(cachetest.TraceKey{}), ctx.Err())
				},
				BreakerChanged: func(open bool) { add("breaker %t", open) },
			}
		}
		c := cachetest.NewCache(t, rdb, &singlefill.Options[string]{Trace: trace("A"), StaleWhileRevalidate: time.Hour})
		c.AddTrace(&singlefill.Trace{})
		c.AddTrace(nil)
		c.AddTrace(trace("B"))
		ctx := t.Context()
		_, _ = c.GetOrLoad(ctx, "k", cachetest.Gives("v"))
		synctest.Wait()
		_, _ = c.GetOrLoad(ctx, "k", cachetest.MustNotLoad[string](t))
		time.Sleep(time.Hour)
		_, _ = c.Get(ctx, "k")
		want := []string{
			"A miss k", "B miss k", "A done k in AB, ended: <nil>", "B done k in AB, ended: <nil>",
			"A hit k", "B hit k", "A hit k", "B hit k", "A stale k", "B stale k",
		}
		slices.Sort(seen[:4]) // LoadDone may come before or after
		slices.Sort(want[:4])
		if !slices.Equal(seen, want) {
			t.Errorf("told\n%q, want\n%q", seen, want)
		}
	})
}

// A call of a ManyLoader is traced once when it begins, and for each key when it is over.
func TestTrace_ManyLoader(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, _ *miniredis.Miniredis, rdb *redis.Client) {
		var began, ended cachetest.Events
		c := cachetest.NewCache(t, rdb, &singlefill.Options[string]{MaxBatch: 3, Trace: &singlefill.Trace{
			LoadStart: func(ctx context.Context, key string) context.Context {
				began.Add("a call")
				return context.WithValue(ctx, cachetest.TraceKey{}, key)
			},
			LoadDone: func(ctx context.Context, info singlefill.LoadInfo) {
				ended.Add("%s of %d from %v on", info.Key, info.Keys, ctx.Value(cachetest.TraceKey{}))
			},
		}})
		var mu sync.Mutex
		var loaded []string // protected by mu
		_, err := c.GetOrLoadMany(t.Context(), []string{"a", "b", "c", "d", "e"}, func(ctx context.Context, keys []string) (map[string]string, error) {
			mu.Lock()
			defer mu.Unlock()
			values := make(map[string]string)
			for _, key := range keys {
				values[key] = key
				loaded = append(loaded, fmt.Sprintf("%s of %d from %s on", key, len(keys), keys[0]))
			}
			if ctx.Value(cachetest.TraceKey{}) != keys[0] {
				t.Errorf("the ManyLoader for %q has the context of the load of %v", keys, ctx.Value(cachetest.TraceKey{}))
			}
			return values, nil
		})
		redistest.Must(t, err)
		synctest.Wait()
		began.Want(t, "beginnings", "a call", "a call")
		ended.Want(t, "ends", loaded...)
	})
}

// A call that waited for the load of another one learns so from ShareDone, with the values of its context.
func TestTrace_ShareDone(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, _ *miniredis.Miniredis, rdb *redis.Client) {
		var shared []string
		c := cachetest.NewCache(t, rdb, &singlefill.Options[string]{Trace: &singlefill.Trace{
			LoadStart: func(ctx context.Context, key string) context.Context {
				return context.WithValue(ctx, cachetest.TraceKey{}, "load")
			},
			ShareDone: func(ctx context.Context, info singlefill.ShareInfo) {
				shared = append(shared, fmt.Sprintf("%v waited %v for the %v of %s", ctx.Value(cachetest.TraceKey{}), info.Duration, info.Load.Value(cachetest.TraceKey{}), info.Key))
			},
		}})
		src := cachetest.NewSource[string](t)
		who := func(name string) context.Context { return context.WithValue(t.Context(), cachetest.TraceKey{}, name) }
		first, load := src.Begin(who("the first"), t, c, "k")
		time.Sleep(time.Second)
		second := cachetest.GoGet(who("the second"), c, "k", src.Load).Waits(t)
		synctest.Wait()
		time.Sleep(time.Second)
		ctx, cancel := context.WithTimeout(who("the third"), time.Second)
		defer cancel()
		cachetest.GoGet(ctx, c, "k", src.Load).WantErr(t, context.DeadlineExceeded)
		load.Give("v")
		first.Want(t, "v")
		second.Want(t, "v")
		synctest.Wait()
		want := []string{"the third waited 1s for the load of k", "the second waited 2s for the load of k"}
		if !slices.Equal(shared, want) {
			t.Errorf("told %q, want %q", shared, want)
		}
	})
}

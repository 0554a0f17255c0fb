package singlefill_test

import (
	"context"
	"io"
	"runtime"
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

// invalidations keep later callers from what a key was before.
var invalidations = map[string]func(ctx context.Context, c *singlefill.Cache[string], key string) error{
	"Delete": func(ctx context.Context, c *singlefill.Cache[string], key string) error { return c.Delete(ctx, key) },
	"Set": func(ctx context.Context, c *singlefill.Cache[string], key string) error {
		return c.Set(ctx, key, "new")
	},
	"Expire": func(ctx context.Context, c *singlefill.Cache[string], key string) error { return c.Expire(ctx, key) },
}

// A value whose load began before a Delete, here or in another process, is not stored after it. Callers
// that arrive after the Delete do not get it, and load again at once.
//
//fault:delete-in-load
func TestDelete_DuringLoad(t *testing.T) {
	t.Parallel()
	redistest.EachCache(t, func(t *testing.T, rdb redis.UniversalClient) {
		for _, where := range []string{"here", "elsewhere"} {
			for _, first := range []string{"the older load", "the newer load"} {
				t.Run(where+", "+first+" ends first", func(t *testing.T) {
					ns := redistest.Namespace(t)
					here, elsewhere := cachetest.NewCacheIn(t, rdb, ns, &cachetest.Raw), cachetest.NewCacheIn(t, rdb, ns, &cachetest.Raw)
					src := cachetest.NewSource[string](t)
					before, older := src.Begin(t.Context(), t, here, "k")
					joins := cachetest.GoGet(t.Context(), here, "k", src.Load).Waits(t)
					redistest.Must(t, map[string]*singlefill.Cache[string]{"here": here, "elsewhere": elsewhere}[where].Delete(t.Context(), "k"))
					after, newer := src.Begin(t.Context(), t, here, "k") // without waiting for the older load
					if first == "the older load" {
						older.Give("v1")
						before.Want(t, "v1")
						cachetest.WantStored(t, rdb, ns, "k", "")
					}
					newer.Give("v2")
					after.Want(t, "v2")
					if first == "the newer load" {
						older.Give("v1")
						before.Want(t, "v1")
					}
					// A caller that joined before the Delete may get either, but causes no load.
					if v, err := joins.Result(t); err != nil || v != "v1" && v != "v2" {
						t.Errorf("got %q, %v; want v1 or v2", v, err)
					}
					cachetest.GoGet(t.Context(), elsewhere, "k", src.Load).Want(t, "v2")
					_ = here.Close() // the older one's outcome is settled then
					cachetest.WantStored(t, rdb, ns, "k", "v2")
					cachetest.WantUnlocked(t, rdb, ns, "k")
					src.Want(t, 2)
					if s := here.Stats(); s.Stored != 1 || s.Fenced != 1 || s.LoadsUnlocked != 0 || where == "elsewhere" && s.LocksLost != 1 {
						t.Errorf("%+v, want one load stored and one fenced, and its lock lost if deleted elsewhere", s)
					}
				})
			}
		}
	})
}

// A load that a Delete or Set has overtaken, here or in another process, stores nothing, whether it has found a value
// or none. Later callers get what was set, without waiting for the load.
//
//fault:delete-in-load
func TestDelete_DuringTheOnlyLoad(t *testing.T) {
	t.Parallel()
	redistest.EachCache(t, func(t *testing.T, rdb redis.UniversalClient) {
		for _, set := range []string{"", "set"} {
			for _, elsewhere := range []bool{false, true} {
				for _, end := range []error{nil, singlefill.ErrNotFound} {
					ns := redistest.Namespace(t)
					c, by := cachetest.NewCacheIn(t, rdb, ns, &cachetest.Raw), cachetest.NewCacheIn(t, rdb, ns, &cachetest.Raw)
					if !elsewhere {
						by = c
					}
					src := cachetest.NewSource[string](t)
					before, load := src.Begin(t.Context(), t, c, "k")
					if set == "" {
						redistest.Must(t, by.Delete(t.Context(), "other", "k"))
					} else {
						redistest.Must(t, by.Set(t.Context(), "k", set))
						cachetest.GoGet(t.Context(), c, "k", src.Load).Want(t, set)
					}
					load.Ends <- cachetest.Ending[string]{Value: "loaded", Err: end}
					if _, err := before.Result(t); err != end {
						t.Errorf("the caller got %v, want %v", err, end)
					}
					_ = c.Close()
					cachetest.WantStored(t, rdb, ns, "k", set)
					src.Want(t, 1)
					if s := c.Stats(); s.Fenced != 1 || !elsewhere && s.LocksLost != 0 {
						t.Errorf("%q, elsewhere %t, %v: %+v, want one load fenced", set, elsewhere, end, s)
					}
				}
			}
		}
	})
}

// Callers that arrive after a store was sent ask Redis if the store is never answered.
//
// That store proves nothing: this process may have been frozen while others went on.
func TestDelete_StoreWithoutAReply(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		silent := redistest.NewMiniClient(t, m)
		mute := &cachetest.Outage{Keeps: cachetest.Script(t, "store")}
		mute.On.Store(true)
		silent.AddHook(mute.Hook())
		here, there := cachetest.NewCacheIn[string](t, silent, "n", nil), cachetest.NewCacheIn[string](t, rdb, "n", nil)
		get := func(value string) *cachetest.Call[string] {
			defer synctest.Wait()
			return cachetest.GoGet(t.Context(), here, "k", cachetest.Takes(time.Second, value, nil))
		}
		first := get("old")
		time.Sleep(time.Second / 2)
		during := get("new")
		time.Sleep(time.Second/2 + 100*time.Millisecond) // the store is in flight
		redistest.Must(t, there.Delete(t.Context(), "k"))
		late := get("new")
		first.Want(t, "old")
		during.Want(t, "new") // Redis can be asked, by any command but a store
		late.Want(t, "new")
	})
}

// Loads that no caller can be given any more are cancelled, and free their slots.
//
//fault:deleted-again
func TestDelete_VoidLoadsAreCancelled(t *testing.T) {
	for name, test := range map[string]struct {
		heeds bool
		most  int64
	}{
		"the Loader heeds its context":   {true, 3},
		"the Loader ignores its context": {false, 32}, // it has its slot until it returns
	} {
		cachetest.RunInBubble(t, name, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
			c := cachetest.NewCache(t, rdb, &singlefill.Options[string]{MaxLoads: 32})
			src := &cachetest.TimedSource{Takes: 500 * time.Millisecond, Heeds: test.heeds, Value: "v"}
			var callers sync.WaitGroup
			for range 200 {
				callers.Go(func() {
					ctx, cancel := context.WithTimeout(t.Context(), 8*time.Millisecond)
					defer cancel()
					_, _ = c.GetOrLoad(ctx, "k", src.Load)
				})
				time.Sleep(5 * time.Millisecond)
				redistest.Must(t, c.Delete(t.Context(), "k"))
			}
			callers.Wait()
			if n := src.Most.Load(); n > test.most || !test.heeds && n != test.most {
				t.Errorf("%d loads at a time, want %d at most", n, test.most)
			}
			begun := time.Now()
			cachetest.GoGet(t.Context(), c, "other", cachetest.Gives("v")).Want(t, "v")
			if test.heeds {
				cachetest.WantElapsed(t, "another key is loaded", begun, 0)
			}
			cachetest.GoGet(t.Context(), c, "k", cachetest.Gives("v")).Want(t, "v")
		})
	}
}

// DeleteIf removes the entry that an info describes, whether the value was loaded, shared or found, or
// ErrNotFound is remembered. It does not remove another entry, newer or equal.
func TestDeleteIf(t *testing.T) {
	t.Parallel()
	cachetest.UserEach(t, func(t *testing.T, rdb, look redis.UniversalClient) {
		ctx, ns := t.Context(), redistest.Namespace(t)
		opts := &singlefill.Options[string]{Codec: singlefill.Raw, NotFoundTTL: time.Hour}
		here, there := cachetest.NewCacheIn(t, rdb, ns, opts), cachetest.NewCacheIn(t, rdb, ns, opts)
		info := func(c *singlefill.Cache[string], key string, load singlefill.Loader[string]) singlefill.ValueInfo {
			t.Helper()
			_, info, err := c.GetOrLoadInfo(ctx, key, load)
			if err != nil && err != singlefill.ErrNotFound {
				t.Error(err)
			}
			return info
		}
		src := cachetest.NewSource[string](t)
		infos := make(chan singlefill.ValueInfo, 2)
		ask := func(ctx context.Context) {
			_, info, _ := here.GetOrLoadInfo(ctx, "shared", src.Load)
			infos <- info
		}
		go ask(ctx)
		load, waits := src.Next(t), make(chan struct{})
		go ask(redistest.OnDone(ctx, func() { close(waits) }))
		cachetest.Receive(t, "the second call waits", waits)
		load.Give("v")
		loaded, joined := <-infos, <-infos
		if loaded != joined {
			t.Errorf("infos of one value are %+v and %+v", loaded, joined)
		}
		wantDeleteIf(t, there, "shared", loaded, true)
		cachetest.WantStored(t, look, ns, "shared", "")
		wantDeleteIf(t, here, "shared", joined, false) // deleted before

		info(here, "k", cachetest.Gives("v"))
		found := info(there, "k", cachetest.Gives("v"))
		wantDeleteIf(t, here, "other", found, false)
		wantDeleteIf(t, here, "k", singlefill.ValueInfo{}, false)
		cachetest.WantStored(t, look, ns, "k", "v")
		wantDeleteIf(t, here, "k", found, true)
		cachetest.WantStored(t, look, ns, "k", "")
		redistest.Must(t, there.Set(ctx, "k", "v"))
		wantDeleteIf(t, here, "k", found, false) // set again
		cachetest.WantStored(t, look, ns, "k", "v")

		redistest.Must(t, here.Set(ctx, "expired", "v"))
		cachetest.WantGet(t, there, "expired", "v", nil)
		found = info(there, "expired", cachetest.Gives("v"))
		redistest.Must(t, here.Expire(ctx, "expired"))
		wantDeleteIf(t, there, "expired", found, false)

		none := info(here, "none", cachetest.Fails[string](singlefill.ErrNotFound))
		wantDeleteIf(t, there, "none", none, true)
		cachetest.WantStored(t, look, ns, "none", "")

		redistest.Must(t, there.Close())
		_, ofNoKey := here.DeleteIf(ctx, "", found)
		_, closed := there.DeleteIf(ctx, "k", found)
		if ofNoKey != singlefill.ErrEmptyKey || closed != singlefill.ErrClosed {
			t.Errorf("DeleteIf of the empty key: %v; of a closed cache: %v", ofNoKey, closed)
		}
	})
}

func wantDeleteIf(t testing.TB, c *singlefill.Cache[string], key string, info singlefill.ValueInfo, want bool) {
	t.Helper()
	if deleted, err := c.DeleteIf(t.Context(), key, info); deleted != want || err != nil {
		t.Errorf("DeleteIf(%s) = %t, %v, want %t", key, deleted, err, want)
	}
}

// DeleteIf supersedes the refresh of the entry that it removes, in any process, and no load of a newer one.
func TestDeleteIf_DuringLoad(t *testing.T) {
	t.Parallel()
	redistest.EachCache(t, func(t *testing.T, rdb redis.UniversalClient) {
		for _, where := range []string{"here", "elsewhere"} {
			ctx, ns := t.Context(), redistest.Namespace(t)
			opts := &singlefill.Options[string]{Codec: singlefill.Raw, StaleWhileRevalidate: time.Hour}
			here, elsewhere := cachetest.NewCacheIn(t, rdb, ns, opts), cachetest.NewCacheIn(t, rdb, ns, opts)
			deleter := map[string]*singlefill.Cache[string]{"here": here, "elsewhere": elsewhere}[where]
			src := cachetest.NewSource[string](t)
			redistest.Must(t, here.Set(ctx, "k", "v1"))
			redistest.Must(t, here.Expire(ctx, "k"))
			var info singlefill.ValueInfo
			redistest.Await(t, "the stale value is served", func() bool {
				var err error
				_, info, err = here.GetOrLoadInfo(ctx, "k", src.Load)
				return err == nil && info.Stale
			})
			refresh := src.Next(t)
			wantDeleteIf(t, deleter, "k", info, true)
			cachetest.WantGet(t, here, "k", "", singlefill.ErrMiss)
			leaves, leave := context.WithCancel(ctx)
			first, newer := src.Begin(leaves, t, here, "k") // without waiting for the refresh
			refresh.Give("v2")
			leave()
			first.WantErr(t, context.Canceled)
			for range 3 {
				wantDeleteIf(t, deleter, "k", info, false)
			}
			if newer.Ctx.Err() != nil {
				t.Errorf("%s: the newer load is cancelled", where)
			}
			after := cachetest.GoGet(ctx, here, "k", src.Load)
			newer.Give("v3")
			after.Want(t, "v3")
			_ = here.Close()
			cachetest.WantStored(t, rdb, ns, "k", "v3")
			src.Want(t, 2)
			if s := here.Stats(); s.Fenced != 1 || s.Stored != 1 || where == "here" && s.LocksLost != 0 {
				t.Errorf("%s: %+v, want the refresh fenced and the load stored, and no lock missed here", where, s)
			}
		}
	})
}

// A failure of Redis is returned also if Trace.RedisError leaves by runtime.Goexit, as t.Fatal does.
func TestInvalidation_TraceLeaves(t *testing.T) {
	t.Parallel()
	m, _ := redistest.StartMini(t)
	rdb := redis.NewClient(&redis.Options{Addr: m.Addr(), ContextTimeoutEnabled: true}) // in the caller's goroutine
	t.Cleanup(func() { _ = rdb.Close() })
	opts := &singlefill.Options[string]{Codec: singlefill.Raw, Trace: &singlefill.Trace{
		RedisError: func(context.Context, string, error) { runtime.Goexit() },
	}}
	c := cachetest.NewCacheIn(t, rdb, redistest.Namespace(t), opts)
	rdb.AddHook(redistest.Trips(func([]redis.Cmder) error { return io.ErrUnexpectedEOF }))
	for name, do := range map[string]func() error{
		"Delete":  func() error { return c.Delete(t.Context(), "k") },
		"Expire":  func() error { return c.Expire(t.Context(), "k") },
		"SetMany": func() error { return c.SetMany(t.Context(), map[string]string{"k": "v"}) },
	} {
		cachetest.WantErrText(t, name, do(), "runtime.Goexit")
	}
}

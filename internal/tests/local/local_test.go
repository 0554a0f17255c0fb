// Package local tests the promises of a cache in the memory of one process. Those of its client are also tested
// wherever redistest.EachCache is.
package local

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

func TestMain(m *testing.M) { redistest.Main(m) }

const life = time.Hour

func newCache[T any](t testing.TB, opts *singlefill.Options[T]) *singlefill.Cache[T] {
	t.Helper()
	c, err := singlefill.NewLocal("local", life, opts)
	redistest.Must(t, err)
	c.AddTrace(&singlefill.Trace{RedisError: func(_ context.Context, op string, err error) { t.Errorf("%s: %v", op, err) }})
	t.Cleanup(func() {
		if s := c.Stats(); s.RedisErrors != 0 || s.StoreErrors != 0 || s.LoadsUnlocked != 0 {
			t.Errorf("%+v", s)
		}
		redistest.Must(t, c.Close())
	})
	return c
}

// inBubble runs a test in fake time.
func inBubble(t *testing.T, run func(t *testing.T)) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, run)
}

// A hundred callers share one load, with or without options, and then a hit, each with a value of its own.
func TestLocal_Once(t *testing.T) {
	for name, opts := range map[string]*singlefill.Options[[]string]{"nil": nil, "tagged": {
		Tags: func(string, []string) []string { return []string{"t"} },
	}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCache(t, opts)
			src := cachetest.NewSource[[]string](t)
			for round := range 2 {
				var calls []*cachetest.Call[[]string]
				for range 100 {
					calls = append(calls, cachetest.GoGet(t.Context(), c, "{k}", src.Load))
				}
				if round == 0 {
					for _, call := range calls {
						call.Waits(t)
					}
					src.Next(t).Give([]string{"v"})
				}
				for _, call := range calls {
					v, err := call.Result(t)
					if err != nil || !slices.Equal(v, []string{"v"}) {
						t.Fatal(v, err)
					}
					v[0] = "changed"
				}
			}
			src.Want(t, 1)
			if s := c.Stats(); s.Hits != 100 || s.NearHits != 100 || s.Loads != 1 || s.Stored != 1 {
				t.Errorf("%+v", s)
			}
		})
	}
}

// Whatever supersedes a load in flight wins: the value is not stored, and later callers load.
func TestLocal_DeleteWins(t *testing.T) {
	tagged := &singlefill.Options[string]{Tags: func(string, string) []string { return []string{"tag"} }}
	for what, do := range map[string]func(ctx context.Context, c *singlefill.Cache[string]) error{
		"Delete":    func(ctx context.Context, c *singlefill.Cache[string]) error { return c.Delete(ctx, "k", "other") },
		"Expire":    func(ctx context.Context, c *singlefill.Cache[string]) error { return c.Expire(ctx, "k") },
		"Clear":     func(ctx context.Context, c *singlefill.Cache[string]) error { return c.Clear(ctx) },
		"DeleteTag": func(ctx context.Context, c *singlefill.Cache[string]) error { return c.DeleteTag(ctx, "tag") },
		"ExpireTag": func(ctx context.Context, c *singlefill.Cache[string]) error { return c.ExpireTag(ctx, "tag") },
		"complete books": func(ctx context.Context, c *singlefill.Cache[string]) error {
			return errors.Join(c.DeleteTag(ctx, "none"), c.DeleteTag(ctx, "tag"))
		},
	} {
		for _, newerFirst := range []bool{false, true} {
			t.Run(fmt.Sprint(what, " ", newerFirst), func(t *testing.T) {
				t.Parallel()
				c := newCache(t, tagged)
				src := cachetest.NewSource[string](t)
				before := cachetest.GoGet(t.Context(), c, "k", src.Load)
				older := src.Next(t)
				redistest.Must(t, do(t.Context(), c))
				after := cachetest.GoGet(t.Context(), c, "k", src.Load).Waits(t)
				if newerFirst {
					newer := src.Next(t)
					newer.Give("new")
					after.Want(t, "new")
					older.Give("old")
				} else {
					older.Give("old")
					src.Next(t).Give("new")
					after.Want(t, "new")
				}
				before.Result(t)
				cachetest.WantGet(t, c, "k", "new", nil)
				src.Want(t, 2)
			})
		}
	}
	t.Run("Set", func(t *testing.T) {
		t.Parallel()
		c := newCache(t, tagged)
		src := cachetest.NewSource[string](t)
		before := cachetest.GoGet(t.Context(), c, "k", src.Load)
		older := src.Next(t)
		redistest.Must(t, c.Set(t.Context(), "k", "set"))
		older.Give("old")
		before.Result(t)
		cachetest.WantGet(t, c, "k", "set", nil)
	})
}

// A stale value is served at once while it is loaded, and in place of an error; an early refresh comes before.
func TestLocal_Stale(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		opts := &singlefill.Options[string]{Jitter: -1, EarlyRefresh: -1, StaleWhileRevalidate: time.Hour, StaleIfError: 2 * time.Hour, RetryAfter: time.Minute}
		c := newCache(t, opts)
		redistest.Must(t, c.Set(t.Context(), "k", "old"))
		time.Sleep(life + time.Minute)
		cachetest.Ask(t.Context(), c, "k", cachetest.Takes(time.Second, "new", nil)).WantOld(t, "while it is loaded", time.Minute, nil)
		time.Sleep(2 * time.Second)
		cachetest.WantGet(t, c, "k", "new", nil)

		time.Sleep(life + 90*time.Minute)
		var loads atomic.Int64
		fails := func(context.Context, string) (string, error) { loads.Add(1); return "", cachetest.ErrSource }
		for range 3 { // within RetryAfter
			v, info, err := c.GetOrLoadInfo(t.Context(), "k", fails)
			if v != "new" || !info.Stale || info.Err == nil || err != nil {
				t.Errorf("%q, %+v, %v", v, info, err)
			}
		}
		if loads.Load() != 1 {
			t.Errorf("%d loads within RetryAfter", loads.Load())
		}
		time.Sleep(time.Hour)
		if v, err := c.GetOrLoad(t.Context(), "k", fails); err != cachetest.ErrSource {
			t.Errorf("after the windows: %q, %v", v, err)
		}
	})
}

// Values, absence and failures are remembered for as long as the options say, and not longer.
func TestLocal_Ends(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		c := newCache(t, &singlefill.Options[string]{
			Jitter: -1, EarlyRefresh: -1, NotFoundTTL: time.Minute, FailureTTL: time.Second,
			TTLFunc: func(key, _ string) time.Duration {
				if key == "brief" {
					return time.Minute
				}
				return life
			},
		})
		type outcome struct {
			value string
			err   error
		}
		for key, o := range map[string]outcome{"brief": {"v", nil}, "long": {"v", nil}, "none": {"", singlefill.ErrNotFound}, "down": {"", cachetest.ErrSource}} {
			loads := 0
			load := func(context.Context, string) (string, error) { loads++; return o.value, o.err }
			end := map[string]time.Duration{"brief": time.Minute, "long": life, "none": time.Minute, "down": time.Second}[key]
			for i, wait := range []time.Duration{0, end - time.Millisecond, time.Millisecond} {
				time.Sleep(wait)
				v, err := c.GetOrLoad(t.Context(), key, load)
				if remote, ok := errors.AsType[*singlefill.RemoteError](err); ok && i == 1 && key == "down" {
					err = cachetest.ErrSource
					if remote.Message != err.Error() {
						t.Error(remote)
					}
				}
				if v != o.value || err != o.err || loads != 1+i/2 {
					t.Errorf("%s, call %d: %q, %v after %d loads", key, i, v, err, loads)
				}
			}
		}
	})
}

// Each key of a call for many has its own outcome, in caches of any size.
func TestLocal_Many(t *testing.T) {
	t.Parallel()
	for _, size := range []int{100, 100_000} {
		c := newCache(t, &singlefill.Options[string]{Near: &singlefill.Near{Size: size}})
		keys := make([]string, 1000)
		for i := range keys {
			keys[i] = fmt.Sprint(i)
		}
		var asked atomic.Int64
		load := func(_ context.Context, some []string) (map[string]string, error) {
			asked.Add(int64(len(some)))
			found, errs := make(map[string]string), make(map[string]error)
			for _, key := range some {
				if found[key] = key; key == "7" {
					errs[key] = cachetest.ErrSource
				}
			}
			return found, &singlefill.ManyError{Errs: errs}
		}
		found, err := c.GetOrLoadMany(t.Context(), keys, load)
		many, ok := errors.AsType[*singlefill.ManyError](err)
		if !ok || len(many.Errs) != 1 || many.Errs["7"] != cachetest.ErrSource || len(found) != len(keys)-1 || asked.Load() != int64(len(keys)) {
			t.Fatalf("size %d: %d values of %d, %v", size, len(found), asked.Load(), err)
		}
		found, err = c.GetMany(t.Context(), keys)
		if size > len(keys) && (len(found) != len(keys)-1 || err != nil) {
			t.Errorf("%d values are kept, %v", len(found), err)
		}
		redistest.Must(t, c.SetMany(t.Context(), map[string]string{"a": "1", "b": "2"}))
		cachetest.WantGet(t, c, "b", "2", nil)
	}
}

// DeleteIf removes the value that was seen and no other one, and Refresh replaces a fresh one.
func TestLocal_RefreshAndDeleteIf(t *testing.T) {
	t.Parallel()
	c := newCache[string](t, nil)
	ctx := t.Context()
	_, seen, err := c.GetOrLoadInfo(ctx, "k", cachetest.Gives("1"))
	redistest.Must(t, err)
	redistest.Must(t, c.Refresh(ctx, "k", cachetest.Gives("2")))
	cachetest.WantGet(t, c, "k", "2", nil)
	if deleted, err := c.DeleteIf(ctx, "k", seen); deleted || err != nil {
		t.Errorf("the value before: %t, %v", deleted, err)
	}
	v, seen, err := c.GetOrLoadInfo(ctx, "k", cachetest.MustNotLoad[string](t))
	if deleted, failed := c.DeleteIf(ctx, "k", seen); v != "2" || !deleted || failed != nil || err != nil {
		t.Errorf("%q, %t, %v, %v", v, deleted, failed, err)
	}
	cachetest.WantGet(t, c, "k", "", singlefill.ErrMiss)
}

// Tags find their keys and no others, by the first call, by later ones, and after Clear.
func TestLocal_Tags(t *testing.T) {
	t.Parallel()
	c := newCache(t, &singlefill.Options[string]{
		StaleIfError: life, Tags: func(_, v string) []string { return strings.Split(v, "") },
	})
	ctx := t.Context()
	for i := range 3 {
		redistest.Must(t, c.SetMany(ctx, map[string]string{"1": "a", "2": "ab", "3": "bc"}))
		redistest.Must(t, c.ExpireTag(ctx, "a"))
		for key, stale := range map[string]bool{"1": true, "2": true, "3": false} {
			_, info, err := c.GetOrLoadInfo(ctx, key, cachetest.Fails[string](cachetest.ErrSource))
			if info.Stale != stale || err != nil {
				t.Errorf("round %d: %s: %+v, %v", i, key, info, err)
			}
		}
		redistest.Must(t, c.DeleteTag(ctx, "b"))
		found, err := c.GetMany(ctx, []string{"2", "3"})
		if len(found) != 0 || err != nil {
			t.Errorf("round %d: %v, %v", i, found, err)
		}
		if i == 1 {
			redistest.Must(t, c.Clear(ctx))
			cachetest.WantGet(t, c, "1", "", singlefill.ErrMiss)
		}
	}
	if s := c.Stats(); s.TagRebuilds != 1 || s.TagClears != 0 {
		t.Errorf("%+v", s)
	}
}

// No more values are kept than Size, and what is in use stays.
func TestLocal_Size(t *testing.T) {
	t.Parallel()
	const size = 200
	c := newCache(t, &singlefill.Options[string]{Near: &singlefill.Near{Size: size}})
	for i := range 20 * size {
		_, err := c.GetOrLoad(t.Context(), fmt.Sprint(i), cachetest.Gives("v"))
		redistest.Must(t, err)
	}
	kept := 0
	for i := range 20 * size {
		if _, err := c.Get(t.Context(), fmt.Sprint(i)); err == nil {
			kept++
		}
	}
	// Each of the two copies that there may be of a value counts by itself, and otter evicts a little later.
	if kept < size || kept > 3*size {
		t.Errorf("%d values are kept, want about %d", kept, size)
	}
}

// What has no meaning in one process is refused by its name, and so is what New refuses.
func TestLocal_Refused(t *testing.T) {
	t.Parallel()
	for name, opts := range map[string]*singlefill.Options[string]{
		"MaxFleetLoads": {MaxFleetLoads: 3},
		"Near.Size":     {Near: &singlefill.Near{Size: -1}},
		"RedisTimeout":  {RedisTimeout: -1},
		"StaleAfter":    {StaleAfter: time.Second},
	} {
		if _, err := singlefill.NewLocal("n", life, opts); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := singlefill.NewLocal[string]("n", 0, nil); err == nil || !strings.Contains(err.Error(), "ttl") {
		t.Errorf("ttl: %v", err)
	}
	if _, err := singlefill.NewLocal[string]("{n}", life, nil); err == nil || !strings.Contains(err.Error(), "namespace") {
		t.Errorf("namespace: %v", err)
	}
	if _, err := singlefill.NewLocal[chan int]("n", life, nil); err == nil {
		t.Error("a channel is allowed")
	}
}

// Check finds nothing missing, and leaves nothing, also in a cache that is full: no value has to go. Two caches of one
// name share nothing.
func TestLocal_CheckAndNames(t *testing.T) {
	t.Parallel()
	opts := &singlefill.Options[string]{
		Tags: func(string, string) []string { return []string{"t"} }, Audit: 1, Near: &singlefill.Near{Size: 1},
	}
	one, two := newCache(t, opts), newCache(t, opts)
	redistest.Must(t, one.Set(t.Context(), "k", "v"))
	redistest.Must(t, one.Check(t.Context()))
	cachetest.WantGet(t, one, "k", "v", nil)
	cachetest.WantGet(t, two, "k", "", singlefill.ErrMiss)
	if s := one.Stats(); s.NearAge != 0 || s.BreakerOpen {
		t.Errorf("%+v", s)
	}
}

// An audit finds a value that the source has changed without a Delete.
func TestLocal_Audit(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		c := newCache(t, &singlefill.Options[string]{Audit: 1, EarlyRefresh: -1})
		redistest.Must(t, c.Set(t.Context(), "k", "old"))
		for range 2 { // the first hit is in the store, the second one in memory
			_, err := c.GetOrLoad(t.Context(), "k", cachetest.Gives("new"))
			redistest.Must(t, err)
			time.Sleep(5 * time.Second)
			synctest.Wait()
		}
		if s := c.Stats(); s.Audits != 2 || s.AuditsStale != 2 {
			t.Errorf("%+v", s)
		}
	})
}

// Close waits for loads, refuses later calls, and frees goroutines and values, though the cache is still there.
func TestLocal_Close(t *testing.T) { // not parallel, since it measures memory
	synctest.Test(t, func(t *testing.T) {
		const size = 1 << 20
		begun := runtime.NumGoroutine()
		c, err := singlefill.NewLocal[[]byte]("local", life, nil)
		redistest.Must(t, err)
		if n := runtime.NumGoroutine(); n > begun {
			t.Errorf("%d goroutines before the first call", n-begun)
		}
		for i := range 32 {
			redistest.Must(t, c.Set(t.Context(), fmt.Sprint(i), bytes.Repeat([]byte("x"), size)))
			_, err := c.Get(t.Context(), fmt.Sprint(i)) // from now on there is a decoded one, too
			redistest.Must(t, err)
		}
		call := make(chan error, 1)
		go func() {
			_, err := c.GetOrLoad(t.Context(), "k", cachetest.Takes(10*time.Second, []byte("v"), nil))
			call <- err
		}()
		synctest.Wait()
		full := heap()
		redistest.Must(t, c.Close())
		redistest.Must(t, <-call)
		if freed := full - heap(); freed < 60*size {
			t.Errorf("%d bytes are freed", freed)
		}
		if _, err := c.GetOrLoad(t.Context(), "k", cachetest.MustNotLoad[[]byte](t)); err != singlefill.ErrClosed {
			t.Error(err)
		}
		if s := c.Stats(); s.Stored != 1 || s.RedisErrors != 0 {
			t.Errorf("%+v", s)
		}
		redistest.Must(t, c.Close())
	}) // which waits for all goroutines
}

// A cache that nobody closes keeps no bubble from ending, and its goroutines end with its loads.
func TestLocal_NotClosed(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		c, err := singlefill.NewLocal("local", life, &singlefill.Options[string]{
			StaleWhileRevalidate: life, Tags: func(string, string) []string { return []string{"t"} },
		})
		redistest.Must(t, err)
		for range 2 {
			for _, key := range []string{"a", "b"} {
				_, err = c.GetOrLoad(t.Context(), key, cachetest.Takes(time.Second, "v", nil))
				redistest.Must(t, err)
			}
			time.Sleep(life + time.Minute)
		}
		redistest.Must(t, c.Delete(t.Context(), "a"))
		redistest.Must(t, c.DeleteTag(t.Context(), "t"))
		_, err = c.GetOrLoad(t.Context(), "a", cachetest.Gives("v"))
		redistest.Must(t, err)
		cachetest.WantGet(t, c, "a", "v", nil) // a hit in memory
	})
}

func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// A Loader that panics, one that calls another key, values of any size, and keys of any form.
func TestLocal_Hostile(t *testing.T) {
	t.Parallel()
	c := newCache(t, &singlefill.Options[[]byte]{Codec: singlefill.Raw})
	ctx := t.Context()
	_, err := c.GetOrLoad(ctx, "p", func(context.Context, string) ([]byte, error) { panic("p") })
	if _, ok := errors.AsType[*singlefill.PanicError](err); !ok {
		t.Error(err)
	}
	large := bytes.Repeat([]byte("x"), 10<<20)
	for _, key := range []string{"{a}", "}", "%", "a:lock", "{", "\x00\xff", strings.Repeat("k", 1<<16), "tags:{local:0}:book"} {
		for range 2 { // Raw returns the bytes that it is given
			v, err := c.GetOrLoad(ctx, key, cachetest.Gives(slices.Clone(large)))
			if err != nil || !bytes.Equal(v, large) {
				t.Fatalf("%.20q: %d bytes, %v", key, len(v), err)
			}
			clear(v)
		}
		redistest.Must(t, c.Expire(ctx, key))
		redistest.Must(t, c.Delete(ctx, key))
		cachetest.WantGet(t, c, key, nil, singlefill.ErrMiss)
	}
	nested := func(ctx context.Context, _ string) ([]byte, error) {
		return c.GetOrLoad(ctx, "inner", cachetest.Gives([]byte("v")))
	}
	if v, err := c.GetOrLoad(ctx, "outer", nested); string(v) != "v" || err != nil {
		t.Errorf("%q, %v", v, err)
	}
	var all sync.WaitGroup
	for i := range 1000 {
		all.Go(func() {
			for j := range 5 {
				key := fmt.Sprint((i + j) % 50)
				v, err := c.GetOrLoad(ctx, key, func(context.Context, string) ([]byte, error) { return []byte(key), nil })
				if string(v) != key || err != nil {
					t.Errorf("%s: %q, %v", key, v, err)
				}
				if j == 3 {
					redistest.Must(t, c.Delete(ctx, key))
				}
			}
		})
	}
	all.Wait()
}

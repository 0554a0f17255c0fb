// Package local tests the promises of a cache in the memory of one process. The tests that run on
// redistest.EachCache also test its client.
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
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

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

// Thousands of callers share one load, with or without options, and then a hit, each with its own value. Callers that
// leave take nothing from them, and a load goes on when all its callers have left.
func TestLocal_Once(t *testing.T) {
	const callers = 5000
	for name, opts := range map[string]*singlefill.Options[[]string]{"nil": nil, "tagged": {
		Tags: func(string, []string) []string { return []string{"t"} },
	}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCache(t, opts)
			src := cachetest.NewSource[[]string](t)
			brief, leave := context.WithCancel(t.Context())
			defer leave()
			first, deserted := src.Begin(brief, t, c, "deserted")
			for round := range 2 {
				var calls []*cachetest.Call[[]string]
				for range callers {
					calls = append(calls, cachetest.GoGet(t.Context(), c, "{k}", src.Load))
				}
				if round == 0 {
					for _, call := range calls {
						call.Waits(t)
					}
					leaves := cachetest.GoGet(brief, c, "{k}", src.Load).Waits(t)
					leave()
					leaves.WantErr(t, context.Canceled)
					first.WantErr(t, context.Canceled)
					src.Next(t).Give([]string{"v"})
					deserted.Give([]string{"v"})
				}
				for _, call := range calls {
					v, err := call.Result(t)
					if err != nil || !slices.Equal(v, []string{"v"}) {
						t.Fatal(v, err)
					}
					v[0] = "changed"
				}
			}
			cachetest.WantGet(t, c, "deserted", []string{"v"}, nil)
			src.Want(t, 2)
			if s := c.Stats(); s.Hits < callers || s.NearHits < callers || s.Loads != 2 || s.Stored != 2 {
				t.Errorf("%+v", s)
			}
		})
	}
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

// DeleteTag of a full cache reads no values to find those with the tag, and the others stay.
func TestLocal_FullDuringDeleteTag(t *testing.T) {
	t.Parallel()
	const size = 10
	c := newCache(t, &singlefill.Options[string]{
		Near: &singlefill.Near{Size: size}, Tags: func(_, v string) []string { return []string{v} },
	})
	for i := range size {
		redistest.Must(t, c.Set(t.Context(), fmt.Sprint(i), "v"))
	}
	redistest.Must(t, c.DeleteTag(t.Context(), "other"))
	if n := c.Stats().TagRebuilds; n != 0 {
		t.Errorf("all values were read %d times", n)
	}
	for i := range size {
		if _, err := c.Get(t.Context(), fmt.Sprint(i)); err != nil {
			t.Errorf("value %d: %v", i, err)
		}
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
		full := redistest.Heap()
		redistest.Must(t, c.Close())
		redistest.Must(t, <-call)
		if freed := full - redistest.Heap(); freed < 60*size {
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

// A cache that is not closed keeps no bubble from ending, and its goroutines end with its loads.
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

// However many values of a kilobyte and of a megabyte are stored, loaded and read, they take at most 1.5 × MaxBytes and
// what docs/near.md names.
func TestLocal_MaxBytes(t *testing.T) {
	measuresMemory(t)
	const limit, constant = 64 << 20, 16 << 20
	c := newCache(t, &singlefill.Options[[]byte]{Near: &singlefill.Near{MaxBytes: limit}})
	before := redistest.Heap()
	hits := 0
	for i := range 400 {
		key := fmt.Sprint("large ", i)
		_, err := c.GetOrLoad(t.Context(), key, cachetest.Gives(bytes.Repeat([]byte("x"), 1<<20)))
		redistest.Must(t, err)
		for k := range 100 {
			key := fmt.Sprint("small ", i, " ", k)
			redistest.Must(t, c.Set(t.Context(), key, bytes.Repeat([]byte("x"), 1<<10)))
		}
		if _, err := c.Get(t.Context(), key); err == nil {
			hits++
		}
		if i%50 == 0 {
			if n := redistest.Heap() - before; n > limit*3/2+constant {
				t.Errorf("%d MiB are in use after %d large values", n>>20, i)
			}
		}
	}
	if hits < 300 {
		t.Errorf("%d of 400 values are found again at once", hits)
	}
	if n := redistest.Heap() - before; n > limit*3/2+constant || n < limit/4 {
		t.Errorf("%d MiB are in use at the end", n>>20)
	}
}

// What failed loads leave for FailureTTL, and the keys of tags, take no more room than Size values do, or than
// MaxBytes, however many there have been.
//
//fault:near-tags
func TestLocal_BoundsAll(t *testing.T) {
	measuresMemory(t)
	for name, test := range map[string]struct {
		near singlefill.Near
		tags int // of each value, and of no other
		most int64
	}{
		"Size":     {singlefill.Near{Size: 100}, 1, 500 << 10},
		"MaxBytes": {singlefill.Near{MaxBytes: 16 << 20}, 30, 24 << 20},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCache(t, &singlefill.Options[string]{
				FailureTTL: life, Near: &test.near, Tags: func(key, _ string) []string {
					all := []string{"all"}
					for i := range test.tags {
						all = append(all, fmt.Sprint(key, " ", i))
					}
					return all
				},
			})
			boom := errors.New(strings.Repeat("boom", 250))
			burst := func(n int) {
				for i := range n {
					_, err := c.GetOrLoad(t.Context(), fmt.Sprint("failed ", i), cachetest.Fails[string](boom))
					if err == nil {
						t.Fatal("a load has not failed")
					}
					redistest.Must(t, c.Set(t.Context(), fmt.Sprint("set ", i), "v"))
					_, err = c.GetOrLoad(t.Context(), fmt.Sprint("loaded ", i), cachetest.Gives("v"))
					redistest.Must(t, err)
				}
			}
			burst(200)
			before := redistest.Heap()
			burst(5000)
			if n := redistest.Heap() - before; n > test.most {
				t.Errorf("5000 failures and 10000 values have left %d KiB beside those of the first 200", n>>10)
			}
			deleted := 0
			c.AddTrace(&singlefill.Trace{TagDone: func(_ context.Context, info singlefill.TagInfo) { deleted = info.Keys }})
			redistest.Must(t, c.DeleteTag(t.Context(), "all"))
			if test.near.Size > 0 && (deleted > 100 || deleted < 30) {
				t.Errorf("DeleteTag has found %d keys, want about as many as are left", deleted)
			}
		})
	}
}

// Calls for many keys leave nothing behind that grows with the keys: no map keeps its largest size, neither in a cache
// that goes on nor in one that is closed, with Redis and without it.
func TestLocal_ManyKeysOnce(t *testing.T) {
	measuresMemory(t)
	const most = 350 << 10 // each of the maps would take twice as much
	keys := make([]string, 30_000)
	for i := range keys {
		keys[i] = fmt.Sprint("key ", i)
	}
	load := func(_ context.Context, keys []string) (map[string]int, error) {
		found := make(map[string]int)
		for i, key := range keys {
			found[key] = i
		}
		return found, nil
	}
	for name, open := range map[string]func(t *testing.T) (*singlefill.Cache[int], error){
		"memory": func(*testing.T) (*singlefill.Cache[int], error) {
			return singlefill.NewLocal("many", life, &singlefill.Options[int]{Near: &singlefill.Near{Size: 100}})
		},
		"Redis": func(t *testing.T) (*singlefill.Cache[int], error) {
			rdb := redistest.Shared(t).Client(t, func(o *redis.Options) { o.PoolSize = 2 })
			return singlefill.New[int](rdb, redistest.Namespace(t), life, nil)
		},
	} {
		t.Run(name, func(t *testing.T) {
			c, err := open(t)
			redistest.Must(t, err)
			use := func(n int) int64 {
				_, err := c.GetOrLoadMany(t.Context(), keys[:n], load)
				redistest.Must(t, err)
				var both sync.WaitGroup // a call that reads alone needs no map
				for _, half := range [][]string{keys[:n/2], keys[n/2 : n]} {
					both.Go(func() { _, _ = c.GetMany(t.Context(), half) })
				}
				both.Wait()
				redistest.Must(t, c.Clear(t.Context()))
				return redistest.Heap()
			}
			before := use(3000)
			if n := use(len(keys)) - before; n > most {
				t.Errorf("%d KiB are left after the calls", n>>10)
			}
			redistest.Must(t, c.Close())
			if n := redistest.Heap() - before; n > most {
				t.Errorf("%d KiB are left after Close", n>>10)
			}
			runtime.KeepAlive(c)
			runtime.KeepAlive(keys)
		})
	}
}

// measuresMemory skips a test of many thousand values with the race detector, which takes memory and time of its own.
// Such a test is not parallel.
func measuresMemory(t *testing.T) {
	if redistest.Race {
		t.Skip("measures memory")
	}
}

// SetMany of many values with one tag, and DeleteTag: nothing is left of the values, nor of the tag.
//
//fault:near-tags
func TestLocal_DeleteTagOfMany(t *testing.T) {
	measuresMemory(t)
	const n = 20_000
	keys, values := make([]string, n), make(map[string]string)
	for i := range keys {
		keys[i] = fmt.Sprint("key ", i)
		values[keys[i]] = "v"
	}
	tag, deleted := "", 0
	c := newCache(t, &singlefill.Options[string]{
		Near: &singlefill.Near{Size: 2 * n}, Tags: func(string, string) []string { return []string{tag} },
	})
	c.AddTrace(&singlefill.Trace{TagDone: func(_ context.Context, info singlefill.TagInfo) { deleted = info.Keys }})
	var before int64
	for round := range 3 {
		tag = fmt.Sprint("tag ", round)
		redistest.Must(t, c.SetMany(t.Context(), values))
		redistest.Must(t, c.DeleteTag(t.Context(), tag))
		found, err := c.GetMany(t.Context(), keys)
		if len(found) > 0 || err != nil || deleted != n {
			t.Errorf("%d values are found, %v; DeleteTag has found %d keys, want %d", len(found), err, deleted, n)
		}
		if round == 0 {
			before = redistest.Heap()
		}
	}
	if left := redistest.Heap() - before; left > 200<<10 {
		t.Errorf("two tags have left %d KiB", left>>10)
	}
	runtime.KeepAlive(keys)
	runtime.KeepAlive(values)
}

// DeleteTag also ends values of which only the decoded copy is left: the other one had no room.
//
//fault:near-tags
func TestLocal_DeleteTagOfEvicted(t *testing.T) {
	t.Parallel()
	c := newCache(t, &singlefill.Options[string]{
		Near: &singlefill.Near{Size: 100}, Tags: func(_, v string) []string { return []string{v} },
	})
	for i := range 90 {
		key := fmt.Sprint("k", i)
		redistest.Must(t, c.Set(t.Context(), key, "v"))
	}
	for i := range 200 {
		for k := range 90 {
			_, _ = c.Get(t.Context(), fmt.Sprint("k", k))
		}
		redistest.Must(t, c.Set(t.Context(), fmt.Sprint("other", i), "o"))
	}
	redistest.Must(t, c.DeleteTag(t.Context(), "v"))
	for i := range 90 {
		cachetest.WantGet(t, c, fmt.Sprint("k", i), "", singlefill.ErrMiss)
	}
}

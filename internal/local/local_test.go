package local_test

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/local"
	"github.com/singlefill/singlefill/internal/masters"
	"github.com/singlefill/singlefill/internal/redistest"
)

func TestMain(m *testing.M) { redistest.Main(m) }

func newClient(t testing.TB, most local.Limits) *local.Client {
	rdb, free := local.New("", most)
	t.Cleanup(free)
	return rdb
}

// A step is one command, or several.
type step func(ctx context.Context, c redis.Cmdable) redis.Cmder

// randomStep returns a command on one of few keys, so that most find what others have left.
func randomStep(r *rand.Rand, ns string) step {
	n := func(of int) string { return fmt.Sprint(r.IntN(of)) }
	text, other := ns+":{"+n(3)+"}", ns+":{"+n(2)+"}:lock"
	value := strings.Repeat(n(10), r.IntN(4))
	from, to := int64(r.IntN(6)), int64(r.IntN(8))
	life := time.Duration(1+r.IntN(9)) * time.Hour
	return []step{
		func(ctx context.Context, c redis.Cmdable) redis.Cmder { return c.Get(ctx, text) },
		func(ctx context.Context, c redis.Cmdable) redis.Cmder { return c.GetRange(ctx, text, from, to) },
		func(ctx context.Context, c redis.Cmdable) redis.Cmder { return c.Set(ctx, text, []byte(value), life) },
		func(ctx context.Context, c redis.Cmdable) redis.Cmder {
			return c.Set(ctx, other, value, life+time.Millisecond)
		},
		func(ctx context.Context, c redis.Cmdable) redis.Cmder { return c.SetNX(ctx, text, value, life) },
		func(ctx context.Context, c redis.Cmdable) redis.Cmder { return c.SetRange(ctx, text, from, value) },
		func(ctx context.Context, c redis.Cmdable) redis.Cmder { return c.Del(ctx, text, other) },
		func(ctx context.Context, c redis.Cmdable) redis.Cmder { return c.Unlink(ctx, other, text) },
		func(ctx context.Context, c redis.Cmdable) redis.Cmder { return c.Exists(ctx, text, other) },
		func(ctx context.Context, c redis.Cmdable) redis.Cmder { return c.PTTL(ctx, text) },
		func(ctx context.Context, c redis.Cmdable) redis.Cmder { return c.PTTL(ctx, other) },
		func(ctx context.Context, c redis.Cmdable) redis.Cmder { return c.PExpire(ctx, text, life) },
		func(ctx context.Context, c redis.Cmdable) redis.Cmder { return c.PExpire(ctx, other, 0) },
		func(ctx context.Context, c redis.Cmdable) redis.Cmder { return c.Scan(ctx, 0, ns+":{*}", 1<<30) },
		func(ctx context.Context, c redis.Cmdable) redis.Cmder {
			return c.Scan(ctx, 0, masters.Literal(ns)+":{*}:lock", 1<<30)
		},
	}[r.IntN(15)]
}

// said returns what a command has returned. Times are rounded, and replies without an order are sorted.
func said(cmd redis.Cmder) string {
	switch cmd := cmd.(type) {
	case *redis.DurationCmd:
		return fmt.Sprint(cmd.Val().Round(time.Minute), int64(min(cmd.Val(), 0)), cmd.Err())
	case *redis.ScanCmd:
		all, cursor := cmd.Val()
		slices.Sort(all)
		return fmt.Sprint(all, cursor, cmd.Err())
	}
	return cmd.String()
}

// The client answers as a real server does, alone and in pipelines.
func TestClient_AgreesWithRedis(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	ns := redistest.Namespace(t)
	redistest.Planted(t, ns)
	clients := []redis.UniversalClient{redistest.Shared(t).Client(t), newClient(t, local.Limits{Keys: 1000})}
	for i := range 4000 {
		var steps []step
		for range 1 + r.IntN(4) {
			steps = append(steps, randomStep(r, ns))
		}
		alone := r.IntN(2) == 0
		var all [2][]string
		for side, rdb := range clients {
			var cmds []redis.Cmder
			var err error
			if alone {
				for _, do := range steps {
					cmds = append(cmds, do(t.Context(), rdb))
				}
			} else {
				cmds, err = rdb.Pipelined(t.Context(), func(p redis.Pipeliner) error {
					for _, do := range steps {
						do(t.Context(), p)
					}
					return nil
				})
			}
			for _, cmd := range cmds {
				all[side] = append(all[side], said(cmd))
			}
			all[side] = append(all[side], fmt.Sprint(err))
		}
		if !slices.Equal(all[0], all[1]) {
			t.Fatalf("step %d:\nRedis %q\nlocal %q", i, all[0], all[1])
		}
	}
}

// Steps at once on one key do not disturb each other.
func TestStore_StepsAtOnce(t *testing.T) {
	t.Parallel()
	store := newClient(t, local.Limits{Keys: 10}).Store
	const callers, each = 50, 100
	var all sync.WaitGroup
	for range callers {
		all.Go(func() {
			for range each {
				step := store.Begin("{n}")
				n, _ := step.Get("{n}")
				step.Set("{n}", n+"x", time.Hour)
				step.End()
			}
		})
	}
	all.Wait()
	step := store.Begin("{n}")
	defer step.End()
	if n, _ := step.Get("{n}"); len(n) != callers*each {
		t.Errorf("%d steps have been seen, want %d", len(n), callers*each)
	}
}

// What has ended is freed without any command, and so is what is above the size, the oldest as a rule: values, and what
// failed loads have left. Locks that are held stay.
func TestStore_Frees(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		rdb := newClient(t, local.Limits{Keys: 100})
		size := func() int64 { return rdb.DBSize(t.Context()).Val() }
		for i := range 1000 {
			redistest.Must(t, rdb.Set(t.Context(), fmt.Sprintf("a:{%d}", i), "v", time.Hour).Err())
			redistest.Must(t, rdb.Set(t.Context(), fmt.Sprintf("a:{failed %d}:lock", i), "F", time.Hour).Err())
			redistest.Must(t, rdb.Set(t.Context(), fmt.Sprintf("a:{%d}:lock", i), "H", 90*time.Second).Err())
			redistest.Must(t, rdb.Get(t.Context(), "a:{0}").Err()) // it is in use
		}
		if n := size(); n != 100+1000 {
			t.Errorf("%d keys, want 100 values and failures, and 1000 locks", n)
		}
		if n := rdb.Exists(t.Context(), "a:{0}", "a:{1}", "a:{2}", "a:{999}").Val(); n != 2 {
			t.Errorf("%d are left, want the first and the last", n)
		}
		time.Sleep(2*time.Minute + time.Second)
		synctest.Wait()
		if n := size(); n != 100 {
			t.Errorf("%d keys, want the values and failures", n)
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		if n := size(); n != 0 {
			t.Errorf("%d keys have ended and are kept", n)
		}
	})
}

// With a bound in bytes values go until what is kept is within it. A value that has no room by itself takes no room of
// others.
func TestStore_Bytes(t *testing.T) {
	t.Parallel()
	rdb := newClient(t, local.Limits{Keys: 1000, Bytes: 1 << 20})
	set := func(key string, bytes int) {
		redistest.Must(t, rdb.Set(t.Context(), key, strings.Repeat("v", bytes), time.Hour).Err())
	}
	left := func() (bytes, keys int64) {
		all, _ := rdb.Scan(t.Context(), 0, "*", 1).Val()
		for _, key := range all {
			bytes += int64(len(rdb.Get(t.Context(), key).Val()))
		}
		return bytes, int64(len(all))
	}
	for i := range 500 {
		set(fmt.Sprintf("small:{%d}", i), 10)
		set(fmt.Sprintf("large:{%d}", i), 100_000)
	}
	if bytes, keys := left(); bytes > 1<<20 || bytes < 1<<19 || keys < 15 {
		t.Errorf("%d bytes in %d keys are left", bytes, keys)
	}
	_, before := left()
	set("huge:{1}", 1<<20)
	if bytes, keys := left(); bytes > 1<<20 || keys != before {
		t.Errorf("a value without room has left %d bytes in %d keys, before there were %d", bytes, keys, before)
	}
	for i := range 100_000 { // nothing is lost count of
		set(fmt.Sprintf("small:{%d}", i%10), i%1000)
	}
	if _, keys := left(); keys < 10 {
		t.Errorf("%d keys are left", keys)
	}
}

// tag stores a value with tags.
func tag(store *local.Store, key string, since uint64, tags ...string) bool {
	valueKey := "a:{" + key + "}"
	step := store.Begin(valueKey)
	defer step.End()
	if !step.Tag(valueKey, local.Tagging{Space: "a", Key: key, Tags: tags, Since: since}) {
		return false
	}
	step.Set(valueKey, "v", time.Hour)
	return true
}

// keysOf returns how many keys each tag has.
func keysOf(store *local.Store) map[string]int64 {
	all := make(map[string]int64)
	store.EachTag("a", func(tag string, keys int64) { all[tag] = keys })
	return all
}

func wantTags(t *testing.T, what string, store *local.Store, want map[string]int64) {
	t.Helper()
	if got := keysOf(store); !maps.Equal(got, want) {
		t.Errorf("%s: the tags have %v keys, want %v", what, got, want)
	}
}

// A key leaves its tags with its value, however that ends.
//
//fault:near-tags
func TestStore_Tags(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		rdb := newClient(t, local.Limits{Keys: 100})
		store := rdb.Store
		for i := range 10 {
			tag(store, fmt.Sprint(i), local.Unproved, "all", fmt.Sprint("of ", i%2))
		}
		wantTags(t, "stored", store, map[string]int64{"all": 10, "of 0": 5, "of 1": 5})
		tag(store, "0", local.Unproved, "all", "new")
		wantTags(t, "with other tags", store, map[string]int64{"all": 10, "of 0": 4, "of 1": 5, "new": 1})
		redistest.Must(t, rdb.Del(t.Context(), "a:{0}", "a:{2}").Err())
		redistest.Must(t, rdb.Set(t.Context(), "a:{1}", "v", time.Hour).Err())
		wantTags(t, "deleted, and set without tags", store, map[string]int64{"all": 7, "of 0": 3, "of 1": 4})
		redistest.Must(t, rdb.PExpire(t.Context(), "a:{3}", time.Second).Err())
		time.Sleep(time.Minute)
		synctest.Wait()
		wantTags(t, "ended", store, map[string]int64{"all": 6, "of 0": 3, "of 1": 3})
		for i := range 1000 {
			redistest.Must(t, rdb.Set(t.Context(), fmt.Sprintf("a:{other %d}", i), "v", time.Hour).Err())
		}
		wantTags(t, "evicted", store, map[string]int64{})
		tag(store, "ends", local.Unproved, "all")
		time.Sleep(time.Hour)
		tag(store, "ends", local.Unproved, "all")
		wantTags(t, "stored again at its end", store, map[string]int64{"all": 1})
	})
}

// A value whose tag has been invalidated since the sequence was read is not stored, and changes no tag, also when the
// mark has been dropped.
func TestStore_Marks(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := newClient(t, local.Limits{Keys: 100}).Store
		before := store.Sequence()
		if !tag(store, "1", before, "x", "y") {
			t.Error("a value is refused without a mark")
		}
		if keys := store.Mark("a", []string{"x"}, time.Minute); !slices.Equal(keys, []string{"1"}) {
			t.Errorf("the keys are %q", keys)
		}
		for _, what := range []string{"with a mark", "with a mark that has been dropped"} {
			if tag(store, "2", before, "z", "x") || tag(store, "1", before, "z", "x") {
				t.Errorf("%s: a value is stored", what)
			}
			wantTags(t, what, store, map[string]int64{"x": 1, "y": 1})
			if since := store.Sequence(); !tag(store, "1", since, "x", "y") || !tag(store, "1", local.Unproved, "x", "y") {
				t.Errorf("%s: a value that was loaded later is refused", what)
			}
			time.Sleep(3 * time.Minute)
			synctest.Wait()
		}
	})
}

// Each value with a tag that was loaded before an invalidation is found by it, or refused.
func TestStore_TagsAtOnce(t *testing.T) {
	t.Parallel()
	store := newClient(t, local.Limits{Keys: 1000}).Store
	var version atomic.Int64
	var all sync.WaitGroup
	done := make(chan struct{})
	for i := range 4 {
		all.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				since := store.Sequence()
				v := version.Load()
				key := fmt.Sprint(i)
				step := store.Begin("a:{" + key + "}")
				if step.Tag("a:{"+key+"}", local.Tagging{Space: "a", Key: key, Tags: []string{"t"}, Since: since}) {
					step.Set("a:{"+key+"}", fmt.Sprint(v), time.Hour)
				}
				step.End()
				runtime.Gosched() // otherwise the invalidations wait for a slice of time of each
			}
		})
	}
	for n := int64(1); n < 2000; n++ {
		version.Store(n)
		for _, key := range store.Mark("a", []string{"t"}, time.Hour) {
			step := store.Begin("a:{" + key + "}")
			step.Del("a:{" + key + "}")
			step.End()
		}
		for i := range 4 {
			step := store.Begin(fmt.Sprintf("a:{%d}", i))
			v, _ := step.Get(fmt.Sprintf("a:{%d}", i))
			step.End()
			if v != "" && v < fmt.Sprint(n) && len(v) <= len(fmt.Sprint(n)) {
				t.Fatalf("version %s is there after the invalidation of version %d", v, n)
			}
		}
	}
	close(done)
	all.Wait()
}

// A store may be closed while steps write, and while it evicts and frees.
func TestStore_CloseAtOnce(t *testing.T) {
	t.Parallel()
	for range 300 {
		rdb, free := local.New("a:{", local.Limits{Keys: 5})
		var all sync.WaitGroup
		for i := range 4 {
			all.Go(func() {
				for k := range 50 {
					tag(rdb.Store, fmt.Sprint(i, " ", k), local.Unproved, "t")
				}
			})
		}
		runtime.Gosched()
		free()
		all.Wait()
		wantTags(t, "closed", rdb.Store, map[string]int64{})
	}
}

// A caller may change the bytes that it gets, or has given.
func TestClient_OwnsItsBytes(t *testing.T) {
	t.Parallel()
	rdb := newClient(t, local.Limits{Keys: 10})
	given := []byte("abc")
	redistest.Must(t, rdb.Set(t.Context(), "k", given, time.Hour).Err())
	given[0] = 'x'
	for range 2 {
		got, err := rdb.Get(t.Context(), "k").Bytes()
		if string(got) != "abc" || err != nil {
			t.Fatalf("%q, %v", got, err)
		}
		got[0] = 'x'
	}
}

package fill_test

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/filllock"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
	"github.com/singlefill/singlefill/internal/value"
)

func TestMain(m *testing.M) { redistest.Main(m) }

var loadAll = cachetest.OneByOne(func(_ context.Context, key string) (string, error) { return "value of " + key, nil })

func keysOf(n int) (keys []string) {
	for i := range n {
		keys = append(keys, fmt.Sprint("k", i))
	}
	return keys
}

// A fill whose command to lock was not answered gives the lock up when it ends, also before the others of its call.
func TestSet_LockInDoubt(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, _ *miniredis.Miniredis, rdb *redis.Client) {
		ns, loses := redistest.Namespace(t), atomic.Bool{}
		lost := func(cmd redis.Cmder) bool {
			args := fmt.Sprint(cmd.Args()...)
			return loses.Load() && strings.HasPrefix(cmd.Name(), "eval") && strings.Contains(args, ns+":{b}") && len(cmd.Args()) == 12
		}
		rdb.AddHook(cachetest.After(func(cmd redis.Cmder) error {
			if lost(cmd) {
				return io.ErrUnexpectedEOF
			}
			return nil
		}))
		rdb.AddHook(redistest.Pipelines(func(ctx context.Context, cmds []redis.Cmder, next redis.ProcessPipelineHook) error {
			err := next(ctx, cmds)
			for _, cmd := range cmds {
				if lost(cmd) {
					cmd.SetErr(io.ErrUnexpectedEOF)
					err = io.ErrUnexpectedEOF
				}
			}
			return err
		}))
		opts := cachetest.Raw
		opts.StaleWhileRevalidate, opts.LockTTL, opts.LoadTimeout = time.Hour, time.Hour, 2*time.Hour
		c := cachetest.NewCacheIn(t, rdb, ns, &opts)
		get := func() {
			if _, err := c.GetOrLoadMany(t.Context(), []string{"a", "b"}, loadAll); err != nil {
				t.Fatal(err)
			}
		}
		get()
		redistest.Must(t, c.Expire(t.Context(), "a", "b"))
		loses.Store(true)
		get() // refreshes
		time.Sleep(time.Minute)
		loses.Store(false)
		time.Sleep(time.Minute)
		cachetest.WantUnlocked(t, rdb, ns, "b")
	})
}

// The keys of a holder that has died are loaded by one call of the loader, when its locks have ended.
//
//fault:killed-holder
func TestSet_KilledHolder(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, _ *miniredis.Miniredis, rdb *redis.Client) {
		const ttl = 3 * time.Second
		ns, keys := redistest.Namespace(t), keysOf(100)
		var pairs []filllock.Pair
		for _, key := range keys {
			pairs = append(pairs, filllock.PairOf(value.Key(ns, key)))
		}
		dead := filllock.NewMany(client.New(rdb, time.Second, func(context.Context, string, error) {}, nil, nil), pairs, ttl)
		var queries []filllock.Query
		for _, l := range dead {
			queries = append(queries, filllock.Query{Lock: l, Take: true})
		}
		for _, a := range filllock.GetOrLock(t.Context(), time.Second, queries) {
			if a.Err != nil || a.Value.Status != filllock.Locked {
				t.Fatalf("%+v", a)
			}
		}
		c := cachetest.NewCacheIn(t, rdb, ns, &cachetest.Raw)
		var calls atomic.Int64
		begun := time.Now()
		got, err := c.GetOrLoadMany(t.Context(), keys, func(ctx context.Context, keys []string) (map[string]string, error) {
			calls.Add(1)
			return loadAll(ctx, keys)
		})
		if took := time.Since(begun); len(got) != len(keys) || err != nil || took < ttl || took > 2*ttl {
			t.Errorf("%d values, %v, after %v", len(got), err, took)
		}
		if n := calls.Load(); n != 1 {
			t.Errorf("the loader was called %d times, want once", n)
		}
	})
}

// A thousand calls of three processes for random parts of 500 keys load each key once.
func TestSet_RandomParts(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, _ *miniredis.Miniredis, rdb *redis.Client) {
		ns := redistest.Namespace(t)
		var loads [500]atomic.Int64
		load := func(ctx context.Context, keys []string) (map[string]string, error) {
			for _, key := range keys {
				i, _ := strconv.Atoi(key)
				loads[i].Add(1)
			}
			time.Sleep(rand.N(100 * time.Millisecond))
			return loadAll(ctx, keys)
		}
		var all sync.WaitGroup
		for range 3 {
			own := redis.NewClient(rdb.Options())
			defer own.Close()
			c := cachetest.NewCacheIn(t, own, ns, &cachetest.Raw)
			for range 333 {
				all.Go(func() {
					time.Sleep(rand.N(50 * time.Millisecond))
					var keys []string
					for _, i := range rand.Perm(len(loads))[:1+rand.IntN(20)] {
						keys = append(keys, fmt.Sprint(i))
					}
					got, err := c.GetOrLoadMany(t.Context(), keys, load)
					if err != nil || len(got) != len(keys) {
						t.Errorf("%d of %d values, %v", len(got), len(keys), err)
					}
					for key, v := range got {
						if v != "value of "+key {
							t.Errorf("%s is %q", key, v)
						}
					}
				})
			}
		}
		all.Wait()
		for i := range loads {
			if n := loads[i].Load(); n > 1 {
				t.Errorf("%d loads of %d", n, i)
			}
		}
	})
}

// A tag whose index Redis refuses keeps no value from being stored that has other tags.
func TestSet_BadTag(t *testing.T) {
	t.Parallel()
	s := redistest.Shared(t)
	ns, keys := redistest.Namespace(t), []string{"k1", "k2", "k3", "k4"}
	opts := cachetest.Raw
	opts.Tags = func(key, _ string) []string { return []string{"tag of " + key} }
	c := cachetest.NewCacheIn(t, s.Client(t), ns, &opts)
	get := func() {
		if _, err := c.GetOrLoadMany(t.Context(), keys, loadAll); err != nil {
			t.Fatal(err)
		}
	}
	get()
	redistest.Must(t, c.Delete(t.Context(), keys...))
	index, err := s.Admin().Keys(t.Context(), ns+":*:tag of k1:index").Result()
	if err != nil || len(index) != 1 {
		t.Fatalf("indexes %q, %v", index, err)
	}
	redistest.Must(t, s.Admin().Set(t.Context(), index[0], "of another type", time.Hour).Err())
	get()
	got, err := c.GetMany(t.Context(), keys)
	if _, bad := got["k1"]; bad || len(got) != 3 || err != nil {
		t.Errorf("stored %v, %v; want all but k1", got, err)
	}
}

// A DeleteTag during a load refuses the values with this tag, and no others.
func TestSet_DeleteTagDuringLoad(t *testing.T) {
	t.Parallel()
	opts, keys := cachetest.Raw, keysOf(40)
	opts.Tags = func(key, _ string) []string { return []string{"tag of " + key} }
	c := cachetest.NewCache(t, redistest.Shared(t).Client(t), &opts)
	redistest.Must(t, c.DeleteTag(t.Context(), "first")) // reads all values
	_, err := c.GetOrLoadMany(t.Context(), keys, func(ctx context.Context, keys []string) (map[string]string, error) {
		redistest.Must(t, c.DeleteTag(ctx, "tag of k1"))
		return loadAll(ctx, keys)
	})
	if n, fenced := c.Stats().Stored, c.Stats().Fenced; err != nil || n != 39 || fenced != 1 {
		t.Errorf("%d of 40 values are stored, %d refused, %v", n, fenced, err)
	}
}

// One record tells the memory of other processes of all values that a load has made useless, however slow the log is.
func TestSet_RecordsTogether(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, _ *miniredis.Miniredis, rdb *redis.Client) {
		const timeout = 200 * time.Millisecond
		rdb.AddHook(redistest.Trips(func(cmds []redis.Cmder) error {
			for _, cmd := range cmds {
				if cmd.Name() == "xadd" {
					time.Sleep(timeout)
					return context.DeadlineExceeded
				}
			}
			return nil
		}))
		opts := cachetest.Raw
		opts.RedisTimeout, opts.Near = timeout, &singlefill.Near{MaxLag: time.Minute}
		c := cachetest.NewCache(t, rdb, &opts)
		begun, keys := time.Now(), keysOf(20)
		_, err := c.GetOrLoadMany(t.Context(), keys, cachetest.FailsMany[string](singlefill.ErrNoStale))
		if took := time.Since(begun); err == nil || took > 3*timeout {
			t.Errorf("%v after %v", err, took)
		}
	})
}

// withOneSlot returns two processes that run one load at a time, and the client of the first.
func withOneSlot(t *testing.T, m *miniredis.Miniredis) (here, there *singlefill.Cache[string], rdb *redis.Client) {
	opts := cachetest.Raw
	opts.MaxLoads, opts.LockTTL, opts.LoadTimeout = 1, time.Minute, time.Hour
	rdb = redistest.NewMiniClient(t, m)
	return cachetest.NewCacheIn(t, rdb, "ns", &opts), cachetest.NewCaches(t, m, "ns", 1, &opts)[0], rdb
}

// waitForEachOther makes a load of "outer" that calls asks, and then a call for a and b, whose load of b waits for that
// load. Then asks may begin. No lock of a minute must end before both return.
func waitForEachOther(t *testing.T, c *singlefill.Cache[string], asks singlefill.Loader[string]) {
	t.Helper()
	ctx, begin, many := t.Context(), make(chan struct{}), make(chan error, 1)
	outer := cachetest.GoGet(ctx, c, "outer", func(ctx context.Context, key string) (string, error) {
		<-begin
		return asks(ctx, key)
	})
	synctest.Wait()
	go func() {
		_, err := c.GetOrLoadMany(ctx, []string{"a", "b"}, func(ctx context.Context, keys []string) (map[string]string, error) {
			if keys[0] == "b" {
				time.Sleep(10 * time.Millisecond)
				_, err := c.GetOrLoad(ctx, "outer", cachetest.Gives("another"))
				return map[string]string{"b": "v"}, err
			}
			return loadAll(ctx, keys)
		})
		many <- err
	}()
	synctest.Wait()
	begun := time.Now()
	close(begin)
	if _, err := outer.Result(t); err != nil {
		t.Errorf("the outer load: %v", err)
	}
	if err := <-many; err != nil {
		t.Errorf("the call for many keys: %v", err)
	}
	if took := time.Since(begun); took > time.Minute {
		t.Errorf("they have waited for each other for %v", took)
	}
}

// A load that waits for a key of a call is not kept from it by the other keys of the call, which it has lent its slot.
//
//fault:nested-loads
func TestSet_LentSlot(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
		here, there, _ := withOneSlot(t, m)
		holds := cachetest.NewSource[string](t)
		holder, load := holds.Begin(t.Context(), t, there, "a")
		waitForEachOther(t, here, func(ctx context.Context, _ string) (string, error) {
			time.AfterFunc(time.Second, func() { _ = there.Delete(context.Background(), "a") })
			return here.GetOrLoad(ctx, "a", cachetest.Gives("v1"))
		})
		load.Give("v0")
		_, _ = holder.Result(t)
	})
}

// Nor when that key has a value, while the other keys of its call load.
//
//fault:nested-loads
func TestSet_LentSlotOfEndedFill(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
		here, there, rdb := withOneSlot(t, m)
		var armed atomic.Bool
		rdb.AddHook(redistest.Trips(func(cmds []redis.Cmder) error {
			if len(cmds) == 2 && strings.HasPrefix(cmds[0].Name(), "eval") && armed.CompareAndSwap(true, false) {
				return there.Set(context.Background(), "a", "theirs")
			}
			return nil
		}))
		waitForEachOther(t, here, func(ctx context.Context, _ string) (string, error) {
			armed.Store(true)
			if _, err := here.GetOrLoad(ctx, "a", cachetest.Gives("v1")); err != nil {
				return "", err
			}
			time.Sleep(100 * time.Millisecond)
			return here.GetOrLoad(ctx, "c", cachetest.Gives("vc"))
		})
		if armed.Load() {
			t.Error("a was not there when it was asked for")
		}
	})
}

// Values that together take longer than RedisTimeout are stored.
func TestSet_LargeValues(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	opts := cachetest.Raw
	keys, longest := keysOf(10), atomic.Int64{}
	rdb := s.Client(t)
	rdb.AddHook(redistest.Trips(func(cmds []redis.Cmder) error {
		longest.Store(max(longest.Load(), int64(redistest.Size(cmds))))
		return nil
	}))
	c := cachetest.NewCache(t, rdb, &opts)
	large := make(map[string]string)
	for _, key := range keys {
		large[key] = strings.Repeat("x", 1<<20)
	}
	_, err := c.GetOrLoadMany(t.Context(), keys, cachetest.GivesMany(large))
	if n := c.Stats().Stored; err != nil || n != int64(len(keys)) || longest.Load() > 3<<20/2 {
		t.Errorf("%d values are stored, %v; the longest pipeline has %d bytes", n, err, longest.Load())
	}
	if err := c.SetMany(t.Context(), large); err != nil || longest.Load() > 3<<20/2 {
		t.Errorf("SetMany: %v; the longest pipeline has %d bytes", err, longest.Load())
	}
}

package fill_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
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

// Keys that wait for a slot send a few commands a second together, and are loaded in their order.
//
//fault:long-queue
func TestMaxLoads_LongQueue(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		const keys = 500
		var commands atomic.Int64
		rdb.AddHook(cachetest.Before(func(redis.Cmder) error { commands.Add(1); return nil }))
		c := cachetest.NewCache(t, rdb, &singlefill.Options[string]{MaxLoads: 1})
		src := cachetest.NewSource[string](t)
		busy, load := src.Begin(t.Context(), t, c, "busy")
		var want, got []string
		var queue []*cachetest.Call[string]
		for i := range keys {
			key := fmt.Sprint(i)
			want = append(want, key)
			queue = append(queue, cachetest.GoGet(t.Context(), c, key, func(_ context.Context, key string) (string, error) {
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
		load.Give("v")
		busy.Want(t, "v")
		for _, a := range queue {
			a.Want(t, "v")
		}
		if !slices.Equal(got, want) {
			t.Error("the keys were not loaded in the order in which they came")
		}
	})
}

// A key that waits for a slot costs no goroutine beside its caller's, also after it has polled.
//
// The test does not run in parallel, since it counts all goroutines.
//
//fault:long-queue
func TestMaxLoads_GoroutinesOfTheQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const keys = 100
		_, rdb := redistest.StartMini(t)
		c := cachetest.NewCache(t, rdb, &singlefill.Options[string]{MaxLoads: 1, LoadTimeout: time.Hour})
		src := cachetest.NewSource[string](t)
		busy, load := src.Begin(t.Context(), t, c, "busy")
		var queue []*cachetest.Call[string]
		join := func(n int) {
			for range n {
				queue = append(queue, cachetest.GoGet(t.Context(), c, fmt.Sprint(len(queue)), cachetest.Gives("v")))
				synctest.Wait()
			}
		}
		join(10) // there are connections now
		before := runtime.NumGoroutine()
		join(keys)
		for range 2 {
			if n := runtime.NumGoroutine() - before; n > keys+10 {
				t.Errorf("%d goroutines for %d keys, want one for each", n, keys)
			}
			time.Sleep((keys + 20) * 250 * time.Millisecond) // each polls
			synctest.Wait()
		}
		load.Give("v")
		busy.Want(t, "v")
		for _, a := range queue {
			a.Want(t, "v")
		}
	})
}

// A value that is in Redis is found although the fill of its key waits for a slot.
//
//fault:long-queue
func TestMaxLoads_ValueOfAQueuedKey(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := cachetest.NewCache(t, rdb, &singlefill.Options[string]{MaxLoads: 1})
		src := cachetest.NewSource[string](t)
		cachetest.GoGet(t.Context(), c, "busy", src.Load)
		src.Next(t)
		var queue []*cachetest.Call[string]
		for i := range 50 {
			queue = append(queue, cachetest.GoGet(t.Context(), c, fmt.Sprint("k", i), src.Load))
		}
		synctest.Wait()
		if err := c.Set(t.Context(), "k7", "set"); err != nil { // here; elsewhere is the same
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if v, err := c.GetOrLoad(ctx, "k7", src.Load); v != "set" || err != nil {
			t.Errorf("a later caller got %q, %v", v, err)
		}
		queue[7].Want(t, "set") // the caller that waited gets it, too
	})
}

// A key that is invalidated while it waits for a slot asks Redis when it is its turn: Clear and Delete wake none.
//
//fault:clear-of-a-queue
func TestMaxLoads_ClearOfTheQueue(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		const keys = 100
		var asks atomic.Int64
		rdb.AddHook(cachetest.Before(func(cmd redis.Cmder) error {
			if strings.HasPrefix(cmd.Name(), "eval") {
				asks.Add(1)
			}
			return nil
		}))
		c := cachetest.NewCache(t, rdb, &singlefill.Options[string]{MaxLoads: 1})
		src := cachetest.NewSource[string](t)
		busy, load := src.Begin(t.Context(), t, c, "busy")
		names, queue := make([]string, keys), make([]*cachetest.Call[string], keys)
		for i := range keys {
			names[i] = fmt.Sprint("k", i)
			queue[i] = cachetest.GoGet(t.Context(), c, names[i], cachetest.Gives("v"))
		}
		synctest.Wait()
		before := asks.Load()
		redistest.Must(t, c.Clear(t.Context()))
		redistest.Must(t, c.Delete(t.Context(), names...))
		synctest.Wait()
		if n := asks.Load() - before; n > 1 { // busy starts to wake its waiters
			t.Errorf("%d of %d keys that wait for a slot have asked", n, keys)
		}
		load.Give("v")
		busy.Want(t, "v")
		for _, a := range queue {
			a.Want(t, "v")
		}
	})
}

// A fill that waits for another process holds no slot.
func TestMaxLoads_WaitingHoldsNoSlot(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ns := redistest.Namespace(t)
		opts := &singlefill.Options[string]{MaxLoads: 1}
		there, here := cachetest.NewCacheIn(t, rdb, ns, opts), cachetest.NewCacheIn(t, rdb, ns, opts)
		src := cachetest.NewSource[string](t)
		loads, load := src.Begin(t.Context(), t, there, "x")
		waits := cachetest.GoGet(t.Context(), here, "x", src.Load)
		synctest.Wait()
		cachetest.GoGet(t.Context(), here, "y", cachetest.Gives("y")).Want(t, "y")
		load.Give("x")
		loads.Want(t, "x")
		waits.Want(t, "x")
		src.Want(t, 1)
	})
}

// A fill that waits for a slot holds no lock.
func TestMaxLoads_QueueingHoldsNoLock(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ns := redistest.Namespace(t)
		here := cachetest.NewCacheIn(t, rdb, ns, &singlefill.Options[string]{MaxLoads: 1})
		there := cachetest.NewCacheIn[string](t, rdb, ns, nil)
		src := cachetest.NewSource[string](t)
		busy, load := src.Begin(t.Context(), t, here, "x")
		queues := cachetest.GoGet(t.Context(), here, "y", cachetest.MustNotLoad[string](t))
		synctest.Wait()
		begun := time.Now()
		cachetest.GoGet(t.Context(), there, "y", cachetest.Gives("y")).Want(t, "y")
		cachetest.WantElapsed(t, "another process loads it", begun, 0)
		queues.Want(t, "y") // which needs no slot any more
		load.Give("x")
		busy.Want(t, "x")
	})
}

// A Loader that asks for many keys at once lends its slot to one of them at a time.
//
//fault:nested-loads
func TestMaxLoads_NestedLoads(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := cachetest.NewCache(t, rdb, &singlefill.Options[string]{MaxLoads: 4})
		nested := &cachetest.TimedSource{Takes: 10 * time.Millisecond, Value: "v"}
		cachetest.GoGet(t.Context(), c, "outer", func(ctx context.Context, _ string) (string, error) {
			cachetest.GetAll(ctx, t, c, 250, nested.Load)
			return "v", nil
		}).Want(t, "v")
		if nested.Loads.Load() != 250 || nested.Most.Load() != 4 {
			t.Errorf("%d nested loads, %d at a time, want 250 and 4", nested.Loads.Load(), nested.Most.Load())
		}
	})
}

// Two caches' only slots can be held by loads that ask the other cache for a new key.
//
//fault:recursion
func TestMaxLoads_TwoCachesAskEachOther(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		one := cachetest.NewCache(t, rdb, &singlefill.Options[string]{MaxLoads: 1})
		two := cachetest.NewCache(t, rdb, &singlefill.Options[string]{MaxLoads: 1})
		begun := time.Now()
		goOn := make(chan struct{})
		asks := func(c *singlefill.Cache[string], key string) singlefill.Loader[string] {
			return func(ctx context.Context, _ string) (string, error) {
				<-goOn
				return c.GetOrLoad(ctx, key, cachetest.Gives(key))
			}
		}
		first := cachetest.GoGet(t.Context(), one, "a", asks(two, "c"))
		second := cachetest.GoGet(t.Context(), two, "b", asks(one, "d"))
		synctest.Wait()
		close(goOn)
		first.Want(t, "c")
		second.Want(t, "d")
		cachetest.WantElapsed(t, "both return", begun, 0)
	})
}

// A slot that is lent to a load of another cache is given back before its own cache is closed.
func TestClose_LentSlot(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		var fleet atomic.Int64
		rdb.AddHook(cachetest.Before(func(cmd redis.Cmder) error {
			if s := fmt.Sprint(cmd.Args()...); strings.HasPrefix(cmd.Name(), "eval") && strings.Contains(s, "}:loads") {
				fleet.Add(1)
			}
			return nil
		}))
		one := cachetest.NewCache(t, rdb, &singlefill.Options[string]{MaxLoads: 1, MaxFleetLoads: 1})
		two := cachetest.NewCache(t, rdb, &singlefill.Options[string]{MaxLoads: 1})
		src := cachetest.NewSource[string](t)
		_, busy := src.Begin(t.Context(), t, two, "busy")
		a := cachetest.GoGet(t.Context(), one, "a", func(ctx context.Context, _ string) (string, error) {
			ctx, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			_, err := two.GetOrLoad(ctx, "b", src.Load)
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
			return "a", nil
		})
		b := src.Next(t)
		a.Want(t, "a")
		var n int64
		closed := make(chan struct{})
		go func() {
			_ = one.Close()
			n = fleet.Load()
			close(closed)
		}()
		synctest.Wait()
		b.Give("b")
		busy.Give("busy")
		<-closed
		time.Sleep(time.Minute)
		if d := fleet.Load() - n; d != 0 {
			t.Errorf("%d commands of a cache that is closed", d)
		}
	})
}

// Close tells callers in the queue at once, whatever reads and loads it waits for.
func TestClose_Queue(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		reply := make(chan struct{})
		rdb.AddHook(cachetest.Before(func(cmd redis.Cmder) error {
			if cmd.Name() == "get" && strings.Contains(cmd.String(), "slow") {
				<-reply
			}
			return nil
		}))
		c := cachetest.NewCache(t, rdb, &singlefill.Options[string]{MaxLoads: 1})
		src := cachetest.NewSource[string](t)
		busy, load := src.Begin(t.Context(), t, c, "busy")
		queued := cachetest.GoGet(t.Context(), c, "queued", src.Load)
		slow := cachetest.GoGet(t.Context(), c, "slow", cachetest.Gives("v"))
		synctest.Wait()
		begun := time.Now()
		closed := cachetest.GoClose(t, c)
		if _, err := queued.Result(t); err != singlefill.ErrClosed || time.Since(begun) > 10*time.Millisecond {
			t.Errorf("the caller in the queue has %v after %v", err, time.Since(begun))
		}
		close(reply)
		_, _ = slow.Result(t)
		load.Give("v")
		busy.Want(t, "v")
		<-closed
	})
}

// A load that Close waits for may load other keys, for which there is no slot but its own.
func TestClose_QueueOfALoad(t *testing.T) {
	t.Parallel()
	_, rdb := redistest.StartMini(t)
	c := cachetest.NewCache(t, rdb, &singlefill.Options[string]{MaxLoads: 1})
	loading, closing := make(chan struct{}), make(chan struct{})
	get := cachetest.GoGet(t.Context(), c, "outer", func(ctx context.Context, _ string) (string, error) {
		close(loading)
		<-closing
		redistest.Await(t, "Close", func() bool { _, err := c.Get(t.Context(), "k"); return err == singlefill.ErrClosed })
		for i := range 200 {
			if _, err := c.GetOrLoad(ctx, fmt.Sprint(i), cachetest.Gives("v")); err != nil {
				return "", fmt.Errorf("key %d: %w", i, err)
			}
		}
		return "v", nil
	})
	<-loading
	closed := cachetest.GoClose(t, c)
	close(closing)
	get.Want(t, "v")
	<-closed
}

// The locks of a load are renewed until it has ended, also if a Delete of its key has failed and no caller waits for
// its value: no other process loads beside it.
//
//fault:failed-delete
func TestLoad_RenewedAfterFailedDelete(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		redistest.Mute(m)
		ns := redistest.Namespace(t)
		opts := &singlefill.Options[string]{Codec: singlefill.Raw, RedisTimeout: 500 * time.Millisecond, LockTTL: 3 * time.Second}
		here, there := cachetest.NewCacheIn(t, rdb, ns, opts), cachetest.NewCacheIn(t, redistest.NewMiniClient(t, m), ns, opts)
		var fails atomic.Bool
		rdb.AddHook(redistest.Trips(func(cmds []redis.Cmder) error {
			isDelete := func(cmd redis.Cmder) bool { return cmd.Name() == "del" || cmd.Name() == "unlink" }
			if fails.Load() && slices.ContainsFunc(cmds, isDelete) {
				return errors.New("cut")
			}
			return nil
		}))
		var running atomic.Int64
		load := func(context.Context, string) (string, error) {
			if running.Add(1) > 1 {
				t.Error("two loads at a time")
			}
			defer running.Add(-1)
			time.Sleep(12 * time.Second) // it ignores its context
			return "v", nil
		}
		ctx, leave := context.WithCancel(t.Context())
		cachetest.GoGet(ctx, here, "k", load)
		time.Sleep(time.Second)
		leave()
		time.Sleep(time.Second)
		fails.Store(true)
		if err := here.Delete(t.Context(), "k"); err == nil {
			t.Fatal("the Delete has not failed")
		}
		fails.Store(false)
		cachetest.GoGet(t.Context(), there, "k", load).Want(t, "v")
	})
}

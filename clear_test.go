package singlefill_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// Clear removes the values and locks of its namespace, and nothing else.
func TestClear(t *testing.T) {
	t.Parallel()
	redistest.EachCache(t, func(t *testing.T, rdb redis.UniversalClient) {
		ctx, ns := t.Context(), redistest.Namespace(t)
		c := cachetest.NewCacheIn(t, rdb, ns+":a*[b]", &singlefill.Options[string]{Codec: singlefill.Raw, MaxFleetLoads: 3, RedisTimeout: 15 * time.Second, LockTTL: 50 * time.Second})
		others := []*singlefill.Cache[string]{ // namespaces that the pattern must not match
			cachetest.NewCacheIn(t, rdb, ns+":aX[b]", &cachetest.Raw), cachetest.NewCacheIn(t, rdb, ns+":a*b", &cachetest.Raw), cachetest.NewCacheIn(t, rdb, ns+":a*[b]:more", &cachetest.Raw), cachetest.NewCacheIn(t, rdb, ns, &cachetest.Raw),
		}
		hostile := []string{"}:lock", "a}:lock", "x}:loads", "{", "}"}
		many := append(manyKeys(600), hostile...)
		redistest.Must(t, c.SetMany(ctx, valuesOf(many)))
		few := append(manyKeys(20), hostile...)
		for _, c := range others {
			redistest.Must(t, c.SetMany(ctx, valuesOf(few)))
		}
		// A failed load leaves a note in its lock.
		cachetest.GoGet(ctx, c, "failed", cachetest.Fails[string](cachetest.ErrSource)).WantErr(t, cachetest.ErrSource)
		redistest.Must(t, c.Clear(ctx))
		redistest.Await(t, "the values are gone", func() bool {
			got, err := c.GetMany(ctx, many)
			return err == nil && len(got) == 0
		})
		for _, c := range others {
			got, err := c.GetMany(ctx, few)
			wantMany(t, "another namespace", got, err, few...)
		}
	})
}

// Every load in flight is void, in this process and in others, and its waiters in other processes are
// woken.
func TestClear_Loads(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
		caches := cachetest.NewCaches(t, m, "ns", 3, &cachetest.Raw)
		s := cachetest.NewSource[string](t)
		var before []*cachetest.Call[string]
		for i, c := range caches {
			before = append(before, cachetest.GoGet(t.Context(), c, fmt.Sprint("k", i), s.Load))
		}
		old := []*cachetest.HeldLoad[string]{s.Next(t), s.Next(t), s.Next(t)}
		time.Sleep(time.Second)
		redistest.Must(t, caches[0].Clear(t.Context()))
		var after []*cachetest.Call[string]
		for i := range caches {
			for _, c := range []*singlefill.Cache[string]{caches[i], caches[(i+1)%3]} {
				after = append(after, cachetest.GoGet(t.Context(), c, fmt.Sprint("k", i), s.Load))
			}
		}
		for range caches {
			s.Next(t).Give("new") // it does not wait for the old load
		}
		for _, call := range after {
			call.Want(t, "new")
		}
		for _, load := range old {
			load.Give("old")
		}
		for _, call := range before { // they began before Clear
			call.Want(t, "old")
		}
		for i, c := range caches {
			cachetest.WantGet(t, c, fmt.Sprint("k", i), "new", nil)
		}
	})
}

// A call after Clear does not join a load from before, even if Redis cannot tell any more that this
// load has lost its lock.
func TestClear_ThenAway(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := cachetest.NewCache(t, rdb, &cachetest.Raw)
		s := cachetest.NewSource[string](t)
		before, old := s.Begin(t.Context(), t, c, "k")
		redistest.Must(t, c.Clear(t.Context()))
		m.SetError("LOADING dataset")
		after := cachetest.GoGet(t.Context(), c, "k", cachetest.Gives("new"))
		synctest.Wait()
		old.Give("old")
		after.Want(t, "new")
		before.Want(t, "old")
		m.SetError("")
	})
}

// Trace tells how far a Clear is. Its context can end it, and the next call goes on.
func TestClear_Progress(t *testing.T) {
	t.Parallel()
	rdb := redistest.Start(t).Client(t)
	ctx, cancel := context.WithCancel(t.Context())
	var mu sync.Mutex
	var steps []singlefill.ClearInfo
	trace := &singlefill.Trace{Clearing: func(_ context.Context, info singlefill.ClearInfo) {
		mu.Lock()
		defer mu.Unlock()
		if steps = append(steps, info); info.Pass == 2 {
			cancel()
		}
	}}
	c := cachetest.NewCache(t, rdb, &singlefill.Options[string]{Codec: singlefill.Raw, Trace: trace})
	values := valuesOf(manyKeys(5000))
	redistest.Must(t, c.SetMany(ctx, values))
	if err := c.Clear(ctx); err != context.Canceled {
		t.Errorf("Clear: %v, want the end of its context", err)
	}
	left, err := c.GetMany(t.Context(), manyKeys(5000))
	if err != nil || len(left) == 0 || len(left) == len(values) {
		t.Errorf("%d values left, %v; want a part of %d", len(left), err, len(values))
	}
	redistest.Must(t, c.Clear(t.Context()))
	if last := steps[len(steps)-1]; last.Pass != 2 || last.Removed != int64(len(left)) || last.Scanned != last.Keys || last.Keys < last.Removed {
		t.Errorf("the last step is %+v, want %d values removed, and all keys scanned", last, len(left))
	}
}

// A server that is full of values refuses the keys by which Clear proves that it finds keys. Clear removes
// the values first.
func TestClear_FullServer(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := cachetest.NewCache(t, rdb, &cachetest.Raw)
		redistest.Must(t, c.Set(t.Context(), "k", "old"))
		var freed, refused bool
		m.Server().SetPreHook(func(p *server.Peer, cmd string, args ...string) bool {
			freed = freed || cmd == "UNLINK"
			if cmd == "SET" && !freed {
				refused = true
				p.WriteError("OOM command not allowed when used memory > 'maxmemory'.")
				return true
			}
			return redistest.Muted(p, cmd, args...)
		})
		redistest.Must(t, c.Clear(t.Context()))
		if cachetest.WantGet(t, c, "k", "", singlefill.ErrMiss); !refused {
			t.Error("no SET was refused")
		}
	})
}

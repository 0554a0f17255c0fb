package singlefill_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
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

// near are the options of a Raw cache with Near.
func near(n singlefill.Near) *singlefill.Options[string] {
	return &singlefill.Options[string]{Codec: singlefill.Raw, Jitter: -1, Near: &n}
}

// awaitNear asks until memory serves key, and returns the value.
func awaitNear[T any](t testing.TB, c *singlefill.Cache[T], key string, load singlefill.Loader[T]) (v T) {
	t.Helper()
	redistest.Await(t, key+" is served from memory", func() bool {
		before := c.Stats().NearHits
		var err error
		v, err = c.GetOrLoad(context.Background(), key, load)
		redistest.Must(t, err)
		return c.Stats().NearHits > before
	})
	return v
}

// What Delete, Set, Expire, Refresh and Clear change is seen at once in their own process, and soon in every other one.
func TestNear_Invalidations(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		if cachetest.HitsMayBeLate(t) {
			if _, err := singlefill.New(rdb, "ns", time.Minute, near(singlefill.Near{})); err == nil {
				t.Error("New accepts Near with client-side caching")
			}
			return
		}
		ctx, ns := t.Context(), redistest.Namespace(t)
		here, there := cachetest.NewCacheIn(t, rdb, ns, near(singlefill.Near{})),
			cachetest.NewCacheIn(t, rdb, ns, near(singlefill.Near{}))
		source := "v1"
		load := func(context.Context, string) (string, error) { return source, nil }
		for i, change := range []struct {
			name   string
			change func() error
		}{
			{"Delete", func() error { return here.Delete(ctx, "k") }},
			{"Set", func() error { return here.Set(ctx, "k", source) }},
			{"Expire", func() error { return here.Expire(ctx, "k") }},
			{"Refresh", func() error { return here.Refresh(ctx, "k", load) }},
			{"Delete of many", func() error { return here.Delete(ctx, "a", "k", "b") }},
			{"SetMany", func() error { return here.SetMany(ctx, map[string]string{"k": source}) }},
			{"Clear", func() error { return here.Clear(ctx) }},
			{"DeleteIf", func() error {
				_, info, err := here.GetOrLoadInfo(ctx, "k", load)
				wantDeleteIf(t, here, "k", info, true)
				return err
			}},
		} {
			t.Run(change.name, func(t *testing.T) {
				awaitNear(t, here, "k", load)
				awaitNear(t, there, "k", load)
				source = fmt.Sprintf("v%d", i+2)
				redistest.Must(t, change.change())
				cachetest.GoGet(ctx, here, "k", load).Want(t, source) // at once, in the same process
				redistest.Await(t, "another process has the new value", func() bool {
					v, err := there.GetOrLoad(ctx, "k", load)
					return err == nil && v == source
				})
				if v, err := there.Get(ctx, "k"); v != source || err != nil {
					t.Errorf("Get in another process: %q, %v; want %q", v, err, source)
				}
			})
		}
	})
}

// Hits in memory send nothing but a read of the log in each half of MaxLag; a cache that no caller
// asks sends nothing.
func TestNear_Commands(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := cachetest.NewCache(t, rdb, near(singlefill.Near{MaxLag: 10 * time.Second}))
		awaitNear(t, c, "k", cachetest.Gives("v"))
		time.Sleep(time.Second)
		cachetest.WantCommands(t, m, "hits within half of MaxLag", 0, 0, func() {
			for range 1000 {
				cachetest.Ask(t.Context(), c, "k", cachetest.MustNotLoad[string](t))
			}
		})
		cachetest.WantCommands(t, m, "hits for 100 s", 40, 48, func() { // two commands in 4.4 to 5 s
			for range 1000 {
				time.Sleep(100 * time.Millisecond)
				cachetest.Ask(t.Context(), c, "k", cachetest.MustNotLoad[string](t))
			}
		})
		if hits := c.Stats().NearHits; hits < 2000 {
			t.Errorf("%d hits in memory", hits)
		}
		time.Sleep(time.Minute)
		cachetest.WantCommands(t, m, "half an hour without a call", 0, 0, func() { time.Sleep(time.Hour / 2) })
		redistest.Must(t, c.Close())
		cachetest.GoGet(t.Context(), c, "k", cachetest.Gives("v")).WantErr(t, singlefill.ErrClosed)
	})
}

// Memory also serves answers that there is no value, and stale values within StaleWhileRevalidate,
// which one process of the fleet refreshes.
func TestNear_NotFoundAndStale(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		opts := near(singlefill.Near{MaxLag: time.Hour})
		opts.StaleWhileRevalidate, opts.EarlyRefresh, opts.NotFoundTTL = time.Hour, -1, time.Hour
		c := cachetest.NewCache(t, rdb, opts)
		cachetest.Ask(t.Context(), c, "warm", cachetest.Gives("v"))
		synctest.Wait()
		for range 3 {
			cachetest.GoGet(t.Context(), c, "none", cachetest.Fails[string](singlefill.ErrNotFound)).WantErr(t, singlefill.ErrNotFound)
		}
		if _, err := c.Get(t.Context(), "none"); err != singlefill.ErrNotFound || c.Stats().NearHits != 3 {
			t.Errorf("Get: %v; %+v", err, c.Stats())
		}

		cachetest.Ask(t.Context(), c, "k", cachetest.Gives("old"))
		for range 11 { // the process stays awake
			time.Sleep(6 * time.Minute)
			cachetest.Ask(t.Context(), c, "warm", cachetest.Gives("v"))
		}
		hits := c.Stats().NearHits
		v, info, err := c.GetOrLoadInfo(t.Context(), "k", cachetest.Gives("new"))
		if v != "old" || err != nil || !info.Stale || info.Age != 66*time.Minute || c.Stats().NearHits != hits+1 || c.Stats().NearStale == 0 {
			t.Errorf("%q, %+v, %v; %d hits in memory, want the old value from memory", v, info, err, c.Stats().NearHits-hits)
		}
		synctest.Wait()
		if v, info, err = c.GetOrLoadInfo(t.Context(), "k", cachetest.MustNotLoad[string](t)); v != "new" || err != nil || info.Stale || c.Stats().NearHits != hits+2 {
			t.Errorf("%q, %+v, %v; want the new value from memory", v, info, err)
		}
	})
}

// A Refresh that fails leaves the value in memory, here and in other processes. Memory forgets it if the new value may
// have been stored all the same.
func TestNear_FailedRefresh(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		away, atTheLock := new(cachetest.Outage), &cachetest.Outage{Keeps: func(cmd []string) bool { return cmd[0] != "get" }}
		atTheStore := &cachetest.Outage{Keeps: cachetest.Script(t, "store"), Arrives: cachetest.Script(t, "store")}
		for _, out := range []*cachetest.Outage{away, atTheLock, atTheStore} {
			rdb.AddHook(out.Hook())
		}
		ctx, opts := t.Context(), near(singlefill.Near{MaxLag: time.Hour})
		opts.TTLFunc = func(string, string) time.Duration { return 1000 * time.Hour }
		here, there := cachetest.NewCacheIn(t, rdb, "ns", opts), cachetest.NewCaches(t, m, "ns", 1, opts)[0]
		caches := map[string]*singlefill.Cache[string]{"here": here, "there": there}
		fails, takes := cachetest.Fails[string](cachetest.ErrSource), cachetest.Takes(time.Second, "", cachetest.ErrSource)
		for _, refresh := range []struct {
			name string
			err  func() error
		}{
			{"failed load", func() error { return here.Refresh(ctx, "k", fails) }},
			{"failed load of many", func() error {
				return here.RefreshMany(ctx, []string{"k", "l"}, cachetest.FailsMany[string](cachetest.ErrSource))
			}},
			{"failed load elsewhere", func() error {
				go there.Refresh(ctx, "k", takes)
				synctest.Wait()
				return here.Refresh(ctx, "k", cachetest.MustNotLoad[string](t))
			}},
			{"recursion", func() (err error) {
				_ = here.Refresh(ctx, "k", func(ctx context.Context, key string) (string, error) {
					err = here.Refresh(ctx, key, fails)
					return "", err
				})
				return err
			}},
			{"without Redis", func() error {
				away.On.Store(true)
				defer away.On.Store(false)
				return here.Refresh(ctx, "k", fails)
			}},
			{"without Redis at the lock", func() error {
				atTheLock.On.Store(true)
				defer atTheLock.On.Store(false)
				return here.Refresh(ctx, "k", fails)
			}},
		} {
			for _, c := range caches {
				awaitNear(t, c, "k", cachetest.Gives("old"))
			}
			if err := refresh.err(); err == nil {
				t.Errorf("%s: Refresh returns nil", refresh.name)
			}
			time.Sleep(time.Minute)
			for where, c := range caches {
				hits := c.Stats().NearHits
				if v, err := c.GetOrLoad(ctx, "k", cachetest.Gives("loaded")); v != "old" || err != nil || c.Stats().NearHits != hits+1 {
					t.Errorf("%s, %s: %q, %v, %d hits in memory; want the old value from memory", refresh.name, where, v, err, c.Stats().NearHits-hits)
				}
			}
		}

		atTheStore.On.Store(true)
		if err := here.Refresh(ctx, "k", cachetest.Gives("new")); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Refresh returns %v, want that its store was not answered", err)
		}
		atTheStore.On.Store(false)
		cachetest.GoGet(ctx, here, "k", cachetest.Gives("new")).Want(t, "new")
		for range 60 { // the other process learns it within MaxLag, and stays awake
			time.Sleep(time.Minute)
			cachetest.Ask(ctx, there, "k", cachetest.MustNotLoad[string](t))
		}
		time.Sleep(time.Minute)
		cachetest.GoGet(ctx, there, "k", cachetest.MustNotLoad[string](t)).Want(t, "new")
	})
}

// An early refresh is drawn once for an entry, not once for each hit in memory.
func TestNear_EarlyRefresh(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		opts := near(singlefill.Near{MaxLag: time.Hour})
		opts.TTLFunc = func(string, string) time.Duration { return 20 * time.Minute }
		c := cachetest.NewCache(t, rdb, opts)
		const keys = 60
		load := cachetest.Takes(time.Second, "v", nil)
		hits := func(d time.Duration, each int) {
			for range int(d / time.Second) {
				time.Sleep(time.Second)
				for i := range keys * each {
					_, _ = c.GetOrLoad(t.Context(), fmt.Sprint(i%keys), load)
				}
			}
		}
		hits(time.Minute, 1)
		n := c.Stats()
		// Each draw refreshes with a probability of e^-60 at most until then. A draw for each of the hits
		// that follow would refresh each key for certain.
		hits(17*time.Minute, 1)
		if d := c.Stats(); n.Loads != keys || d.Loads != keys || d.Misses != keys {
			t.Errorf("%+v; want one load for each key", d)
		}
		load = cachetest.Gives("v")
		hits(3*time.Minute, 100)
		if n := c.Stats(); n.Refreshes == 0 || n.Refreshes == keys || n.Loads != 2*keys {
			t.Errorf("%+v; want that some keys are refreshed before they expire", n)
		}
	})
}

// Each caller owns its value, also the caller that has loaded it, unless Share is set.
func TestNear_Ownership(t *testing.T) {
	t.Parallel()
	type any1 struct{ V any }
	rdb := redistest.Shared(t).Client(t)
	for _, share := range []bool{false, true} {
		slices := cachetest.NewCache(t, rdb, &singlefill.Options[[]int]{Near: &singlefill.Near{Share: share}})
		decoded := cachetest.NewCache(t, rdb, &singlefill.Options[*any1]{Near: &singlefill.Near{Share: share}})
		loaded, err := slices.GetOrLoad(t.Context(), "k", cachetest.Gives([]int{1, 2}))
		redistest.Must(t, err)
		loaded[0] = 3
		a, b := awaitNear(t, slices, "k", cachetest.Gives([]int{1, 2})),
			awaitNear(t, slices, "k", cachetest.Gives([]int{1, 2}))
		if (&a[0] == &b[0]) != share || a[0] != 1 && !share {
			t.Errorf("Share %t: two callers have one slice: %t; %v", share, &a[0] == &b[0], a)
		}
		c, d := awaitNear(t, decoded, "k", cachetest.Gives(&any1{"x"})),
			awaitNear(t, decoded, "k", cachetest.Gives(&any1{"x"}))
		if (c == d) != share || c.V != "x" || d.V != "x" {
			t.Errorf("Share %t: two callers have one pointer: %t; %v, %v", share, c == d, c.V, d.V)
		}
	}
}

// When neither Redis nor the source answers, what memory has within StaleIfError is served as stale: not in place of
// an ErrNoStale, nor of an error after that.
func TestNear_Fallback(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	p := redistest.NewProxy(t, s.Addr)
	opts := near(singlefill.Near{MaxLag: 50 * time.Millisecond})
	opts.StaleIfError, opts.RedisTimeout, opts.Version = time.Hour, 100*time.Millisecond, 1
	c, err := singlefill.New(p.Client(t), redistest.Namespace(t), time.Hour, opts)
	redistest.Must(t, err)
	defer c.Close()
	awaitNear(t, c, "k", cachetest.Gives("v"))
	p.BlackHole(true)
	redistest.Await(t, "memory is not proven any more", func() bool { return c.Stats().NearAge > 50*time.Millisecond })
	hits := c.Stats().NearHits
	v, info, err := c.GetOrLoadInfo(t.Context(), "k", cachetest.Fails[string](cachetest.ErrSource))
	if v != "v" || err != nil || !info.Stale || info.Err != cachetest.ErrSource {
		t.Errorf("%q, %+v, %v; want the value as stale, because of the source", v, info, err)
	}
	cachetest.GoGet(t.Context(), c, "not in memory", cachetest.Fails[string](cachetest.ErrSource)).WantErr(t, cachetest.ErrSource)
	cachetest.GoGet(t.Context(), c, "k", cachetest.Gives("new")).Want(t, "new")
	if n := c.Stats(); n.NearHits != hits {
		t.Errorf("%d hits in memory without a proof", n.NearHits-hits)
	}
	for _, failure := range []error{fmt.Errorf("revoked (%w)", singlefill.ErrNoStale), cachetest.ErrSource} {
		cachetest.GoGet(t.Context(), c, "k", cachetest.Fails[string](failure)).WantErr(t, failure)
	}
	p.BlackHole(false)
	awaitNear(t, c, "k", cachetest.Gives("v"))
}

// A value that was in transit during an invalidation or a Refresh of this process is not kept, whichever
// command has found or stored it.
func TestNearRules_InTransit(t *testing.T) {
	get := func(*testing.T) func([]string) bool { return redistest.Command("get") }
	script := func(name string) func(t *testing.T) func([]string) bool {
		return func(t *testing.T) func([]string) bool { return cachetest.Script(t, name) }
	}
	for name, test := range map[string]struct {
		command func(t *testing.T) func(cmd []string) bool
		found   bool // there is a value; otherwise it is loaded
		late    bool // it is stored just after the read has missed it
		refresh bool // not Delete, but Refresh
		many    bool // it is read beside another key
	}{
		"read":         {command: get, found: true},
		"read of many": {command: get, found: true, many: true},
		"refreshed":    {command: get, found: true, refresh: true},
		"locked":       {command: script("get_or_lock"), found: true, late: true},
		"stored":       {command: script("store")},
	} {
		cachetest.RunInBubble(t, name, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
			redistest.Mute(m)
			ns, ctx := redistest.Namespace(t), t.Context()
			here := cachetest.NewCacheIn(t, rdb, ns, near(singlefill.Near{MaxLag: time.Hour}))
			there := cachetest.NewCaches(t, m, ns, 1, near(singlefill.Near{}))[0]
			awaitNear(t, here, "other", cachetest.Gives("v"))
			store := func() error { return there.Set(ctx, "k", "old") }
			if test.found && !test.late {
				redistest.Must(t, store())
			}
			matches := test.command(t)
			var done atomic.Bool
			answered := func(cmds ...redis.Cmder) {
				for _, cmd := range cmds {
					var err error
					switch {
					case test.late && cmd.Name() == "get" && !done.Load():
						err = store()
					case matches(cachetest.Args(cmd)) && done.CompareAndSwap(false, true):
						if test.refresh {
							err = here.Refresh(ctx, "k", cachetest.Gives("new"))
						} else {
							err = here.Delete(ctx, "k")
						}
					}
					if err != nil {
						t.Error(err)
					}
				}
			}
			rdb.AddHook(redistest.Commands(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
				err := next(ctx, cmd)
				answered(cmd)
				return err
			}))
			rdb.AddHook(redistest.Pipelines(func(ctx context.Context, cmds []redis.Cmder, next redis.ProcessPipelineHook) error {
				err := next(ctx, cmds)
				answered(cmds...)
				return err
			}))
			var err error
			if test.many {
				_, err = here.GetMany(ctx, []string{"k", "another"})
			} else {
				_, err = here.GetOrLoad(ctx, "k", cachetest.Gives("old"))
			}
			redistest.Must(t, err)
			if !done.Load() {
				t.Error("nothing was deleted")
			}
			cachetest.GoGet(ctx, here, "k", cachetest.Gives("new")).Want(t, "new")
		})
	}
}

// The process that invalidates serves nothing old from memory, though it does not read the log.
func TestNearRules_OwnInvalidation(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		redistest.Mute(m)
		ctx := t.Context()
		c := cachetest.NewCache(t, rdb, near(singlefill.Near{MaxLag: time.Hour}))
		for name, invalidate := range invalidations {
			awaitNear(t, c, "k", cachetest.Gives("old"))
			redistest.Must(t, invalidate(ctx, c, "k"))
			if cachetest.GoGet(ctx, c, "k", cachetest.Gives("new")).Want(t, "new"); t.Failed() {
				t.Fatal(name)
			}
			redistest.Must(t, c.Delete(ctx, "k"))
		}
	})
}

// DeleteIf of an entry that another process has deleted writes no record, and its own process serves that
// entry no more, though it does not read the log.
func TestNearRules_DeletedElsewhere(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		redistest.Mute(m)
		ctx := t.Context()
		caches := cachetest.NewCaches(t, m, "ns", 2, near(singlefill.Near{MaxLag: time.Hour}))
		var infos [2]singlefill.ValueInfo
		for i, c := range caches {
			awaitNear(t, c, "k", cachetest.Gives("old"))
			_, infos[i], _ = c.GetOrLoadInfo(ctx, "k", cachetest.MustNotLoad[string](t))
		}
		for i, c := range caches {
			before := rdb.XLen(ctx, "ns:log").Val()
			deleted, err := c.DeleteIf(ctx, "k", infos[i])
			written := rdb.XLen(ctx, "ns:log").Val() - before
			if deleted != (i == 0) || (written > 0) != deleted || err != nil {
				t.Errorf("process %d: DeleteIf = %t, %v, and %d records", i, deleted, err, written)
			}
			cachetest.GoGet(ctx, c, "k", cachetest.Gives("new")).Want(t, "new")
		}
	})
}

// A process without Near tells the memory of the others of each change within a second, also when it told them of
// another one a moment ago.
//
//fault:near-mixed
func TestNearRules_ProcessWithoutNear(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ctx := t.Context()
		here := cachetest.NewCacheIn(t, rdb, "ns", near(singlefill.Near{MaxLag: time.Second}))
		bare := cachetest.Raw
		bare.Tags = func(string, string) []string { return []string{"tag"} }
		there := cachetest.NewCaches(t, m, "ns", 1, &bare)[0]
		source := "v0"
		load := func(context.Context, string) (string, error) { return source, nil }
		change := func(name string, do func() error) {
			awaitNear(t, here, "k", load)
			source = "after " + name
			redistest.Must(t, do())
			// Memory stays in use.
			for begun := time.Now(); time.Since(begun) < 2*time.Second; time.Sleep(50 * time.Millisecond) {
				_, _ = here.GetOrLoad(ctx, "k", load)
			}
			if v, err := here.GetOrLoad(ctx, "k", load); v != source || err != nil {
				t.Errorf("after a %s: %q, %v; want %q", name, v, err, source)
			}
		}
		deleteOther := func() { // and wait until it has been told
			before := here.Stats().NearDrops
			redistest.Must(t, there.Delete(ctx, "other"))
			redistest.Await(t, "memory is dropped", func() bool {
				_, _ = here.GetOrLoad(ctx, "k", load)
				return here.Stats().NearDrops > before
			})
		}
		change("Delete", func() error { return there.Delete(ctx, "k") })
		change("Delete of many", func() error { return there.Delete(ctx, "a", "k", "b") })
		change("Set", func() error { return there.Set(ctx, "k", source) })
		change("SetMany", func() error { return there.SetMany(ctx, map[string]string{"k": source}) })
		change("Expire", func() error { return there.Expire(ctx, "k") })
		change("Refresh", func() error { return there.Refresh(ctx, "k", load) })
		change("DeleteTag", func() error { return there.DeleteTag(ctx, "tag") })
		change("Clear", func() error { return there.Clear(ctx) })
		change("DeleteIf", func() error {
			_, info, err := there.GetOrLoadInfo(ctx, "k", load)
			wantDeleteIf(t, there, "k", info, true)
			return err
		})
		deleteOther()
		change("Delete a moment later", func() error { return there.Delete(ctx, "k") })
		deleteOther()
		change("Delete and Close", func() error {
			defer func(begun time.Time) {
				if d := time.Since(begun); d > 0 {
					t.Errorf("Close took %v", d)
				}
			}(time.Now())
			return errors.Join(there.Delete(ctx, "k"), there.Close())
		})
	})
}

// A process without Near looks for the log once a second at most, and leaves the key of another program alone.
func TestNear_LooksForTheLog(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ctx := t.Context()
		redistest.Must(t, rdb.RPush(ctx, "ns:log", "of another program").Err())
		c := cachetest.NewCacheIn(t, rdb, "ns", &cachetest.Raw)
		var looks atomic.Int64
		rdb.AddHook(redistest.Trips(func(cmds []redis.Cmder) error {
			for _, cmd := range cmds {
				if slices.Contains(cmd.Args(), any("ns:log")) {
					looks.Add(1)
				}
			}
			return nil
		}))
		for range 1000 { // for 9.99 s
			redistest.Must(t, c.Delete(ctx, "k"))
			time.Sleep(10 * time.Millisecond)
		}
		redistest.Must(t, c.Close())
		if n := looks.Load(); n != 11 {
			t.Errorf("%d commands for the log during 1000 Deletes in 10 s, want 11, with the one of Close", n)
		}
		if n := rdb.LLen(ctx, "ns:log").Val(); n != 1 {
			t.Error("the key of another program is gone")
		}

		looks.Store(0) // a cache that is not closed, of a client that is
		c = cachetest.NewCacheIn(t, rdb, "ns", &cachetest.Raw)
		redistest.Must(t, c.Delete(ctx, "k"))
		redistest.Must(t, c.Delete(ctx, "k"))
		redistest.Must(t, rdb.Close())
		time.Sleep(time.Minute)
		if n := looks.Load(); n > 2 {
			t.Errorf("%d commands for the log after the client was closed, want one", n-1)
		}
	})
}

// A process that has not read the log for MaxLag, as after a freeze, asks Redis.
//
//fault:near-frozen
func TestNearRules_NoProof(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ns, ctx := redistest.Namespace(t), t.Context()
		opts := near(singlefill.Near{})
		opts.StaleIfError = time.Hour
		here := cachetest.NewCacheIn(t, rdb, ns, opts)
		there := cachetest.NewCaches(t, m, ns, 1, near(singlefill.Near{}))[0]
		awaitNear(t, here, "k", cachetest.Gives("old"))
		time.Sleep(time.Minute) // until it does not read the log any more
		redistest.Must(t, there.Delete(ctx, "k"))
		time.Sleep(time.Second)
		rdb.AddHook(redistest.Trips(func([]redis.Cmder) error { time.Sleep(2 * time.Millisecond); return nil }))
		hasty, cancel := context.WithTimeout(ctx, time.Millisecond) // which says nothing about Redis
		defer cancel()
		cachetest.GoGet(hasty, here, "k", cachetest.Gives("new")).WantErr(t, context.DeadlineExceeded)
		cachetest.GoGet(ctx, here, "k", cachetest.Gives("new")).Want(t, "new")
	})
}

// A client that is not known to reach one server only.
type wrapped struct{ redis.UniversalClient }

// MaxLag after an invalidation every process has noticed it: though its command took long, while
// others read the log and the old value; and though the server refuses the record.
func TestNearRules_OtherProcess(t *testing.T) {
	const maxLag, long = time.Second, 3010 * time.Millisecond
	const deleteByServers = "Delete by servers"
	changes := maps.Clone(invalidations)
	changes[deleteByServers] = changes["Delete"]
	for name, change := range changes {
		for _, refused := range []bool{false, true} {
			cachetest.RunInBubble(t, name+map[bool]string{false: "", true: ", record refused"}[refused], func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				var refuses atomic.Bool
				m.Server().SetPreHook(func(c *server.Peer, cmd string, args ...string) bool {
					if cmd == "XADD" && refuses.Load() {
						c.WriteError("OOM command not allowed when used memory > 'maxmemory'.")
						return true
					}
					return redistest.Muted(c, cmd, args...)
				})
				ns, ctx := redistest.Namespace(t), t.Context()
				opts := near(singlefill.Near{MaxLag: maxLag})
				here := cachetest.NewCaches(t, m, ns, 1, opts)[0]
				var client redis.UniversalClient = rdb
				if name == deleteByServers {
					client = wrapped{rdb}
					rdb.AddHook(byServers(long))
				} else {
					rdb.AddHook(slowInvalidations(long))
				}
				there := cachetest.NewCacheIn(t, client, ns, opts)
				var source atomic.Pointer[string]
				old, fresh := "old", "new"
				source.Store(&old)
				load := func(context.Context, string) (string, error) { return *source.Load(), nil }
				awaitNear(t, here, "k", load)
				refuses.Store(refused)
				returned := make(chan error)
				go func() { returned <- change(ctx, there, "k") }()
				for busy := true; busy; {
					select {
					case err := <-returned:
						redistest.Must(t, err)
						busy = false
					case <-time.After(50 * time.Millisecond):
						_, err := here.GetOrLoad(ctx, "k", load)
						redistest.Must(t, err)
					}
				}
				source.Store(&fresh)
				for begun := time.Now(); time.Since(begun) < maxLag; time.Sleep(50 * time.Millisecond) {
					_, err := here.Get(ctx, "other") // so that it goes on reading the log
					if err != singlefill.ErrMiss {
						t.Error(err)
					}
				}
				cachetest.GoGet(ctx, here, "k", load).Want(t, "new")
			})
		}
	}
}

// A lagging client reads from a replica, in which nothing changes.
type lagging struct {
	redis.UniversalClient
	replica *redis.Client
}

func (l lagging) Process(ctx context.Context, cmd redis.Cmder) error {
	if cmd.Name() == "get" {
		return l.replica.Process(ctx, cmd)
	}
	return l.UniversalClient.Process(ctx, cmd)
}

func (l lagging) Pipelined(ctx context.Context, queue func(p redis.Pipeliner) error) ([]redis.Cmder, error) {
	p := l.UniversalClient.Pipeline()
	if err := queue(p); err != nil {
		return nil, err
	}
	writes := func(cmd redis.Cmder) bool { return cmd.Name() != "get" && cmd.Name() != "pttl" }
	if slices.ContainsFunc(p.Cmds(), writes) {
		return p.Exec(ctx)
	}
	for _, cmd := range p.Cmds() {
		_ = l.replica.Process(ctx, cmd) // cmd has the error
	}
	return p.Cmds(), nil
}

// A client within another type may read from replicas: New cannot see it. Memory gets no old value from it.
//
//fault:near-wrapped
func TestNearRules_ReadsFromReplicas(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ns, ctx := redistest.Namespace(t), t.Context()
		there := cachetest.NewCacheIn(t, rdb, ns, near(singlefill.Near{}))
		redistest.Must(t, there.SetMany(ctx, map[string]string{"a": "old", "b": "old"}))
		_, replica := redistest.StartMini(t)
		for _, key := range []string{ns + ":{a}", ns + ":{b}"} {
			redistest.Must(t, replica.Set(ctx, key, rdb.Get(ctx, key).Val(), time.Hour).Err())
		}
		here := cachetest.NewCacheIn(t, lagging{redistest.NewMiniClient(t, m), replica}, ns, near(singlefill.Near{}))
		awaitNear(t, here, "a", cachetest.Gives("old"))
		redistest.Must(t, there.Delete(ctx, "a", "b"))
		time.Sleep(5 * time.Second)
		cachetest.GoGet(ctx, here, "a", cachetest.Gives("new")).Want(t, "new")
		all, err := here.GetOrLoadMany(ctx, []string{"a", "b"}, cachetest.GivesMany(map[string]string{"b": "new"}))
		cachetest.WantValue(t, all, err, map[string]string{"a": "new", "b": "new"})
	})
}

// slowInvalidations is a hook that delays pipelines that invalidate before they are sent.
func slowInvalidations(d time.Duration) redistest.Pipelines {
	return func(ctx context.Context, cmds []redis.Cmder, next redis.ProcessPipelineHook) error {
		if !slices.ContainsFunc(cmds, forTheLog) {
			time.Sleep(d)
		}
		return next(ctx, cmds)
	}
}

// byServers is slowInvalidations for pipelines whose parts reach several servers: the one with the
// log executes its part at once.
func byServers(d time.Duration) redistest.Pipelines {
	return func(ctx context.Context, cmds []redis.Cmder, next redis.ProcessPipelineHook) error {
		var log, others []redis.Cmder
		for _, cmd := range cmds {
			if forTheLog(cmd) {
				log = append(log, cmd)
			} else {
				others = append(others, cmd)
			}
		}
		if len(log) > 0 {
			if err := next(ctx, log); err != nil || len(others) == 0 {
				return err
			}
		}
		time.Sleep(d)
		return next(ctx, others)
	}
}

func forTheLog(cmd redis.Cmder) bool {
	return len(cmd.Args()) > 1 && strings.HasSuffix(cachetest.Args(cmd)[1], ":log")
}

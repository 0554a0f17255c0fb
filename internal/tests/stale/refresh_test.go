package stale_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

const notToBeKept = "a value that is not to be kept"

func refreshOptions() *singlefill.Options[string] {
	return &singlefill.Options[string]{
		Codec: singlefill.Raw, Jitter: -1, StaleWhileRevalidate: time.Hour, RetryAfter: time.Hour, NotFoundTTL: -1,
		TTLFunc: func(_, v string) time.Duration {
			if v == notToBeKept {
				return 0
			}
			return time.Hour
		},
	}
}

// A refreshing is a cache in the middle of a refresh of the key k.
type refreshing struct {
	*singlefill.Cache[string]
	elsewhere *singlefill.Cache[string] // in another process
	src       *cachetest.HeldSource[string]
	load      *cachetest.HeldLoad[string] // of the refresh
	ns        string
}

func beginRefresh(t testing.TB, rdb, look redis.UniversalClient, old entry.Entry) *refreshing {
	t.Helper()
	r := &refreshing{ns: redistest.Namespace(t)}
	r.Cache, r.elsewhere = cachetest.NewCacheIn(t, rdb, r.ns, refreshOptions()), cachetest.NewCacheIn(t, rdb, r.ns, refreshOptions())
	r.src = cachetest.NewSource[string](t)
	cachetest.PutEntry(t, look, r.ns, "k", old, time.Hour)
	cachetest.GoGet(t.Context(), r.Cache, "k", r.src.Load).Want(t, "v0")
	r.load = r.src.Next(t)
	return r
}

func (r *refreshing) by(where string) *singlefill.Cache[string] {
	if where == "here" {
		return r.Cache
	}
	return r.elsewhere
}

// superseding invalidates the key k, which then holds what it leaves of "v0".
var superseding = map[string]struct {
	do     func(ctx context.Context, c *singlefill.Cache[string]) error
	leaves string
}{
	"Delete": {func(ctx context.Context, c *singlefill.Cache[string]) error { return c.Delete(ctx, "k") }, ""},
	"Set":    {func(ctx context.Context, c *singlefill.Cache[string]) error { return c.Set(ctx, "k", "set") }, "set"},
	"Expire": {func(ctx context.Context, c *singlefill.Cache[string]) error { return c.Expire(ctx, "k") }, "v0"},
}

// A stale value is served at once, in all processes, until one of them has refreshed it.
func TestStaleWhileRevalidate_OneRefresh(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		var e cachetest.Events
		opts := cachetest.StaleOptions(time.Minute, 0)
		opts.Trace = staleTrace(&e)
		fleet := cachetest.NewCaches(t, m, "ns", 3, opts)
		src := cachetest.NewSource[string](t)
		cachetest.SetStale(t, fleet[0], "k", "old", time.Second)
		cachetest.Ask(t.Context(), fleet[0], "k", src.Load).WantOld(t, "the first reader", time.Second, nil)
		load := src.Next(t)
		e.Want(t, "the first reader", "hit k", "stale k true, 1h0m1s old, <nil>", "start k")
		readAll := func(times int) {
			for range times {
				for _, c := range fleet {
					cachetest.Ask(t.Context(), c, "k", src.Load).WantOld(t, "at once", time.Second, nil)
				}
			}
		}
		readAll(1)
		synctest.Wait() // the others know that the lock is held
		cachetest.WantCommands(t, m, "a GET for each read", 57, 57, func() { readAll(19) })
		time.Sleep(50 * time.Second)
		for _, c := range fleet {
			cachetest.Ask(t.Context(), c, "k", src.Load).WantOld(t, "while the refresh runs", 51*time.Second, nil)
			v, err := c.Get(t.Context(), "k")
			cachetest.WantValue(t, v, err, "old")
		}
		synctest.Wait()
		src.Want(t, 1)
		e.Seen = nil
		load.Give("new")
		synctest.Wait()
		e.Want(t, "the refresh", "done k <nil>, stored true, refresh true")
		for i, c := range fleet {
			cachetest.Ask(t.Context(), c, "k", src.Load).WantFresh(t, "refreshed", "new")
			want := singlefill.Stats{Hits: 23, Stale: 22, StaleHits: 22}
			if i == 0 {
				want = singlefill.Stats{Hits: 24, Stale: 23, StaleHits: 23, Loads: 1, Refreshes: 1, Stored: 1}
			}
			if s := c.Stats(); s != want {
				t.Errorf("process %d: %+v, want %+v", i, s, want)
			}
		}
		time.Sleep(2 * cachetest.StaleLife) // a key without readers is not refreshed
		synctest.Wait()
		src.Want(t, 1)
	})
}

// A refusal is an error reply.
type refusal string

func (e refusal) Error() string { return string(e) }
func (refusal) RedisError()     {}

// A refresh whose value Redis refuses has failed: RetryAfter holds. One to which it refuses the lock is tried
// again a second later. Readers get the old value, and the breaker stays closed.
func TestRefresh_Refused(t *testing.T) {
	for script, want := range map[string]singlefill.Stats{
		"get_or_lock": {RedisErrors: 20}, "store": {RedisErrors: 2, Loads: 2, StoreErrors: 2},
	} {
		cachetest.RunInBubble(t, script, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
			var refuse atomic.Bool
			refused := cachetest.Script(t, script)
			rdb.AddHook(cachetest.Before(func(cmd redis.Cmder) error {
				if refuse.Load() && refused(cachetest.Args(cmd)) {
					return refusal("OOM command not allowed when used memory > 'maxmemory'.")
				}
				return nil
			}))
			opts := singlefill.Options[string]{StaleWhileRevalidate: time.Hour, RetryAfter: 10 * time.Second}
			c := cachetest.OldCache(t, rdb, opts, "old", time.Second)
			refuse.Store(true)
			for range 200 {
				a := <-cachetest.GoAsk(t.Context(), c, "k", cachetest.Gives("new"))
				if a.Value != "old" || a.Err != nil {
					t.Fatalf("answered %+v", a)
				}
				time.Sleep(100 * time.Millisecond)
			}
			s := c.Stats()
			if s.Loads != want.Loads || s.StoreErrors != want.StoreErrors || s.RedisErrors != want.RedisErrors ||
				s.BreakerOpens != 0 {
				t.Errorf("%+v in 20 s, want %+v", s, want)
			}
		})
	}
}

// A refresh that finds nothing to keep removes the old value.
func TestRefresh_NothingToKeep(t *testing.T) {
	for _, test := range []struct {
		name string
		set  func(o *singlefill.Options[string])
		load singlefill.Loader[string]
		want cachetest.Answer // of the caller that waits for the load
		kept bool             // remembered instead
	}{
		{
			"not found", func(o *singlefill.Options[string]) { o.NotFoundTTL = -1 },
			cachetest.Fails[string](fmt.Errorf("wrapped: %w", singlefill.ErrNotFound)), cachetest.Answer{}, false,
		},
		{"not found, remembered", func(*singlefill.Options[string]) {}, cachetest.Fails[string](singlefill.ErrNotFound), cachetest.Answer{Err: singlefill.ErrNotFound}, true},
		{
			"a value without a life", func(o *singlefill.Options[string]) {
				o.TTLFunc = func(_, v string) time.Duration {
					if v == "dead" {
						return 0
					}
					return cachetest.StaleLife
				}
			}, cachetest.Gives("dead"), cachetest.Answer{Value: "dead"}, false,
		},
	} {
		for _, kind := range windowKinds {
			name := test.name + ", " + kind.name
			cachetest.RunInBubble(t, name, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				opts := kind.opts()
				test.set(opts)
				fleet := cachetest.NewCaches(t, m, "ns", 2, opts)
				cachetest.SetStale(t, fleet[0], "k", "old", time.Second)
				r := cachetest.Ask(t.Context(), fleet[0], "k", test.load)
				switch {
				case !kind.ifError:
					r.WantOld(t, "the reader that begins it", time.Second, nil)
				case test.want == cachetest.Answer{}:
					if !errors.Is(r.Err, singlefill.ErrNotFound) || r.Err == singlefill.ErrNotFound || r.Info.Stale {
						t.Errorf("got %+v, want the Loader's error", r)
					}
				default:
					r.Want(t, "the caller that waits for it", test.want)
				}
				synctest.Wait()
				if s := fleet[0].Stats(); s.LoadErrors != 0 || s.StaleOnError != 0 {
					t.Errorf("%+v, want no failure", s)
				}
				if test.kept {
					cachetest.Ask(t.Context(), fleet[1], "k", cachetest.MustNotLoad[string](t)).Want(t, "remembered",
						cachetest.Answer{Err: singlefill.ErrNotFound})
					return
				}
				cachetest.WantStored(t, rdb, "ns", "k", "")
				if record, found := cachetest.Stored(t, rdb, "ns:{k}:lock"); found && test.want.Value != "" {
					t.Errorf("the lock key holds %q, though nothing has failed", record)
				}
				cachetest.Ask(t.Context(), fleet[1], "k", cachetest.Gives("new")).WantFresh(t, "the next caller", "new")
			})
		}
	}
}

// A load that callers wait for gets ErrRecursive from its own key, although the key holds a stale
// value.
func TestErrRecursive_StaleKey(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := cachetest.NewCache(t, rdb, cachetest.StaleOptions(0, time.Minute))
		cachetest.SetStale(t, c, "k", "old", 0)
		cachetest.Ask(t.Context(), c, "k", func(ctx context.Context, key string) (string, error) {
			return c.GetOrLoad(ctx, key, cachetest.MustNotLoad[string](t))
		}).WantOld(t, "a failure like any other", 0, singlefill.ErrRecursive)
	})
}

// Close waits for a running refresh and its store, and not for a queued refresh.
func TestClose_WaitsForRefreshAndStore(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		opts := cachetest.StaleOptions(time.Minute, 0)
		opts.MaxLoads = 1
		c := cachetest.NewCacheIn(t, rdb, "ns", opts)
		for _, key := range []string{"queues", "k"} {
			redistest.Must(t, c.Set(t.Context(), key, "old"))
		}
		time.Sleep(cachetest.StaleLife)
		src := &cachetest.TimedSource{Takes: 10 * time.Second, Value: "new"}
		cachetest.Ask(t.Context(), c, "k", src.Load).WantOld(t, "the reader that begins it", 0, nil)
		src.WantLoads(t, "a refresh", 1)
		cachetest.Ask(t.Context(), c, "queues", src.Load).WantOld(t, "the reader that begins another", 0, nil)
		synctest.Wait()
		begun := time.Now()
		redistest.Must(t, c.Close())
		cachetest.WantElapsed(t, "Close returns", begun, 10*time.Second)
		cachetest.WantStored(t, rdb, "ns", "k", "new")
		cachetest.WantStored(t, rdb, "ns", "queues", "old")
		src.WantLoads(t, "one ran and one queued", 1)
		if s := c.Stats(); s.Stored != 1 || s.Loading != 0 {
			t.Errorf("%+v, want the refresh stored", s)
		}
	})
}

// A load that Close waits for can read a stale value, and begins no refresh.
func TestClose_LoadBeginsNoRefresh(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := cachetest.NewCache(t, rdb, cachetest.StaleOptions(time.Minute, 0))
		cachetest.SetStale(t, c, "k", "old", 0)
		outer := cachetest.GoGet(t.Context(), c, "outer", func(ctx context.Context, _ string) (string, error) {
			time.Sleep(time.Second)
			return c.GetOrLoad(ctx, "k", cachetest.MustNotLoad[string](t))
		})
		synctest.Wait()
		redistest.Must(t, c.Close())
		outer.Want(t, "old")
	})
}

// A Delete, Set or Expire during a refresh wins, however the refresh ends.
//
//fault:delete-in-load
func TestRefresh_InvalidationWins(t *testing.T) {
	t.Parallel()
	cachetest.UserEach(t, func(t *testing.T, rdb, look redis.UniversalClient) {
		for kind := range cachetest.RefreshKinds {
			for how, by := range superseding {
				for _, where := range []string{"here", "elsewhere"} {
					for _, end := range []cachetest.Ending[string]{{Value: "v1", Err: nil}, {Value: notToBeKept, Err: nil}, {Value: "", Err: singlefill.ErrNotFound}, {Value: "", Err: errors.New("boom")}, {Err: errForbidden}} {
						name := fmt.Sprintf("%s, %s %s, %v", kind, how, where, end)
						r := beginRefresh(t, rdb, look, cachetest.RefreshKinds[kind]("v0"))
						redistest.Must(t, by.do(t.Context(), r.by(where)))
						r.load.Ends <- end
						_ = r.Close()
						cachetest.WantStored(t, look, r.ns, "k", by.leaves)
						cachetest.WantUnlocked(t, look, r.ns, "k")
						if how == "Expire" {
							if _, e := cachetest.GetEntry(t, look, r.ns, "k"); !e.Expired {
								t.Errorf("%s: the entry is not expired any more", name)
							}
						}
						r.src.Want(t, 1)
						if s := r.Stats(); s.Refreshes != 1 || s.Stored != 0 || (end.Value == "v1") != (s.Fenced == 1) || s.RedisErrors != 0 {
							t.Errorf("%s: %+v, want one refresh, refused", name, s)
						}
						if lock, found := cachetest.Stored(t, look, r.ns+":{k}:lock"); found {
							t.Errorf("%s: the lock key holds %q", name, lock)
						}
					}
				}
			}
		}
	})
}

// An early refresh is one load in the fleet, and no reader waits for it.
func TestEarlyRefresh_OneLoad(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
		opts := cachetest.StaleOptions(0, 0)
		opts.EarlyRefresh = 1e9 // every hit, if the load took any time
		opts.TTLFunc = func(string, string) time.Duration { return 10 * time.Second }
		fleet := cachetest.NewCaches(t, m, redistest.Namespace(t), 2, opts)
		src := &cachetest.TimedSource{Takes: 5 * time.Second, Value: "v1"}
		cachetest.Ask(t.Context(), fleet[0], "k", src.Load).Want(t, "a load", cachetest.Answer{Value: "v1", Took: src.Takes})
		src.Value = "v2"
		begun := time.Now()
		// Each read is a GET. The process that does not load asks for the lock once a second, by a script
		// of several commands.
		cachetest.WantCommands(t, m, "hammered", 800, 840, func() {
			for time.Since(begun) < 4*time.Second {
				for _, c := range fleet {
					cachetest.Ask(t.Context(), c, "k", src.Load).Want(t, "hammered", cachetest.Answer{
						Value: "v1", Info: singlefill.ValueInfo{Age: time.Since(begun)},
					})
				}
				time.Sleep(10 * time.Millisecond)
			}
		})
		src.WantLoads(t, "hammered", 2)
		time.Sleep(2 * time.Second)
		for _, c := range fleet {
			v, err := c.Get(t.Context(), "k")
			cachetest.WantValue(t, v, err, "v2")
		}
		time.Sleep(time.Hour)
		src.WantLoads(t, "not read any more", 2)
		for i, c := range fleet {
			if s := c.Stats(); s.Stale != 0 || s.LoadErrors != 0 || s.Refreshes != s.Loads+int64(i)-1 {
				t.Errorf("process %d: %+v, want nothing stale, and loads but the first to be refreshes", i, s)
			}
		}
	})
}

// By default no value is refreshed in the first half of its life, however many callers read it and however
// long its load takes: not with lives by Jitter and TTLFunc, not in memory.
func TestEarlyRefresh_NotInTheFirstHalf(t *testing.T) {
	for what, near := range map[string]*singlefill.Near{"redis": nil, "memory": {}} {
		cachetest.RunInBubble(t, what, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
			const keys, callers = 5, 20
			opts := &singlefill.Options[string]{
				Codec: singlefill.Raw, Jitter: 0.5, Near: near,
				TTLFunc: func(key string, _ string) time.Duration { return time.Duration(key[0]-'a'+1) * time.Second },
			}
			fleet := cachetest.NewCaches(t, m, "ns", 2, opts)
			var refreshes atomic.Int64
			load := func(ctx context.Context, key string) (string, error) {
				if _, info, ok := singlefill.Previous[string](ctx, key); ok {
					refreshes.Add(1)
					if _, e := cachetest.GetEntry(t, rdb, "ns", key); info.Age < e.FreshUntil.Sub(e.WrittenAt)/2 {
						t.Errorf("%s: refreshed after %v of the life of %v", key, info.Age, e.FreshUntil.Sub(e.WrittenAt))
					}
				}
				time.Sleep(time.Second)
				return "v", nil
			}
			for begun := time.Now(); time.Since(begun) < 30*time.Second; time.Sleep(50 * time.Millisecond) {
				for i := range keys * callers {
					go fleet[i%2].GetOrLoad(t.Context(), string(rune('a'+i%keys)), load)
				}
			}
			time.Sleep(5 * time.Second)
			if refreshes.Load() < keys {
				t.Errorf("%d refreshes, want several of each key", refreshes.Load())
			}
		})
	}
}

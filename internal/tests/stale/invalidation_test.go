package stale_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// A Delete, Set or Expire during a refresh wins, however the refresh ends.
//
//fault:delete-in-load
func TestRefresh_InvalidationWins(t *testing.T) {
	t.Parallel()
	cachetest.UserEach(t, func(t *testing.T, rdb, look redis.UniversalClient) {
		for kind := range cachetest.RefreshKinds {
			for how, leaves := range supersededLeaves {
				for _, where := range []string{"here", "elsewhere"} {
					for _, end := range []cachetest.Ending[string]{{Value: "v1", Err: nil}, {Value: notToBeKept, Err: nil}, {Value: "", Err: singlefill.ErrNotFound}, {Value: "", Err: errors.New("boom")}} {
						name := fmt.Sprintf("%s, %s %s, %v", kind, how, where, end)
						r := beginRefresh(t, rdb, look, cachetest.RefreshKinds[kind]("v0"))
						supersede(t, r.by(where), how)
						r.load.Ends <- end
						_ = r.Close()
						cachetest.WantStored(t, look, r.ns, "k", leaves)
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

// A call that begins after a Delete loads at once, and its value stays, whichever load ends first.
func TestRefresh_LoadAfterADelete(t *testing.T) {
	t.Parallel()
	refreshEach(t, func(t *testing.T, variant string, r *refreshing, rdb, look redis.UniversalClient) {
		where, order, _ := strings.Cut(variant, ", ")
		supersede(t, r.by(where), "Delete")
		cachetest.AwaitSeen(t, rdb, look, r.ns, "k")
		after := cachetest.GoGet(t.Context(), r.Cache, "k", r.src.Load)
		newer := r.src.Next(t) // without waiting for the refresh
		if order == "the refresh ends first" {
			r.load.Give("v1")
			newer.Give("v2")
			after.Want(t, "v2")
		} else {
			newer.Give("v2")
			after.Want(t, "v2")
			r.load.Give("v1")
		}
		_ = r.Close()
		cachetest.WantStored(t, look, r.ns, "k", "v2")
		cachetest.WantUnlocked(t, look, r.ns, "k")
		r.src.Want(t, 2)
		if s := r.Stats(); s.Refreshes != 1 || s.Loads != 2 || s.Stored != 1 || s.Fenced != 1 {
			t.Errorf("%+v, want a refresh, refused, and a load, stored", s)
		}
	}, "here, the refresh ends first", "here, the load ends first", "elsewhere, the refresh ends first", "elsewhere, the load ends first")
}

// An Expire during a refresh causes another one.
func TestRefresh_AgainAfterExpire(t *testing.T) {
	t.Parallel()
	refreshEach(t, func(t *testing.T, _ string, r *refreshing, rdb, look redis.UniversalClient) {
		expireKeys(t, r.Cache, rdb, look, r.ns, "k")
		cachetest.GoGet(t.Context(), r.Cache, "k", r.src.Load).Want(t, "v0")
		newer := r.src.Next(t) // without waiting for the first one
		newer.Give("v2")
		cachetest.WantGet(t, r.Cache, "k", "v2", nil)
		r.load.Give("v1")
		_ = r.Close()
		cachetest.WantStored(t, look, r.ns, "k", "v2")
		r.src.Want(t, 2)
		if s := r.Stats(); s.Refreshes != 2 || s.Stored != 1 || s.Fenced != 1 {
			t.Errorf("%+v, want two refreshes, one stored and one refused", s)
		}
	})
}

// A refresh loads nothing if its entry is gone when it asks for the lock.
func TestRefresh_EntryIsGone(t *testing.T) {
	t.Parallel()
	for kind := range cachetest.RefreshKinds {
		for how, leaves := range supersededLeaves {
			for _, where := range []string{"here", "elsewhere"} {
				for _, scripts := range []bool{true, false} {
					t.Run(fmt.Sprintf("%s, %s %s, scripts %t", kind, how, where, scripts), func(t *testing.T) {
						t.Parallel()
						p, ns, slow, direct, rdb := cachetest.Proxied(t, refreshOptions())
						lock := p.On(cachetest.Script(t, "get_or_lock"), redistest.HoldRequest).Times(1)
						if !scripts {
							s := redistest.Start(t)
							asUser := cachetest.NoScripts(t, s)
							rdb, p = s.Admin(), redistest.NewProxy(t, s.Addr)
							slow, direct = cachetest.NewCacheIn(t, p.Client(t, asUser), ns, refreshOptions()), cachetest.NewCacheIn(t, s.Client(t, asUser), ns, refreshOptions())
							lock = p.On(redistest.Command("watch"), redistest.HoldRequest).Times(1)
						}
						cachetest.PutEntry(t, rdb, ns, "k", cachetest.RefreshKinds[kind]("v0"), time.Hour)
						cachetest.GoGet(t.Context(), slow, "k", cachetest.MustNotLoad[string](t)).Want(t, "v0")
						cachetest.Receive(t, "the refresh asks for the lock", lock.Hit())
						supersede(t, map[string]*singlefill.Cache[string]{"here": slow, "elsewhere": direct}[where], how)
						lock.Release()
						_ = slow.Close()
						cachetest.WantStored(t, rdb, ns, "k", leaves)
						if lock, found := cachetest.Stored(t, rdb, ns+":{k}:lock"); found {
							t.Errorf("the lock key holds %q", lock)
						}
						if s := slow.Stats(); s.Loads != 0 || s.RedisErrors != 0 || s.Hits != 1 {
							t.Errorf("%+v, want a hit and no load", s)
						}
					})
				}
			}
		}
	}
}

// Two loads of a key run at a time only if a write came between, and no caller gets what had been
// deleted before.
//
// Two caches read values that are stale almost at once, of a source that fails at times, while
// writers delete, set and expire. No caller gets a version older than the last Delete or Set that
// had returned, nor in place of an error.
//
//fault:delete-in-load
func TestRefresh_RandomCalls(t *testing.T) {
	t.Parallel()
	const keys, readers = 3, 4
	rounds, kinds := 1000, []string{"mini", "single", "no scripts", "cluster"}
	if testing.Short() {
		rounds, kinds = 400, kinds[:3]
	}
	for _, kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			var clients [2]redis.UniversalClient
			switch kind {
			case "mini":
				m, rdb := redistest.StartMini(t)
				clients = [2]redis.UniversalClient{rdb, redistest.NewMiniClient(t, m)}
			case "single":
				clients = [2]redis.UniversalClient{redistest.Shared(t).Client(t), redistest.Shared(t).Client(t)}
			case "cluster":
				clients = [2]redis.UniversalClient{redistest.SharedCluster(t).Client(t), redistest.SharedCluster(t).Client(t)}
			case "no scripts":
				s := redistest.Start(t)
				asUser := cachetest.NoScripts(t, s)
				clients = [2]redis.UniversalClient{s.Client(t, asUser), s.Client(t, asUser)}
			}
			seed := rand.Uint64()
			t.Logf("seed %d", seed)
			var total refreshTally
			states := make([]*refreshState, keys)
			for k := range states {
				states[k] = &refreshState{t: t, tally: &total, running: make(map[int]int)}
			}
			ns := redistest.Namespace(t)
			boom := errors.New("boom")
			var stats [2]*singlefill.Cache[string]
			var wg sync.WaitGroup
			for i, rdb := range clients {
				opts := refreshOptions()
				opts.StaleWhileRevalidate, opts.StaleIfError, opts.RetryAfter, opts.EarlyRefresh = 4*time.Millisecond, 12*time.Millisecond, time.Millisecond, 2
				opts.TTLFunc = func(_, v string) time.Duration { return time.Duration(2+len(v)%3) * time.Millisecond }
				c := cachetest.NewCacheIn(t, rdb, ns, opts)
				stats[i] = c
				for r := range readers {
					rnd := rand.New(rand.NewPCG(seed, uint64(i*readers+r)))
					wg.Go(func() {
						for range rounds {
							k := rnd.IntN(keys)
							s, key := states[k], strconv.Itoa(k)
							if rnd.IntN(16) == 0 {
								s.write(c, key, rnd.IntN(3))
								continue
							}
							fail, slow := rnd.IntN(4) == 0, rnd.IntN(2) == 0
							load := func(ctx context.Context, _ string) (string, error) {
								v, end := s.begin(ctx)
								defer end()
								if slow {
									time.Sleep(time.Millisecond)
								}
								if fail {
									return "", boom
								}
								return v, nil
							}
							ctx, cancel := s.call(t.Context()), func() {}
							if rnd.IntN(8) == 0 {
								ctx, cancel = context.WithTimeout(ctx, time.Duration(rnd.IntN(int(time.Millisecond))))
							}
							least := s.floor.Load()
							v, info, err := c.GetOrLoadInfo(ctx, key, load)
							cancel()
							var remote *singlefill.RemoteError
							if got, _ := strconv.ParseInt(v, 10, 64); err == nil && got < least {
								t.Errorf("key %s is version %d (%+v), deleted before the call: want at least %d", key, got, info, least)
							}
							if err != nil && err != context.DeadlineExceeded && err != boom && !errors.As(err, &remote) {
								t.Errorf("GetOrLoad: %v", err)
							}
						}
					})
				}
			}
			wg.Wait()
			var s [2]singlefill.Stats
			for i, c := range stats {
				_ = c.Close()
				s[i] = c.Stats()
			}
			if n := s[0].Refreshes + s[1].Refreshes; n == 0 || s[0].StaleOnError+s[1].StaleOnError == 0 || total.alone.Load() == 0 {
				t.Errorf("%+v: no refresh, no stale value for an error, or no load that could be judged", s)
			}
			t.Logf("%d loads judged, %d at a time for a reason; %+v", total.alone.Load(), total.broken.Load(), s)
		})
	}
}

type refreshTally struct{ alone, broken atomic.Int64 }

// A refreshState is what the test knows of one key.
type refreshState struct {
	t       testing.TB
	tally   *refreshTally
	version atomic.Int64 // of the source
	floor   atomic.Int64 // version as of the last Delete or Set that has returned

	writes sync.Mutex // one write at a time, or the order of two would not be known

	mu           sync.Mutex
	begun, ended int // writes
	// running counts loads, by how many writes had ended before the call that began them.
	running map[int]int
}

type refreshCall struct{}

// call notes in a context, from which the Loader's is made, how many writes have ended.
func (s *refreshState) call(ctx context.Context) context.Context {
	s.mu.Lock()
	defer s.mu.Unlock()
	return context.WithValue(ctx, refreshCall{}, s.ended)
}

func (s *refreshState) begin(ctx context.Context) (value string, end func()) {
	since := ctx.Value(refreshCall{}).(int)
	s.mu.Lock()
	defer s.mu.Unlock()
	switch { // a load that a write superseded before it began is not one too many
	case s.begun == since && s.running[since] > 0:
		s.t.Error("a load begins while one runs, and no write has superseded either")
	case len(s.running) > 0:
		s.tally.broken.Add(1)
	case s.begun == since:
		s.tally.alone.Add(1)
	}
	s.running[since]++
	return strconv.FormatInt(s.version.Load(), 10), func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.running[since]--; s.running[since] == 0 {
			delete(s.running, since)
		}
	}
}

func (s *refreshState) write(c *singlefill.Cache[string], key string, how int) {
	s.writes.Lock()
	defer s.writes.Unlock()
	v := s.version.Add(1)
	s.mu.Lock()
	s.begun++
	s.mu.Unlock()
	var err error
	switch how {
	case 0:
		err = c.Delete(context.Background(), key)
	case 1:
		err = c.Set(context.Background(), key, strconv.FormatInt(v, 10))
	default:
		err = c.Expire(context.Background(), key)
	}
	s.mu.Lock()
	s.ended++
	s.mu.Unlock()
	if err != nil {
		s.t.Error(err)
	}
	if how < 2 {
		s.floor.Store(v)
	}
}

// expireKeys expires keys and waits until the client sees it: its own cache may be late.
func expireKeys(t testing.TB, c *singlefill.Cache[string], rdb, look redis.UniversalClient, ns string, keys ...string) {
	t.Helper()
	redistest.Must(t, c.Expire(t.Context(), keys...))
	for _, key := range keys {
		cachetest.AwaitSeen(t, rdb, look, ns, key)
	}
}

// An expired value is served as the windows say.
func TestExpire_Windows(t *testing.T) {
	t.Parallel()
	boom := errors.New("boom")
	cachetest.UserEach(t, func(t *testing.T, rdb, look redis.UniversalClient) {
		begin := func(t *testing.T, opts *singlefill.Options[string]) (*singlefill.Cache[string], *cachetest.HeldSource[string], string) {
			ns := redistest.Namespace(t)
			c := cachetest.NewCacheIn(t, rdb, ns, opts)
			src := cachetest.NewSource[string](t)
			redistest.Must(t, c.Set(t.Context(), "k", "old"))
			cachetest.WantGet(t, c, "k", "old", nil)
			expireKeys(t, c, rdb, look, ns, "k")
			return c, src, ns
		}
		t.Run("refreshed behind", func(t *testing.T) {
			c, src, _ := begin(t, cachetest.StaleOptions(time.Hour, 0))
			cachetest.WantGet(t, c, "k", "old", nil)
			src.Want(t, 0)
			for range 10 {
				v, info, err := c.GetOrLoadInfo(t.Context(), "k", src.Load) // although the load does not end
				cachetest.WantValue(t, v, err, "old")
				if !info.Stale || info.Err != nil {
					t.Errorf("%+v, want a stale value and no error", info)
				}
			}
			src.Next(t).Give("new")
			cachetest.WantGet(t, c, "k", "new", nil)
			cachetest.GoGet(t.Context(), c, "k", src.Load).Want(t, "new")
			_ = c.Close()
			src.Want(t, 1)
			if s := c.Stats(); s.Refreshes != 1 || s.Stored != 1 || s.Fenced != 0 {
				t.Errorf("%+v, want one refresh, stored", s)
			}
		})
		for name, opts := range map[string]*singlefill.Options[string]{"kept for errors": cachetest.StaleOptions(0, time.Hour), "not kept": cachetest.StaleOptions(0, 0)} {
			t.Run(name, func(t *testing.T) {
				c, src, _ := begin(t, opts)
				cachetest.WantGet(t, c, "k", "", singlefill.ErrMiss)
				waits := cachetest.GoGet(t.Context(), c, "k", src.Load).Waits(t)
				src.Next(t).Give("new")
				waits.Want(t, "new")
				cachetest.WantGet(t, c, "k", "new", nil)
				src.Want(t, 1)
			})
			t.Run(name+", source fails", func(t *testing.T) {
				c, _, _ := begin(t, opts)
				v, info, err := c.GetOrLoadInfo(t.Context(), "k", cachetest.Fails[string](boom))
				if opts.StaleIfError > 0 {
					cachetest.WantValue(t, v, err, "old")
					if !info.Stale || info.Err != boom {
						t.Errorf("%+v, want a stale value and why", info)
					}
				} else if err != boom || info != (singlefill.ValueInfo{}) {
					t.Errorf("got %q, %+v, %v; want the error itself", v, info, err)
				}
			})
		}
		t.Run("a remembered not-found", func(t *testing.T) {
			ns := redistest.Namespace(t)
			c := cachetest.NewCacheIn(t, rdb, ns, cachetest.StaleOptions(0, 0))
			cachetest.GoGet(t.Context(), c, "k", cachetest.Fails[string](singlefill.ErrNotFound)).WantErr(t, singlefill.ErrNotFound)
			expireKeys(t, c, rdb, look, ns, "k")
			cachetest.GoGet(t.Context(), c, "k", cachetest.Gives("found")).Want(t, "found")
		})
	})
}

// Another Expire prolongs no window.
func TestExpire_AgainProlongsNothing(t *testing.T) {
	for name, opts := range map[string]*singlefill.Options[string]{"refreshed": cachetest.StaleOptions(10*time.Minute, 0), "kept for errors": cachetest.StaleOptions(0, 10*time.Minute)} {
		cachetest.RunInBubble(t, name, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
			opts.RetryAfter = time.Millisecond
			c := cachetest.NewCache(t, rdb, opts)
			boom := errors.New("boom")
			for _, first := range []time.Duration{0, 30 * time.Minute, time.Hour + 4*time.Minute} { // the life is an hour
				redistest.Must(t, c.Set(t.Context(), "k", "old"))
				ends := min(first, time.Hour) + 10*time.Minute
				begun := time.Now()
				time.Sleep(first)
				for time.Since(begun) < ends {
					redistest.Must(t, c.Expire(t.Context(), "k"))
					cachetest.GoGet(t.Context(), c, "k", cachetest.Fails[string](boom)).Want(t, "old")
					time.Sleep(time.Minute)
				}
				cachetest.GoGet(t.Context(), c, "k", cachetest.Fails[string](boom)).WantErr(t, boom)
				if _, err := c.Get(t.Context(), "k"); err != singlefill.ErrMiss {
					t.Errorf("Get: %v, want ErrMiss", err)
				}
			}
		})
	}
}

// A value whose load began before an Expire is not stored after it, and later callers load again at
// once.
//
//fault:delete-in-load
func TestExpire_DuringLoad(t *testing.T) {
	t.Parallel()
	cachetest.UserEach(t, func(t *testing.T, rdb, look redis.UniversalClient) {
		for _, where := range []string{"here", "elsewhere"} {
			for _, old := range []string{"", "old"} { // beyond StaleWhileRevalidate: callers wait for the load
				for _, later := range []bool{true, false} { // a later call
					t.Run(fmt.Sprintf("%s %s, later call %t", where, old, later), func(t *testing.T) {
						ns := redistest.Namespace(t)
						c, other := cachetest.NewCacheIn(t, rdb, ns, cachetest.StaleOptions(0, time.Hour)),
							cachetest.NewCacheIn(t, rdb, ns, cachetest.StaleOptions(0, time.Hour))
						by := map[string]*singlefill.Cache[string]{"here": c, "elsewhere": other}[where]
						if old != "" {
							e := entry.Entry{FreshUntil: time.Now().Add(-time.Second), Payload: []byte(old)}
							cachetest.PutEntry(t, look, ns, "k", e, time.Hour)
						}
						src := cachetest.NewSource[string](t)
						before := cachetest.GoGet(t.Context(), c, "k", src.Load)
						older := src.Next(t)
						redistest.Must(t, by.Expire(t.Context(), "missing too", "k"))
						if !later {
							older.Give("v1")
							before.Want(t, "v1")
							_ = c.Close()
							cachetest.WantStored(t, look, ns, "k", old)
							return
						}
						after := cachetest.GoGet(t.Context(), c, "k", src.Load)
						newer := src.Next(t) // without waiting for the older load
						older.Give("v1")
						before.Want(t, "v1")
						newer.Give("v2")
						after.Want(t, "v2")
						_ = c.Close()
						cachetest.WantStored(t, look, ns, "k", "v2")
						cachetest.WantUnlocked(t, look, ns, "k")
						src.Want(t, 2)
						if s := c.Stats(); s.Stored != 1 || s.Fenced != 1 {
							t.Errorf("%+v, want one load stored and one fenced", s)
						}
					})
				}
			}
		}
	})
}

// An Expire without a key, of a closed cache, or whose context has ended, returns an error and
// sends no command.
func TestExpire_RefusedWithoutACommand(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	c, closed := cachetest.NewCache[string](t, server.Client(t), nil), cachetest.NewCache[string](t, server.Client(t), nil)
	_ = closed.Close()
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	expired, cancel := context.WithDeadline(t.Context(), time.Now())
	defer cancel()
	for _, test := range []struct {
		name string
		c    *singlefill.Cache[string]
		ctx  context.Context
		keys []string
		want string
	}{
		{"no key", c, t.Context(), []string{"k", ""}, "singlefill: key is empty"},
		{"cancelled", c, cancelled, []string{"k"}, "context canceled"},
		{"too late", c, expired, []string{"k"}, "context deadline exceeded"},
		{"closed", closed, t.Context(), []string{"k"}, singlefill.ErrClosed.Error()},
		{"closed, of nothing", closed, t.Context(), nil, singlefill.ErrClosed.Error()},
		{"of nothing", c, t.Context(), nil, "<nil>"},
	} {
		server.ResetCalls()
		if err := test.c.Expire(test.ctx, test.keys...); fmt.Sprint(err) != test.want {
			t.Errorf("%s: got error %v, want %q", test.name, err, test.want)
		}
		cachetest.WantCalls(t, server, test.name, nil)
	}
}

// Expire takes one round trip for up to 256 keys.
func TestExpire_RoundTrips(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	rdb := server.Client(t)
	ns := redistest.Namespace(t)
	c := cachetest.NewCacheIn[string](t, rdb, ns, nil)
	var keys []string
	for i := range 257 {
		keys = append(keys, fmt.Sprint(i))
		cachetest.PutEntry(t, rdb, ns, keys[i], entry.Entry{FreshUntil: time.Now().Add(time.Hour)}, time.Hour)
	}
	isScript := func(cmd redis.Cmder) bool { return strings.HasPrefix(cmd.Name(), "eval") }
	var trips atomic.Int64
	rdb.AddHook(redistest.Trips(func(cmds []redis.Cmder) error {
		if slices.ContainsFunc(cmds, isScript) {
			trips.Add(1)
		}
		return nil
	}))
	for _, test := range []struct {
		keys  []string
		trips int64
	}{{keys[:1], 1}, {keys[:256], 1}, {keys, 2}} {
		for _, flushed := range []bool{false, true} {
			if flushed {
				redistest.Must(t, server.Admin().ScriptFlush(t.Context()).Err())
			}
			server.ResetCalls()
			trips.Store(0)
			if err := c.Expire(t.Context(), test.keys...); err != nil {
				t.Error(err)
			}
			n := int64(len(test.keys))
			if got := trips.Load(); got != test.trips {
				t.Errorf("%d keys took %d round trips, want %d", n, got, test.trips)
			}
			// What the scripts call counts too.
			cachetest.WantCalls(t, server, fmt.Sprint(n, " keys"),
				map[string]int64{"eval": n, "getrange": n, "setrange": 2 * n, "del": n})
		}
	}
}

// Expire without scripts handles many keys, with no more rights than before.
func TestExpire_ManyKeysWithoutScripts(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	c := cachetest.NewCache(t, server.Client(t, cachetest.NoScripts(t, server, "-time")),
		&singlefill.Options[string]{StaleWhileRevalidate: time.Hour})
	testExpireMany(t, c, 300)
}

// testExpireMany returns how long Expire took.
func testExpireMany(t *testing.T, c *singlefill.Cache[string], many int) (took time.Duration) {
	keys := make([]string, many)
	for i := range keys {
		keys[i] = fmt.Sprint(i)
		redistest.Must(t, c.Set(t.Context(), keys[i], "old"))
	}
	cachetest.GoGet(t.Context(), c, "loaded", cachetest.Gives("v")).Want(t, "v")
	cachetest.WantGet(t, c, "loaded", "v", nil)
	begun := time.Now()
	redistest.Must(t, c.Expire(t.Context(), keys...))
	took = time.Since(begun)
	for _, key := range keys {
		if _, info, err := c.GetOrLoadInfo(t.Context(), key, cachetest.Gives("new")); !info.Stale || err != nil {
			t.Fatalf("%s after Expire: %+v, %v", key, info, err)
		}
	}
	return took
}

// Expire without scripts gives each key its own RedisTimeout: each key is watched by itself.
func TestExpire_ManyKeysFarFromRedis(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		rdb.AddHook(redistest.Trips(func(cmds []redis.Cmder) (err error) {
			time.Sleep(20 * time.Millisecond)
			for _, cmd := range cmds {
				if strings.HasPrefix(cmd.Name(), "eval") {
					err = refusal("NOPERM this user has no permissions to run the 'eval' command")
					cmd.SetErr(err)
				}
			}
			return err
		}))
		opts := &singlefill.Options[string]{StaleWhileRevalidate: time.Hour, RedisTimeout: time.Second}
		if took := testExpireMany(t, cachetest.NewCache(t, rdb, opts), 60); took < 2*opts.RedisTimeout {
			t.Errorf("Expire took %v, which shows nothing: it should take longer than RedisTimeout", took)
		}
	})
}

// Concurrent Expires of a key leave one stale entry, whole.
func TestExpire_Concurrent(t *testing.T) {
	t.Parallel()
	cachetest.UserEach(t, func(t *testing.T, rdb, look redis.UniversalClient) {
		ns := redistest.Namespace(t)
		c := cachetest.NewCacheIn(t, rdb, ns, &cachetest.Raw)
		cachetest.PutEntry(t, look, ns, "k", entry.Entry{FreshUntil: time.Now().Add(time.Hour), Payload: []byte("v")}, time.Hour)
		errs := make(chan error, 20)
		for range cap(errs) {
			go func() { errs <- c.Expire(context.Background(), "k") }()
		}
		all := slices.Collect(func(yield func(error) bool) {
			for range cap(errs) {
				yield(cachetest.Receive(t, "Expire returns", errs))
			}
		})
		if err := errors.Join(all...); err != nil {
			t.Error(err)
		}
		if _, e := cachetest.GetEntry(t, look, ns, "k"); !e.Expired || string(e.Payload) != "v" {
			t.Errorf("%+v, want an expired entry of v", e)
		}
	})
}

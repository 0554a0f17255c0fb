package stale_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// A Delete, Set or Expire during a refresh wins, however the refresh ends.
//
//fault:delete-in-load
func TestRefresh_InvalidationWins(t *testing.T) {
	t.Parallel()
	cachetest.UserEach(t, func(t *testing.T, rdb, look redis.UniversalClient) {
		for kind := range refreshKinds {
			for how, leaves := range supersededLeaves {
				for _, where := range []string{"here", "elsewhere"} {
					for _, end := range []cachetest.Ending[string]{{Value: "v1", Err: nil}, {Value: notToBeKept, Err: nil}, {Value: "", Err: singlefill.ErrNotFound}, {Value: "", Err: errors.New("boom")}} {
						name := fmt.Sprintf("%s, %s %s, %v", kind, how, where, end)
						r := beginRefresh(t, rdb, look, kind)
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

// A caller that arrived after a Delete gets neither the value of the refresh nor the old value for
// its error.
//
// The process of the refresh learns of the Delete only when it stores.
func TestRefresh_CallerAfterADelete(t *testing.T) {
	t.Parallel()
	for _, err := range []error{nil, errors.New("boom")} {
		t.Run(fmt.Sprint(err), func(t *testing.T) {
			t.Parallel()
			p, ns, slow, direct, rdb := cachetest.Proxied(t, refreshOptions())
			cachetest.PutEntry(t, rdb, ns, "k", refreshKinds["stale"](), time.Hour)
			src := cachetest.NewSource[string](t)
			cachetest.GoGet(t.Context(), slow, "k", src.Load).Want(t, "v0")
			load := src.Next(t)
			supersede(t, direct, "Delete")
			renewal := p.On(cachetest.Script(t, "renew"), redistest.HoldRequest)
			after := cachetest.GoGet(t.Context(), slow, "k", src.Load).Waits(t)
			cachetest.Receive(t, "the reader has been handed over: the lock is looked at", renewal.Hit())
			load.Ends <- cachetest.Ending[string]{Value: "v1", Err: err}
			newer := src.Next(t)
			renewal.Release()
			newer.Give("v2")
			after.Want(t, "v2")
			_ = slow.Close()
			cachetest.WantStored(t, rdb, ns, "k", "v2")
			src.Want(t, 2)
		})
	}
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
	for kind := range refreshKinds {
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
						cachetest.PutEntry(t, rdb, ns, "k", refreshKinds[kind](), time.Hour)
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

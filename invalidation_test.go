package singlefill_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
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
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// A value whose load began before a Delete is not stored after it, and later callers load again at
// once.
func TestDelete_DuringLoad(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		for _, order := range []string{"the older load ends first", "the newer load ends first"} {
			t.Run(order, func(t *testing.T) {
				ns := redistest.Namespace(t)
				c := cachetest.NewCacheIn(t, rdb, ns, &cachetest.Raw)
				src := cachetest.NewSource[string](t)
				before := cachetest.GoGet(t.Context(), c, "k", src.Load)
				older := src.Next(t)
				joins := cachetest.GoGet(t.Context(), c, "k", src.Load).Waits(t)
				if err := c.Delete(t.Context(), "k"); err != nil {
					t.Fatal(err)
				}
				after := cachetest.GoGet(t.Context(), c, "k", src.Load)
				newer := src.Next(t) // without waiting for the older load
				if order == "the older load ends first" {
					older.Give("v1")
					before.Want(t, "v1")
					cachetest.WantStored(t, rdb, ns, "k", "")
					newer.Give("v2")
					after.Want(t, "v2")
				} else {
					newer.Give("v2")
					after.Want(t, "v2")
					older.Give("v1")
					before.Want(t, "v1")
				}
				// A caller that joined before the Delete may get either, but causes no load.
				if v, err := joins.Result(t); err != nil || v != "v1" && v != "v2" {
					t.Errorf("got %q, %v; want v1 or v2", v, err)
				}
				_ = c.Close() // the older one's outcome is settled then
				cachetest.WantStored(t, rdb, ns, "k", "v2")
				cachetest.WantUnlocked(t, rdb, ns, "k")
				src.Want(t, 2)
				if s := c.Stats(); s.Stored != 1 || s.Fenced != 1 || s.LoadsUnlocked != 0 {
					t.Errorf("%+v, want one load stored and one fenced", s)
				}
			})
		}
	})
}

// A load that a Delete has overtaken leaves nothing in Redis.
func TestDelete_DuringTheOnlyLoad(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		for name, err := range map[string]error{"value": nil, "not found": singlefill.ErrNotFound} {
			ns := redistest.Namespace(t)
			c := cachetest.NewCacheIn(t, rdb, ns, &cachetest.Raw)
			src := cachetest.NewSource[string](t)
			a := cachetest.GoGet(t.Context(), c, "k", src.Load)
			load := src.Next(t)
			if err := c.Delete(t.Context(), "other", "k"); err != nil {
				t.Fatal(err)
			}
			load.Ends <- cachetest.Ending[string]{Value: "v1", Err: err}
			if _, got := a.Result(t); got != err {
				t.Errorf("%s: %v, want %v", name, got, err)
			}
			_ = c.Close()
			cachetest.WantStored(t, rdb, ns, "k", "")
			if s := c.Stats(); s.Fenced != 1 {
				t.Errorf("%s: %+v, want one load fenced", name, s)
			}
		}
	})
}

// Callers that arrive after a Delete in another process do not get a value whose load began before
// it.
func TestDelete_ElsewhereDuringLoad(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		for _, order := range []string{"the older load ends first", "the newer load ends first"} {
			t.Run(order, func(t *testing.T) {
				ns := redistest.Namespace(t)
				here, elsewhere := cachetest.NewCacheIn(t, rdb, ns, &cachetest.Raw), cachetest.NewCacheIn(t, rdb, ns, &cachetest.Raw)
				src := cachetest.NewSource[string](t)
				before := cachetest.GoGet(t.Context(), here, "k", src.Load)
				older := src.Next(t)
				joins := cachetest.GoGet(t.Context(), here, "k", src.Load).Waits(t)
				if err := elsewhere.Delete(t.Context(), "k"); err != nil {
					t.Fatal(err)
				}
				after := cachetest.GoGet(t.Context(), here, "k", src.Load)
				newer := src.Next(t) // without waiting for the older load
				if order == "the older load ends first" {
					older.Give("v1")
					before.Want(t, "v1")
					newer.Give("v2")
					after.Want(t, "v2")
				} else {
					newer.Give("v2")
					after.Want(t, "v2")
					older.Give("v1")
					before.Want(t, "v1")
				}
				if v, err := joins.Result(t); err != nil || v != "v1" && v != "v2" {
					t.Errorf("got %q, %v; want v1 or v2", v, err)
				}
				cachetest.GoGet(t.Context(), elsewhere, "k", src.Load).Want(t, "v2")
				_ = here.Close()
				cachetest.WantStored(t, rdb, ns, "k", "v2")
				src.Want(t, 2)
				if s := here.Stats(); s.LocksLost != 1 || s.Fenced != 1 || s.Stored != 1 {
					t.Errorf("%+v, want one lock lost, one load fenced and one stored", s)
				}
			})
		}
	})
}

// A process that deletes a key loads it without waiting for an older load of another process.
func TestDelete_DeleterLoadsAtOnce(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		ns := redistest.Namespace(t)
		elsewhere, here := cachetest.NewCacheIn(t, rdb, ns, &cachetest.Raw), cachetest.NewCacheIn(t, rdb, ns, &cachetest.Raw)
		src := cachetest.NewSource[string](t)
		before := cachetest.GoGet(t.Context(), elsewhere, "k", src.Load)
		older := src.Next(t)
		waits := cachetest.GoGet(t.Context(), here, "k", src.Load).Waits(t) // for the other process
		if err := here.Delete(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		after := cachetest.GoGet(t.Context(), here, "k", src.Load)
		src.Next(t).Give("v2")
		after.Want(t, "v2")
		waits.Want(t, "v2")
		older.Give("v1")
		before.Want(t, "v1")
		_ = elsewhere.Close()
		cachetest.WantStored(t, rdb, ns, "k", "v2")
		src.Want(t, 2)
	})
}

// A caller that arrives after a Delete does not wait for the older load.
func TestDelete_LaterCallerDoesNotWait(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ns := redistest.Namespace(t)
		here, elsewhere := cachetest.NewCacheIn(t, rdb, ns, &cachetest.Raw), cachetest.NewCacheIn(t, rdb, ns, &cachetest.Raw)
		for _, test := range []struct {
			name    string
			deletes func(ctx context.Context, keys ...string) error
			most    time.Duration
		}{
			{"here", here.Delete, 0},
			{"elsewhere", elsewhere.Delete, 10 * time.Millisecond}, // the time between two looks at a lock
		} {
			src := cachetest.NewSource[string](t)
			older := cachetest.GoGet(t.Context(), here, test.name, src.Load)
			load := src.Next(t)
			time.Sleep(time.Second)
			if err := test.deletes(t.Context(), test.name); err != nil {
				t.Fatal(err)
			}
			begun := time.Now()
			cachetest.GoGet(t.Context(), here, test.name, cachetest.Gives("v2")).Want(t, "v2")
			if d := time.Since(begun); d > test.most {
				t.Errorf("deleted %s: loaded again after %v, want %v at most", test.name, d, test.most)
			}
			load.Give("v1")
			older.Want(t, "v1")
		}
		synctest.Wait()
		if s := here.Stats(); s.LocksLost != 1 || s.Fenced != 2 {
			t.Errorf("%+v, want two loads fenced, and the lock missed only where the Delete was elsewhere", s)
		}
	})
}

// A reply that was in transit at a Delete is not given to callers that arrive after it.
func TestDelete_ReplyInTransit(t *testing.T) {
	t.Parallel()
	p, _, slow, direct, _ := cachetest.Proxied(t, &cachetest.Raw)
	src := cachetest.NewSource[string](t)
	if err := direct.Set(t.Context(), "k", "v1"); err != nil {
		t.Fatal(err)
	}
	read := p.On(redistest.Command("get"), redistest.HoldReply).Times(1)
	before := cachetest.GoGet(t.Context(), slow, "k", src.Load)
	cachetest.Receive(t, "the read is answered", read.Hit())
	if err := direct.Delete(t.Context(), "k"); err != nil {
		t.Fatal(err)
	}
	after := cachetest.GoGet(t.Context(), slow, "k", src.Load).Waits(t)
	read.Release()
	before.Want(t, "v1")
	src.Next(t).Give("v2")
	after.Want(t, "v2")
	src.Want(t, 1)
}

// A value that the lock's script found before a Delete is not given to callers that arrive after
// it.
func TestDelete_ValueFoundWhileLocking(t *testing.T) {
	t.Parallel()
	p, _, slow, direct, _ := cachetest.Proxied(t, &cachetest.Raw)
	src := cachetest.NewSource[string](t)
	read := p.On(redistest.Command("get"), redistest.HoldReply).Times(1)
	before := cachetest.GoGet(t.Context(), slow, "k", src.Load)
	cachetest.Receive(t, "the read has found nothing", read.Hit())
	if err := direct.Set(t.Context(), "k", "v1"); err != nil {
		t.Fatal(err)
	}
	answer := p.On(cachetest.Script(t, "get_or_lock"), redistest.HoldReply).Times(1)
	read.Release()
	cachetest.Receive(t, "the script has found v1", answer.Hit())
	if err := direct.Delete(t.Context(), "k"); err != nil {
		t.Fatal(err)
	}
	after := cachetest.GoGet(t.Context(), slow, "k", src.Load).Waits(t)
	answer.Release()
	before.Want(t, "v1")
	src.Next(t).Give("v2")
	after.Want(t, "v2")
	src.Want(t, 1)
}

// A load that ends before its process notices a Delete is not given to callers that arrive after
// it.
func TestDelete_BeforeTheLossIsNoticed(t *testing.T) {
	t.Parallel()
	p, _, slow, direct, _ := cachetest.Proxied(t, &cachetest.Raw)
	src := cachetest.NewSource[string](t)
	before := cachetest.GoGet(t.Context(), slow, "k", src.Load)
	load := src.Next(t)
	if err := direct.Delete(t.Context(), "k"); err != nil {
		t.Fatal(err)
	}
	renewal := p.On(cachetest.Script(t, "renew"), redistest.HoldRequest)
	after := cachetest.GoGet(t.Context(), slow, "k", src.Load).Waits(t)
	cachetest.Receive(t, "the lock is looked at", renewal.Hit())
	load.Give("v1")
	before.Want(t, "v1")
	renewal.Release()
	src.Next(t).Give("v2")
	after.Want(t, "v2")
	src.Want(t, 2)
}

// A Delete between a load and its store keeps the value out of Redis, and from later callers.
func TestDelete_BetweenLoadAndStore(t *testing.T) {
	t.Parallel()
	for _, where := range []string{"here", "in another process"} {
		t.Run(where, func(t *testing.T) {
			t.Parallel()
			p, ns, slow, direct, rdb := cachetest.Proxied(t, &cachetest.Raw)
			deleter := direct
			if where == "here" {
				deleter = slow
			}
			src := cachetest.NewSource[string](t)
			store := p.On(cachetest.Script(t, "store"), redistest.HoldRequest).Times(1)
			before := cachetest.GoGet(t.Context(), slow, "k", src.Load)
			src.Next(t).Give("v1")
			cachetest.Receive(t, "the value is about to be stored", store.Hit())
			if err := deleter.Delete(t.Context(), "k"); err != nil {
				t.Fatal(err)
			}
			after := cachetest.GoGet(t.Context(), slow, "k", src.Load).Waits(t)
			store.Release()
			before.Want(t, "v1")
			newer := src.Next(t)
			cachetest.WantStored(t, rdb, ns, "k", "")
			newer.Give("v2")
			after.Want(t, "v2")
			cachetest.WantStored(t, rdb, ns, "k", "v2")
			src.Want(t, 2)
			_ = slow.Close()
			if s := slow.Stats(); s.Fenced != 1 || s.Stored != 1 {
				t.Errorf("%+v, want one load fenced and one stored", s)
			}
		})
	}
}

// A load that begins after a Delete is given to all callers, whether the Delete met its lock or
// not.
func TestDelete_WhileTheLockIsTaken(t *testing.T) {
	t.Parallel()
	for _, held := range []redistest.Action{redistest.HoldRequest, redistest.HoldReply} {
		t.Run(map[redistest.Action]string{redistest.HoldRequest: "before", redistest.HoldReply: "after"}[held], func(t *testing.T) {
			t.Parallel()
			p, ns, slow, direct, rdb := cachetest.Proxied(t, &cachetest.Raw)
			src := cachetest.NewSource[string](t)
			lock := p.On(cachetest.Script(t, "get_or_lock"), held).Times(1)
			before := cachetest.GoGet(t.Context(), slow, "k", src.Load)
			cachetest.Receive(t, "the lock is asked for", lock.Hit())
			if err := direct.Delete(t.Context(), "k"); err != nil {
				t.Fatal(err)
			}
			after := cachetest.GoGet(t.Context(), slow, "k", src.Load).Waits(t)
			lock.Release()
			// The load begins after both calls and the Delete, so that both may get its value.
			src.Next(t).Give("v2")
			before.Want(t, "v2")
			after.Want(t, "v2")
			if held == redistest.HoldRequest {
				cachetest.WantStored(t, rdb, ns, "k", "v2")
			} else {
				cachetest.WantStored(t, rdb, ns, "k", "") // its lock was deleted
			}
			src.Want(t, 1)
		})
	}
}

// Callers that arrive after a store was sent ask Redis if the store is never answered.
//
// Such a store proves nothing: this process may have been frozen while others went on.
func TestDelete_StoreWithoutAReply(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		silent := redistest.NewMiniClient(t, m)
		mute := &cachetest.Outage{Keeps: cachetest.Script(t, "store")}
		mute.On.Store(true)
		silent.AddHook(mute.Hook())
		here, there := cachetest.NewCacheIn[string](t, silent, "n", nil), cachetest.NewCacheIn[string](t, rdb, "n", nil)
		get := func(value string) chan string {
			got := make(chan string, 1)
			go func() {
				v, err := here.GetOrLoad(t.Context(), "k", func(context.Context, string) (string, error) {
					time.Sleep(time.Second)
					return value, nil
				})
				if err != nil {
					t.Error(err)
				}
				got <- v
			}()
			synctest.Wait()
			return got
		}
		first := get("old")
		time.Sleep(time.Second / 2)
		during := get("new")
		time.Sleep(time.Second/2 + 100*time.Millisecond) // the store is in flight
		if err := there.Delete(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
		late := get("new")
		if v := <-first; v != "old" {
			t.Errorf("the caller before it got %q", v)
		}
		if v := <-during; v != "new" { // Redis can be asked, by any command but a store
			t.Errorf("the caller during the load got %q", v)
		}
		if v := <-late; v != "new" {
			t.Errorf("the caller after the Delete got %q", v)
		}
	})
}

// A version read after a Delete has returned is never older than the source was before the Delete.
//
// Readers of two caches race against writers that change the source and delete the key.
func TestDelete_ReadersNeverGoBack(t *testing.T) {
	t.Parallel()
	const keys, readers = 3, 4
	rounds, kinds := 700, []string{"mini", "single", "cluster"}
	if testing.Short() {
		rounds, kinds = 300, kinds[:2]
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
			}
			seed := rand.Uint64()
			t.Logf("seed %d", seed)
			var version, floor [keys]atomic.Int64
			load := func(_ context.Context, key string) (string, error) {
				k, _ := strconv.Atoi(key)
				v := version[k].Load()
				for range v % 7 {
					runtime.Gosched()
				}
				return strconv.FormatInt(v, 10), nil
			}
			ns := redistest.Namespace(t)
			var wg sync.WaitGroup
			for i, rdb := range clients {
				c := cachetest.NewCacheIn(t, rdb, ns, &cachetest.Raw)
				for r := range readers {
					rnd := rand.New(rand.NewPCG(seed, uint64(i*readers+r)))
					wg.Go(func() {
						for range rounds {
							k := rnd.IntN(keys)
							key := strconv.Itoa(k)
							if rnd.IntN(8) == 0 { // write
								v := version[k].Add(1)
								if err := c.Delete(t.Context(), key); err != nil {
									t.Errorf("Delete: %v", err)
								}
								for old := floor[k].Load(); old < v && !floor[k].CompareAndSwap(old, v); old = floor[k].Load() {
								}
								continue
							}
							ctx, cancel := t.Context(), func() {}
							if rnd.IntN(8) == 0 {
								ctx, cancel = context.WithTimeout(ctx, time.Duration(rnd.IntN(int(time.Millisecond))))
							}
							least := floor[k].Load()
							v, err := c.GetOrLoad(ctx, key, load)
							cancel()
							if got, _ := strconv.ParseInt(v, 10, 64); err == nil && got < least {
								t.Errorf("key %s is version %d, which was deleted before the call: want at least %d", key, got, least)
							}
							if err != nil && err != context.DeadlineExceeded {
								t.Errorf("GetOrLoad: %v", err)
							}
						}
					})
				}
			}
			wg.Wait()
		})
	}
}

// Loads that no caller can be given any more are cancelled, and free their slots.
//
//fault:deleted-again
func TestDelete_VoidLoadsAreCancelled(t *testing.T) {
	for name, test := range map[string]struct {
		heeds bool
		most  int64
	}{
		"the Loader heeds its context":   {true, 3},
		"the Loader ignores its context": {false, 32}, // it has its slot until it returns
	} {
		t.Run(name, func(t *testing.T) {
			cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				c := cachetest.NewCache(t, rdb, &singlefill.Options[string]{MaxLoads: 32})
				src := &cachetest.TimedSource{Takes: 500 * time.Millisecond, Heeds: test.heeds, Value: "v"}
				var callers sync.WaitGroup
				for range 200 {
					callers.Go(func() {
						ctx, cancel := context.WithTimeout(t.Context(), 8*time.Millisecond)
						defer cancel()
						_, _ = c.GetOrLoad(ctx, "k", src.Load)
					})
					time.Sleep(5 * time.Millisecond)
					if err := c.Delete(t.Context(), "k"); err != nil {
						t.Fatal(err)
					}
				}
				callers.Wait()
				if n := src.Most.Load(); n > test.most || !test.heeds && n != test.most {
					t.Errorf("%d loads at a time, want %d at most", n, test.most)
				}
				begun := time.Now()
				cachetest.GoGet(t.Context(), c, "other", cachetest.Gives("v")).Want(t, "v")
				if test.heeds {
					cachetest.WantElapsed(t, "another key is loaded", begun, 0)
				}
				cachetest.GoGet(t.Context(), c, "k", cachetest.Gives("v")).Want(t, "v")
			})
		})
	}
}

// A value set during a load stays, and later callers get it at once.
func TestSet_DuringLoad(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		for _, name := range []string{"here", "in another process"} {
			ns := redistest.Namespace(t)
			c := cachetest.NewCacheIn(t, rdb, ns, &cachetest.Raw)
			setter := c
			if name != "here" {
				setter = cachetest.NewCacheIn(t, rdb, ns, &cachetest.Raw)
			}
			src := cachetest.NewSource[string](t)
			before := cachetest.GoGet(t.Context(), c, "k", src.Load)
			load := src.Next(t)
			if err := setter.Set(t.Context(), "k", "set"); err != nil {
				t.Fatal(err)
			}
			cachetest.GoGet(t.Context(), c, "k", src.Load).Want(t, "set") // without waiting for the load
			load.Give("loaded")
			before.Want(t, "loaded")
			_ = c.Close()
			cachetest.WantStored(t, rdb, ns, "k", "set")
			src.Want(t, 1)
			if s := c.Stats(); s.Fenced != 1 || name == "here" && s.LocksLost != 0 {
				t.Errorf("%s: %+v, want one load fenced", name, s)
			}
		}
	})
}

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

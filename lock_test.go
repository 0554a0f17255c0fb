package singlefill_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
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

// A dead holder is replaced when its lock ends, by a waiter's next poll, whether it has learned of its lock or not.
//
//fault:killed-holder
//fault:killed-at-store
func TestLock_DeadHolder(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := cachetest.NewCacheIn(t, rdb, "ns", &cachetest.Raw) // LockTTL is 20 s
		// Another process dies: its lock stays as it is while it loads, and no process renews it.
		src := cachetest.NewSource[string](t)
		lives := cachetest.GoGet(t.Context(), cachetest.NewCacheIn(t, rdb, "ns", &cachetest.Raw), "l", src.Load)
		load := src.Next(t)
		lock, _ := cachetest.Stored(t, rdb, "ns:{l}:lock")
		redistest.Must(t, rdb.Set(t.Context(), "ns:{k}:lock", lock, 20*time.Second).Err())
		load.Give("v")
		lives.Want(t, "v")
		begun := time.Now()
		v, err := c.GetOrLoad(t.Context(), "k", cachetest.Gives("v"))
		cachetest.WantValue(t, v, err, "v")
		if d := time.Since(begun); d < 20*time.Second || d > 20*time.Second+320*time.Millisecond {
			t.Errorf("loaded after %v, want 20s and a poll", d)
		}
		cachetest.WantStored(t, rdb, "ns", "k", "v")
	})
}

// The lock is renewed while its load runs, for many times LockTTL.
//
//fault:slow-load
func TestLock_RenewedWhileLoading(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		opts := &singlefill.Options[string]{RedisTimeout: 300 * time.Millisecond, LockTTL: time.Second, LoadTimeout: time.Minute}
		there, here := cachetest.NewCacheIn(t, rdb, "ns", opts), cachetest.NewCacheIn(t, rdb, "ns", opts)
		src := cachetest.NewSource[string](t)
		loads, load := src.Begin(t.Context(), t, there, "k")
		waits := cachetest.GoGet(t.Context(), here, "k", src.Load)
		time.Sleep(55 * time.Second)
		load.Give("v")
		loads.Want(t, "v")
		waits.Want(t, "v")
		src.Want(t, 1)
		if s := there.Stats(); s.LocksLost != 0 || s.Stored != 1 {
			t.Errorf("%+v, want the load stored", s)
		}
	})
}

// Callers that join a load all the time bring few renewals forward.
//
//fault:many-joiners
func TestLock_RenewalsOfManyJoiners(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		const loads, arrivals = 32, 100
		var renewals atomic.Int64
		isRenewal := cachetest.Script(t, "renew")
		rdb.AddHook(cachetest.Before(func(cmd redis.Cmder) error {
			if isRenewal(cachetest.Args(cmd)) {
				renewals.Add(1)
			}
			return nil
		}))
		c := cachetest.NewCache[string](t, rdb, nil)
		src := &cachetest.TimedSource{Takes: 2 * time.Second, Value: "v"}
		var callers sync.WaitGroup
		for range arrivals {
			callers.Go(func() { cachetest.GetAll(t.Context(), t, c, loads, src.Load) })
			time.Sleep(15 * time.Millisecond)
		}
		callers.Wait()
		src.WantLoads(t, "all calls", loads)
		if n := renewals.Load(); n > 10*loads {
			t.Errorf("%d renewals of %d loads within 2s, want 10 for each at most", n, loads)
		}
	})
}

// Waiting holds no connection.
//
//fault:waiting-callers
func TestWait_NoConnection(t *testing.T) {
	t.Parallel()
	const keys, callers, connections = 50, 10, 2
	server, ns := redistest.Shared(t), redistest.Namespace(t)
	rdb := server.Client(t, func(o *redis.Options) { o.PoolSize = connections })
	holder, waiter := cachetest.NewCacheIn(t, server.Client(t), ns, &cachetest.Raw), cachetest.NewCacheIn(t, rdb, ns, &cachetest.Raw)
	src := cachetest.NewSource[string](t)
	var loads []*cachetest.HeldLoad[string]
	var calls []*cachetest.Call[string]
	var locks []string
	for i := range keys {
		key := fmt.Sprint(i)
		calls = append(calls, cachetest.GoGet(t.Context(), holder, key, src.Load))
		loads, locks = append(loads, src.Next(t)), append(locks, ns+":{"+key+"}:lock")
		for range callers {
			calls = append(calls, cachetest.GoGet(t.Context(), waiter, key, src.Load).Waits(t))
		}
	}
	redistest.Await(t, "all connections are idle while callers wait for all keys", func() bool {
		heard, err := server.Admin().PubSubShardNumSub(t.Context(), locks...).Result()
		for _, lock := range locks {
			if err != nil || heard[lock] != 1 {
				return false
			}
		}
		pool := rdb.PoolStats()
		return pool.TotalConns > 0 && pool.TotalConns <= connections && pool.IdleConns == pool.TotalConns
	})
	cachetest.GoGet(t.Context(), waiter, "own", cachetest.Gives("v")).Want(t, "v")
	for _, load := range loads {
		load.Give("v")
	}
	for _, a := range calls {
		a.Want(t, "v")
	}
	if s := waiter.Stats(); s.Waits != keys || s.Loads != 1 || s.RedisErrors != 0 {
		t.Errorf("Stats are %+v", s)
	}
}

// A value loaded without Redis is not given to callers that came after the beginning of the load, once Redis is back:
// a Delete in another process may have succeeded, before they came or after.
//
//fault:away-at-end
func TestUnlocked_LateCallerAfterTheOutage(t *testing.T) {
	for _, during := range []bool{false, true} {
		t.Run(fmt.Sprintf("came during the outage %t", during), func(t *testing.T) {
			down := new(cachetest.Outage)
			inOutage(t, down, func(t *testing.T, here, there *singlefill.Cache[string]) {
				src := cachetest.NewSource[string](t)
				var late *cachetest.Call[string]
				join := func() { late = cachetest.GoGet(t.Context(), here, "k", cachetest.Gives("new")) }
				down.On.Store(true)
				early, load := src.Begin(t.Context(), t, here, "k")
				if during {
					join()
				}
				time.Sleep(1500 * time.Millisecond)
				down.On.Store(false)
				time.Sleep(2 * time.Second)
				redistest.Must(t, there.Delete(t.Context(), "k"))
				if !during {
					join()
				}
				synctest.Wait()
				load.Give("old")
				early.Want(t, "old")
				late.Want(t, "new")
				if s := here.Stats(); s.LoadsUnlocked != 1 || s.BreakerOpen {
					t.Errorf("%+v, want one load without the lock, and the breaker closed", s)
				}
			})
		})
	}
}

// A lock taken without a reply is given up when Redis is back, even if the first attempt to do so
// fails.
//
//fault:no-reply
func TestUnlocked_LockInDoubtIsAbandoned(t *testing.T) {
	down := &cachetest.Outage{Keeps: redistest.Command("evalsha"), Arrives: cachetest.Script(t, "get_or_lock")}
	inOutage(t, down, func(t *testing.T, here, there *singlefill.Cache[string]) {
		cachetest.GoGet(t.Context(), here, "warm", cachetest.Gives("v")).Want(t, "v")
		down.On.Store(true)
		cachetest.GoGet(t.Context(), here, "k", cachetest.Gives("v")).Want(t, "v")
		time.Sleep(3 * time.Second)
		down.On.Store(false)
		begun := time.Now()
		cachetest.GoGet(t.Context(), there, "k", cachetest.Gives("v")).Want(t, "v")
		if d := time.Since(begun); d > 2*time.Second {
			t.Errorf("another process loads %v after the outage, want 2s at most: LockTTL is 20s", d)
		}
	})
}

// A lock that the server has refused to release is given up once the server accepts writes again: a
// waiting process then loads, and need not wait for the end of the lock.
//
//fault:refused-writes
func TestLock_RefusedRelease(t *testing.T) {
	t.Parallel()
	for says, fault := range map[string]func(t testing.TB, s *redistest.Server) (mend func()){
		"MISCONF":    redistest.FailSaves,
		"NOREPLICAS": redistest.Config("min-replicas-to-write", "1", "0"),
		"READONLY":   redistest.LoseMaster,
	} {
		t.Run(says, func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			ns := redistest.Namespace(t)
			abandons := make(chan error, 1)
			opts := &singlefill.Options[string]{LockTTL: time.Hour, LoadTimeout: 2 * time.Hour, Trace: &singlefill.Trace{
				RedisError: func(_ context.Context, op string, err error) {
					if op == "abandon" {
						select {
						case abandons <- err:
						default:
						}
					}
				},
			}}
			here, there := cachetest.NewCacheIn(t, server.Client(t), ns, opts),
				cachetest.NewCacheIn(t, server.Client(t), ns, opts)
			src := cachetest.NewSource[string](t)
			first, load := src.Begin(t.Context(), t, here, "k")
			waits := cachetest.GoGet(t.Context(), there, "k", cachetest.Gives("v2"))
			redistest.Await(t, "the other process has found the lock held", func() bool { return server.Calls("pttl") > 0 })
			mend := fault(t, server)
			load.Give("v1")
			first.Want(t, "v1")
			if err := cachetest.Receive(t, "the server refuses", abandons); !redis.HasErrorPrefix(err, says) {
				t.Errorf("the lock is given up, which fails with %v, want %s", err, says)
			}
			mend()
			waits.Want(t, "v2")
		})
	}
}

// inOutage runs a test with two processes, one of which cannot reach Redis while down is on.
func inOutage(t *testing.T, down *cachetest.Outage, run func(t *testing.T, here, there *singlefill.Cache[string])) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		faulty := redistest.NewMiniClient(t, m)
		faulty.AddHook(down.Hook())
		there := cachetest.NewCacheIn(t, rdb, "ns", &singlefill.Options[string]{RedisTimeout: time.Second})
		here := cachetest.NewCacheIn(t, faulty, "ns", &singlefill.Options[string]{RedisTimeout: time.Second})
		run(t, here, there)
		down.On.Store(false)
	})
}

// MaxFleetLoads bounds the loads of all caches of a namespace: as many as the limit run, and never
// one more. While processes disagree, as during a deployment that changes it, the larger number counts.
//
//fault:disagreement
func TestMaxFleetLoads_LoadsAtATime(t *testing.T) {
	for name, limits := range map[string][]int{"agreed": {3, 3, 3}, "disagreement": {2, 4}} {
		t.Run(name, func(t *testing.T) {
			redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
				const keys = 12
				ns := redistest.Namespace(t)
				src := cachetest.NewSource[string](t)
				var caches []*singlefill.Cache[string]
				var calls []*cachetest.Call[string]
				for _, limit := range limits {
					c := cachetest.NewCacheIn(t, rdb, ns, &singlefill.Options[string]{MaxFleetLoads: limit})
					caches = append(caches, c)
					for k := range keys {
						calls = append(calls, cachetest.GoGet(t.Context(), c, fmt.Sprint(k), src.Load))
					}
				}
				largest := slices.Max(limits)
				running := make(chan *cachetest.HeldLoad[string], largest)
				for range largest {
					running <- src.Next(t)
				}
				for begun := largest; begun <= keys; begun++ {
					src.Want(t, int64(begun))
					if held, err := rdb.ZCard(t.Context(), fleetKey(ns)).Result(); held > int64(largest) || err != nil {
						t.Errorf("%d slots are held, %v", held, err)
					}
					(<-running).Give("v")
					if begun < keys {
						running <- src.Next(t)
					}
				}
				for range largest - 1 {
					(<-running).Give("v")
				}
				for _, a := range calls {
					a.Want(t, "v")
				}
				src.Want(t, keys)
				for _, c := range caches {
					if n := c.Stats().LoadsUnlimited; n != 0 {
						t.Errorf("%d loads without the limit", n)
					}
				}
				redistest.Await(t, "no slot is held any more", func() bool { return !redistest.Exists(t, rdb, fleetKey(ns)) })
			})
		})
	}
}

// A refresh does not wait for a slot of the fleet.
func TestMaxFleetLoads_RefreshDoesNotWait(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := cachetest.OldCache(t, rdb, singlefill.Options[string]{StaleWhileRevalidate: time.Hour, MaxFleetLoads: 1}, "old", time.Second)
		src := cachetest.NewSource[string](t)
		busy, load := src.Begin(t.Context(), t, c, "busy")
		for range 5 {
			if a := <-cachetest.GoAsk(t.Context(), c, "k", cachetest.MustNotLoad[string](t)); a.Value != "old" || a.Took != 0 {
				t.Errorf("answered %+v", a)
			}
			time.Sleep(time.Second)
		}
		load.Give("v")
		busy.Want(t, "v")
		synctest.Wait()
		time.Sleep(time.Second)
		<-cachetest.GoAsk(t.Context(), c, "k", cachetest.Gives("new"))
		synctest.Wait()
		cachetest.WantGet(t, c, "k", "new", nil)
	})
}

// A nested load needs no slot of the fleet.
func TestMaxFleetLoads_NestedLoad(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := cachetest.NewCache(t, rdb, &singlefill.Options[string]{MaxFleetLoads: 1, MaxLoads: 1})
		cachetest.GoGet(t.Context(), c, "outer", func(ctx context.Context, _ string) (string, error) {
			return c.GetOrLoad(ctx, "inner", cachetest.Gives("v"))
		}).Want(t, "v")
	})
}

// A load gives its slot of the fleet back, however it ends.
func TestMaxFleetLoads_SlotIsGivenBack(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := cachetest.NewCacheIn(t, rdb, "ns", &singlefill.Options[string]{MaxFleetLoads: 1})
		for how, load := range map[string]singlefill.Loader[string]{
			"a value":   cachetest.Gives("v"),
			"an error":  cachetest.Fails[string](errors.New("boom")),
			"not found": cachetest.Fails[string](singlefill.ErrNotFound),
			"a panic":   func(context.Context, string) (string, error) { panic("boom") },
			"Goexit":    func(context.Context, string) (string, error) { runtime.Goexit(); return "", nil },
			"a timeout": func(ctx context.Context, _ string) (string, error) { <-ctx.Done(); return "", ctx.Err() },
		} {
			_, _ = c.GetOrLoad(t.Context(), how, load)
			synctest.Wait()
			if redistest.Exists(t, rdb, fleetKey("ns")) {
				t.Errorf("after %s the slot is still held", how)
			}
		}
	})
}

// A dead process keeps its slot of the fleet for LockTTL.
//
//fault:killed-fleet-load
func TestMaxFleetLoads_DeadProcess(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		var dead atomic.Bool
		mortal := redistest.NewMiniClient(t, m)
		mortal.AddHook(redistest.Trips(func([]redis.Cmder) error {
			if dead.Load() {
				return redis.ErrClosed
			}
			return nil
		}))
		src := cachetest.NewSource[string](t)
		dies := cachetest.NewCacheIn(t, mortal, "ns", &singlefill.Options[string]{MaxFleetLoads: 1, RedisTimeout: time.Second, LockTTL: 5 * time.Second})
		call, load := src.Begin(t.Context(), t, dies, "dies")
		defer func() { load.Give("v"); call.Want(t, "v") }()
		dead.Store(true)
		c := cachetest.NewCacheIn(t, rdb, "ns", &singlefill.Options[string]{MaxFleetLoads: 1})
		begun := time.Now()
		cachetest.GoGet(t.Context(), c, "k", cachetest.Gives("v")).Want(t, "v")
		if d := time.Since(begun); d < 5*time.Second || d > 6*time.Second {
			t.Errorf("the slot of the dead process was taken after %v, want LockTTL, 5s, and a pause", d)
		}
	})
}

// fleetKey is the first key of the semaphore of a namespace.
func fleetKey(ns string) string { return ns + ":{" + ns + "}:loads" }

// MaxLoads alone bounds the loads while Redis cannot be asked.
//
//fault:unreachable
func TestMaxFleetLoads_WithoutRedis(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := cachetest.NewCache(t, rdb, &singlefill.Options[string]{MaxFleetLoads: 1, MaxLoads: 2})
		m.SetError("LOADING dataset")
		src := cachetest.NewSource[string](t)
		var calls []*cachetest.Call[string]
		for k := range 4 {
			calls = append(calls, cachetest.GoGet(t.Context(), c, fmt.Sprint(k), src.Load))
		}
		for begun := range 2 {
			first, second := src.Next(t), src.Next(t)
			time.Sleep(time.Second)
			src.Want(t, 2*int64(begun)+2)
			first.Give("v")
			second.Give("v")
		}
		for _, a := range calls {
			a.Want(t, "v")
		}
		m.SetError("")
	})
}

// MaxFleetLoads delays no load while Redis is silent.
func TestMaxFleetLoads_Outage(t *testing.T) {
	took := make(map[int]time.Duration)
	for _, fleet := range []int{0, 64} {
		synctest.Test(t, func(t *testing.T) {
			_, rdb := redistest.StartMini(t)
			c := cachetest.NewCache(t, rdb, &singlefill.Options[string]{MaxFleetLoads: fleet})
			var down cachetest.Outage
			down.On.Store(true)
			rdb.AddHook(down.Hook())
			begun := time.Now()
			cachetest.GetAll(t.Context(), t, c, 1000, cachetest.Takes(100*time.Millisecond, "v", nil))
			took[fleet] = time.Since(begun)
		})
	}
	if took[64] > 3*took[0] {
		t.Errorf("1000 loads took %v, and %v with MaxFleetLoads", took[0], took[64])
	}
}

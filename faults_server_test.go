package singlefill_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

// In these tests a server stalls, forgets, moves its keys or is replaced by another one, while it is asked.

// failSaves has a server fail to save, and so refuse writes, until the returned function is called.
func failSaves(t testing.TB, s *redistest.Server) (mend func()) {
	t.Helper()
	do, ctx := faultDo(t, s.Admin()), context.Background()
	dir := s.Admin().ConfigGet(ctx, "dir").Val()["dir"]
	inTheWay := filepath.Join(dir, "dump.rdb", "not empty") // the file cannot take the place of a directory
	if err := os.MkdirAll(inTheWay, 0o700); err != nil {
		t.Fatal(err)
	}
	do("config", "set", "save", "3600 1")
	do("bgsave")
	asks := s.Client(t, onceOnly)
	redistest.Await(t, "writes are refused", func() bool {
		return redis.HasErrorPrefix(asks.Set(ctx, "x", "y", time.Minute).Err(), "MISCONF")
	})
	return func() { do("config", "set", "save", "") }
}

//fault:short-freeze
//fault:long-freeze
func TestAServerThatStallsOrRefusesWritesBreaksNoRead(t *testing.T) {
	for _, c := range []struct {
		name  string
		reads bool // are answered meanwhile
		begin func(t *testing.T, s *redistest.Server) (end func())
	}{
		{"asleep for a second", false, func(t *testing.T, s *redistest.Server) func() {
			slept := make(chan struct{})
			once := s.Client(t, patientOnce)
			before := s.Calls("debug")
			go func() {
				defer close(slept)
				once.Do(context.Background(), "debug", "sleep", "1")
			}()
			return func() {
				<-slept
				if s.Calls("debug") == before {
					t.Error("it has not slept")
				}
			}
		}},
		{"paused", false, func(t *testing.T, s *redistest.Server) func() {
			faultDo(t, s.Admin())("client", "pause", 800, "all") // which it executes no command to end
			return func() { faultDo(t, s.Client(t))("ping") }
		}},
		{"writes paused", true, func(t *testing.T, s *redistest.Server) func() {
			faultDo(t, s.Admin())("client", "pause", 600_000, "write")
			return func() { faultDo(t, s.Admin())("client", "unpause") }
		}},
		{"cannot save", true, func(t *testing.T, s *redistest.Server) func() { return failSaves(t, s) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := redistest.Start(t)
			f := newFaultCache(t, s.Client(t), redistest.Namespace(t), impatience)
			redistest.Await(t, "a value is cached", func() bool {
				f.mustLoad("kept")
				_, err := f.Get(t.Context(), "kept")
				return err == nil
			})
			end := c.begin(t, s)
			var slowest time.Duration
			redistest.Await(t, "it has been felt", func() bool {
				begun := time.Now()
				f.mustLoad(fmt.Sprint("k", f.loads.Load()))
				slowest = max(slowest, time.Since(begun))
				return f.log.count() > 0
			})
			if c.reads {
				f.mustHit("kept")
			} else {
				f.mustLoad("kept")
			}
			if err := f.Set(t.Context(), "k", "v"); err == nil && c.name != "asleep for a second" {
				t.Error("Set = nil")
			}
			t.Logf("the slowest call took %v; RedisTimeout is %v", slowest.Round(time.Millisecond), impatience)
			end()
			f.wantCounted()
			f.recovers()
			f.mustHit("kept")
		})
	}
}

//fault:restart-aof
func TestARestartThatForgetsNothingCostsNothing(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t, "--appendonly", "yes", "--appendfsync", "always")
	a, b := faultPair(t, s.Client(t), s.Client(t), redistest.Namespace(t), patience)
	var wg sync.WaitGroup
	var pid int
	a.during = func(key string) {
		b.faultWaits(&wg, s, key)
		pid = s.Pid()
		s.Restart()
	}
	begun := time.Now()
	a.mustLoad("k")
	wg.Wait()
	t.Logf("a load with a restart in it took %v", time.Since(begun).Round(time.Millisecond))
	if s.Pid() == pid {
		t.Error("the server was not restarted")
	}
	a.during = nil
	a.mustHit("k")
	b.mustHit("k")
	a.wantLoads(1)
	a.wantStats("Stored", 1, func(s singlefill.Stats) int64 { return s.Stored })
	if st := a.Stats(); st.Fenced+st.LocksLost+st.LoadsUnlocked != 0 {
		t.Errorf("%+v", st)
	}
}

// Memory for a tenth of what is asked for: entries, and locks of loads that are under way, go at any time.
//
//fault:eviction
func TestEvictionCostsLoadsAndNothingElse(t *testing.T) {
	t.Parallel()
	const keys = 300
	s := redistest.Start(t, "--maxmemory-policy", "allkeys-random", "--maxmemory-samples", "1")
	var used int64
	fmt.Sscan(s.Admin().InfoMap(t.Context(), "memory").Item("Memory", "used_memory"), &used)
	large := strings.Repeat("x", 4096)
	ns := redistest.Namespace(t)
	var caches []*singlefill.Cache[string]
	for range 2 {
		c, err := singlefill.New(s.Client(t), ns, time.Hour, &singlefill.Options[string]{RedisTimeout: patience,
			LockTTL: 10 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		caches = append(caches, c)
	}
	faultDo(t, s.Admin())("config", "set", "maxmemory", used+1_000_000)
	evicted := func() (n int64) {
		fmt.Sscan(s.Admin().InfoMap(context.Background(), "stats").Item("Stats", "evicted_keys"), &n)
		return n
	}
	var wg sync.WaitGroup
	var calls atomic.Int64
	for _, c := range caches {
		for g := range 4 {
			wg.Go(func() {
				for i := 0; i < 250 || i < 20_000 && evicted() < 100; i++ {
					calls.Add(1)
					key := fmt.Sprint("k", (i*7+g*13)%keys)
					v, err := c.GetOrLoad(context.Background(), key, func(_ context.Context, key string) (string,
						error) {
						return large + key, nil
					})
					if err != nil || v != large+key {
						t.Errorf("GetOrLoad(%s) = %d bytes, %v", key, len(v), err)
						return
					}
				}
			})
		}
	}
	wg.Wait()
	n := evicted()
	if n < 100 {
		t.Errorf("%d keys were evicted", n)
	}
	var loads, fenced int64
	for _, c := range caches {
		st := c.Stats()
		loads, fenced = loads+st.Loads, fenced+st.Fenced
		if st.LoadsUnlocked != 0 || st.RedisErrors != 0 || st.BreakerOpens != 0 {
			t.Errorf("%+v", st)
		}
	}
	t.Logf("%d calls, %d keys evicted, %d loads, %d of them refused at the store", calls.Load(), n, loads, fenced)
}

// Everything is gone at once, and everybody wants it: the source sees one load for each key, a few at a time, and
// then nothing any more.
//
//fault:everything-cold
func TestAFlushOfAWarmCacheIsOneLoadForEachKeyAFewAtATime(t *testing.T) {
	t.Parallel()
	const keys, maxLoads, callers = 1000, 2, 8
	s := redistest.Start(t)
	a, b := faultPair(t, s.Client(t), s.Client(t), redistest.Namespace(t), patience,
		func(o *singlefill.Options[string]) { o.MaxLoads = maxLoads })
	all := func() {
		var wg sync.WaitGroup
		for _, f := range []*faultCache{a, b} {
			for g := range callers {
				wg.Go(func() {
					for i := range keys {
						key := fmt.Sprint("k", (i+g*31)%keys)
						if v, err := f.GetOrLoad(context.Background(), key, f.load); err != nil || v != "value of "+key {
							t.Errorf("GetOrLoad(%s) = %q, %v", key, v, err)
							return
						}
					}
				})
			}
		}
		wg.Wait()
	}
	all()
	a.wantLoads(keys)
	a.during = func(string) { time.Sleep(time.Millisecond) } // the source is at its limit
	if err := s.Admin().FlushAll(t.Context()).Err(); err != nil {
		t.Fatal(err)
	}
	if n := s.Admin().DBSize(t.Context()).Val(); n != 0 {
		t.Errorf("%d keys are left", n)
	}
	begun := time.Now()
	all()
	t.Logf("%d keys were back after %v, with %d loads at a time in two processes", keys,
		time.Since(begun).Round(time.Millisecond), a.most.Load())
	a.wantLoads(2 * keys)
	if most := a.most.Load(); most > 2*maxLoads {
		t.Errorf("%d loads at a time, MaxLoads is %d in each of two", most, maxLoads)
	}
	all()
	a.wantLoads(2 * keys)
	a.wantNoErrors()
	b.wantNoErrors()
}

// Somebody deletes a key, or puts something else there, in the middle of a load.
//
//fault:foreign-key
func TestWhateverBecomesOfAKeyDuringALoadNobodyIsStuck(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	redistest.Planted(t, "{")
	for _, which := range []string{"value", "lock"} {
		for what, put := range map[string][]any{
			"deleted": nil, "a text": {"set", "some text"}, "a list": {"rpush", "x"}, "a hash": {"hset", "x", "y"},
			"an entry": {"set", string(hostileEntry("x"))}, "a lock of nobody": {"set", "H" + strings.Repeat("x", 42)},
		} {
			t.Run(which+" becomes "+what, func(t *testing.T) {
				a, b := faultPair(t, s.Client(t), s.Client(t), redistest.Namespace(t), patience)
				key := a.value("k")
				if which == "lock" {
					key = a.lock("k")
				}
				var wg sync.WaitGroup
				a.during = func(string) {
					a.faultSource.during = nil
					b.faultWaits(&wg, s, "k")
					_, err := s.Admin().TxPipelined(t.Context(), func(p redis.Pipeliner) error { // nobody comes between
						p.Del(t.Context(), key)
						if put != nil {
							p.Do(t.Context(), append([]any{put[0], key}, put[1:]...)...)
						}
						return nil
					})
					if err != nil {
						t.Error(err)
					}
				}
				a.mustLoad("k")
				wg.Wait()
				b.mustLoad("k")
				a.settled()
				b.settled()
				a.mustHit("k")
				b.mustHit("k")
				if n := a.loads.Load(); n > 2 {
					t.Errorf("%d loads", n)
				}
				if ttl := s.Admin().PTTL(t.Context(), a.value("k")).Val(); ttl <= 0 {
					t.Errorf("the value has %v to live", ttl)
				}
				a.wantNoErrors()
				b.wantNoErrors()
			})
		}
	}
}

// faultSaid returns how often the servers have answered with an error of that code.
func faultSaid(t testing.TB, servers []*redistest.Server, code string) (all int) {
	t.Helper()
	for _, s := range servers {
		info, err := s.Admin().Info(context.Background(), "errorstats").Result()
		if err != nil {
			t.Fatal(err)
		}
		var n int
		_, count, _ := strings.Cut(info, "errorstat_"+code+":count=")
		fmt.Sscan(count, &n)
		all += n
	}
	return all
}

// A key changes its node in the middle of a load. On the way its lock is on one node and its value on another, or
// nowhere: Redis runs no script on both then, and says to try again.
//
//fault:moved-slot
func TestASlotThatMovesDuringALoadCostsNobodyItsValue(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t)
	for key, first := range map[string]func(f *faultCache, key string) string{
		"lock-first":  (*faultCache).lock,
		"value-first": (*faultCache).value,
	} {
		t.Run(key, func(t *testing.T) {
			windows := func(o *singlefill.Options[string]) { o.StaleIfError = time.Hour }
			a, b := faultPair(t, cluster.Client(t), cluster.Client(t), redistest.Namespace(t), patience, windows)
			if key == "value-first" { // it is an old one
				a.mustLoad(key)
				if err := a.Expire(t.Context(), key); err != nil {
					t.Fatal(err)
				}
				a.settled()
				a.loads.Store(0)
			}
			from := cluster.Owner(t, a.value(key))
			told := faultSaid(t, cluster.Nodes, "TRYAGAIN")
			var wg sync.WaitGroup
			var moving atomic.Pointer[redistest.Move]
			a.during = func(string) {
				b.faultWaits(&wg, from, key)
				move := cluster.Move(t, a.value(key))
				move.Take(first(a, key))
				moving.Store(move)
			}
			begun := time.Now()
			wg.Go(func() { a.mustLoad(key) }) // which moves it
			redistest.Await(t, "they have been told to try again", func() bool {
				return faultSaid(t, cluster.Nodes, "TRYAGAIN") > told+2
			})
			move := moving.Load()
			move.End()
			wg.Wait()
			t.Logf("a load with a move in it took %v", time.Since(begun).Round(time.Millisecond))
			if owner := cluster.Owner(t, a.value(key)); owner != move.To {
				t.Error("the key has not changed its node")
			}
			a.mustHit(key)
			b.mustHit(key)
			a.wantLoads(1)
			if st := a.Stats(); st.LoadsUnlocked+st.LocksLost+st.Fenced != 0 {
				t.Errorf("%+v; errors %v", st, a.log.errors())
			}
			redistest.Await(t, "nobody holds the lock", func() bool {
				return !strings.HasPrefix(move.To.Admin().Get(context.Background(), a.lock(key)).Val(), "H")
			})
		})
	}
}

// Three masters with a replica each; one master dies while everybody asks.
//
//fault:dead-master
func TestAMasterOfAClusterThatDiesUnderLoadIsReplaced(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartReplicatedCluster(t)
	often := func(o *redis.ClusterOptions) { o.ClusterStateReloadInterval, o.DialerRetries = 500*time.Millisecond, 1 }
	a, b := faultPair(t, cluster.Client(t, often), cluster.Client(t, often), redistest.Namespace(t),
		300*time.Millisecond)
	const keys = 60
	caches := []*faultCache{a, b}
	for i := range keys {
		key := fmt.Sprint("k", i)
		redistest.Await(t, "the value is cached", func() bool {
			a.mustLoad(key)
			_, err := b.Get(t.Context(), key)
			return err == nil
		})
	}
	victim := cluster.Owner(t, a.value("k0"))
	var mine []string // on the victim
	for i := range keys {
		if key := fmt.Sprint("k", i); faultOwns(t, victim, a.value(key)) {
			mine = append(mine, key)
		}
	}
	victim.Kill()
	begun := time.Now()
	stop := make(chan struct{})
	var wg sync.WaitGroup
	var calls atomic.Int64
	var mu sync.Mutex
	var slowest time.Duration
	for _, f := range caches {
		for g := range 4 {
			wg.Go(func() {
				for i := 0; ; i++ {
					select {
					case <-stop:
						return
					default:
					}
					begun := time.Now()
					f.mustLoad(fmt.Sprint("k", (i+g*17)%keys))
					calls.Add(1)
					mu.Lock()
					slowest = max(slowest, time.Since(begun))
					mu.Unlock()
				}
			})
		}
	}
	redistest.Await(t, "all that was on the dead master is cached again", func() bool {
		for _, key := range mine {
			if _, err := b.Get(context.Background(), key); err != nil {
				return false
			}
		}
		return true
	})
	back := time.Since(begun)
	close(stop)
	wg.Wait()
	t.Logf("%d of %d keys were on the dead master, and cached again after %v", len(mine), keys, back.Round(time.Millisecond))
	t.Logf("%d calls meanwhile, the slowest took %v; RedisTimeout is 300 ms", calls.Load(), slowest.Round(time.Millisecond))
	if a.log.count()+b.log.count() == 0 {
		t.Error("nobody has noticed")
	}
	if owner := cluster.Owner(t, a.value(mine[0])); owner == victim {
		t.Error("the dead master serves its keys")
	}
	a.recovers()
	b.recovers()
}

// The replica that takes over has never heard of the lock.
//
//fault:failover-lost-lock
func TestAFailoverThatLosesALockCostsALoadWhoseValueIsRefused(t *testing.T) {
	t.Parallel()
	master := redistest.Start(t)
	replica := redistest.StartReplica(t, master)
	p := redistest.NewProxy(t, master.Addr)
	a, b := faultPair(t, p.Client(t), p.Client(t), redistest.Namespace(t), patience)
	a.during = func(key string) {
		a.faultSource.during = nil
		if faultExists(t, replica.Admin(), a.lock(key)) {
			t.Error("the replica knows of the lock")
		}
		master.Kill()
		faultDo(t, replica.Admin())("replicaof", "no", "one")
		p.Redirect(replica.Addr)
		p.Cut()
		b.mustLoad(key)
		b.mustHit(key)
	}
	host, _, _ := strings.Cut(replica.Addr, ":")
	faultDo(t, replica.Admin())("replicaof", host, 1) // cut off: nobody is there
	a.mustLoad("k")
	a.settled()
	a.wantLoads(2)
	b.mustHit("k")
	if st := a.Stats(); st.Stored != 0 || st.Fenced != 1 {
		t.Errorf("of the cache whose lock was lost: %+v; errors %v", st, a.log.errors())
	}
	if st := b.Stats(); st.Stored != 1 || st.Loads != 1 {
		t.Errorf("of the other one: %+v; errors %v", st, b.log.errors())
	}
}

// A client of a cluster follows MOVED and ASK three times; while a slot is on its way, or a master is being
// replaced, it then returns the last of them. It says as much as TRYAGAIN does: nothing has been done, try again.
//
//fault:last-redirection
func TestARedirectThatTheClientDoesNotFollowAnyMoreIsTriedAgain(t *testing.T) {
	for _, says := range []string{"TRYAGAIN x", "MOVED 1 127.0.0.1:1", "ASK 1 127.0.0.1:1"} {
		t.Run(says, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m, rdb := redistest.StartMini(t)
				f := newFaultCache(t, rdb, "ns", impatience)
				f.mustLoad("before")
				var said atomic.Int64
				m.Server().SetPreHook(func(p *server.Peer, cmd string, args ...string) bool {
					if cmd == "EVALSHA" && said.Add(1) == 1 {
						p.WriteError(says)
						return true
					}
					return false
				})
				f.mustLoad("k")
				f.settled()
				if info := f.lastLoad(); info.Unlocked || !info.Stored {
					t.Errorf("Trace.LoadDone was told %+v: want a load under the lock", info)
				}
			})
		})
	}
}

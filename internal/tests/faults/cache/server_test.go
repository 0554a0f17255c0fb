package cache_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// A call gets its value although the server dies in the middle of it.
//
//fault:crash-in-call
func TestServer_DiesDuringCall(t *testing.T) {
	for _, when := range []string{"get_or_lock", "during the load", "store", "restarted during the load"} {
		t.Run(when, func(t *testing.T) {
			s, p := newWarm(t)
			c := cachetest.New(t, p.Client(t), redistest.Namespace(t), stallTimeout)
			switch when {
			case "during the load":
				c.During = func(string) { s.Kill() }
				c.MustLoad("k")
			case "restarted during the load":
				c.During = func(string) { s.Restart() }
				c.MustLoad("k")
			default: // the command is about to reach the server
				rule := p.On(cachetest.Script(t, when), redistest.HoldRequest)
				var call sync.WaitGroup
				call.Go(func() { c.WantValue("k") })
				awaitHit(t, rule)
				s.Kill()
				rule.Release()
				call.Wait()
			}
			c.During = nil
			c.WantLoads(1)
			c.AwaitLoads()
			switch n, info := c.Stats(), c.LastLoad(); when {
			case "restarted during the load": // the store is refused without its lock, or fails on a dead connection
				if n.Stored != 0 || n.Fenced+n.StoreErrors != 1 {
					t.Errorf("Stats are %+v", n)
				}
				if redistest.Exists(t, s.Admin(), c.ValueKey("k")) || redistest.Exists(t, s.Admin(), c.LockKey("k")) {
					t.Error("keys exist after the restart")
				}
			case "get_or_lock":
				c.WantErrors()
				s.Restart()
			default:
				c.WantErrors()
				if n.StoreErrors != 1 || info.StoreErr == nil || info.Stored || info.Fenced || info.Unlocked || info.Err != nil {
					t.Errorf("Trace.LoadDone reported %+v", info)
				}
				s.Restart()
			}
			c.AwaitRecovery()
		})
	}
}

// A restart that forgets nothing costs nothing.
//
//fault:restart-aof
func TestServer_RestartsFromItsLog(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t, "--appendonly", "yes", "--appendfsync", "always")
	a, b := newPair(t, s.Client(t), s.Client(t), cachetest.Patient)
	var wg sync.WaitGroup
	var pid int
	a.During = func(key string) {
		goWait(t, &wg, b, s, key)
		pid = s.Pid()
		s.Restart()
	}
	begun := time.Now()
	a.MustLoad("k")
	wg.Wait()
	t.Logf("a load with a restart in it took %v", time.Since(begun).Round(time.Millisecond))
	if s.Pid() == pid {
		t.Error("the server was not restarted")
	}
	a.During = nil
	a.WantHit("k")
	b.WantHit("k")
	a.WantLoads(1)
	a.WantStat("Stored", 1)
	if n := a.Stats(); n.Fenced+n.LocksLost+n.LoadsUnlocked != 0 {
		t.Errorf("Stats are %+v", n)
	}
}

// The commands that a frozen server has in its sockets take nothing when it goes on, however long their
// callers have been gone.
//
//fault:long-freeze
func TestServer_FrozenTakesNothing(t *testing.T) {
	for _, bounded := range []bool{true, false} {
		t.Run(fmt.Sprintf("ContextTimeoutEnabled %t", bounded), func(t *testing.T) {
			t.Parallel()
			s := redistest.Start(t)
			const keys, ttl = 4, 600 * time.Millisecond
			a, b := newPair(t, s.Client(t, func(o *redis.Options) { o.ContextTimeoutEnabled = bounded }), s.Client(t), cachetest.Impatient, lockTTL(ttl))
			var idle sync.WaitGroup
			for n := range 2 * keys { // connections
				idle.Go(func() { a.WantValue(fmt.Sprint("warm", n)) })
			}
			idle.Wait()
			loads := a.Loads.Load()
			s.Freeze()
			frozen := time.Now()
			var calls sync.WaitGroup
			for n := range keys {
				calls.Go(func() { a.WantValue(fmt.Sprint("k", n)) })
			}
			calls.Wait()
			a.WantLoads(loads + keys)
			redistest.Await(t, "the locks of the callers would have ended", func() bool { return time.Since(frozen) > 3*ttl })
			if a.Stats().LoadsUnlocked < keys {
				t.Error("the callers have not given up")
			}
			s.Thaw()
			waits := b.Stats().Waits
			for n := range keys {
				b.MustLoad(fmt.Sprint("k", n))
			}
			b.WantStat("Waits", waits) // no call waits for another
		})
	}
}

// A request that asks several caches of one client, one after the other, waits for a frozen server once. What the
// first cache learns, the others know.
//
//fault:frozen-for-many-caches
func TestServer_FrozenForManyCaches(t *testing.T) {
	for _, bounded := range []bool{true, false} {
		t.Run(fmt.Sprintf("ContextTimeoutEnabled %t", bounded), func(t *testing.T) {
			t.Parallel()
			s := redistest.Start(t)
			rdb := s.Client(t, func(o *redis.Options) { o.ContextTimeoutEnabled = bounded })
			var caches []*cachetest.Cache
			for range 4 {
				c := cachetest.New(t, rdb, redistest.Namespace(t), 4*cachetest.Impatient)
				c.AwaitCached("k")
				caches = append(caches, c)
			}
			s.Freeze()
			for i, c := range caches {
				c.WantValue("k")
				if waited := len(c.Log.Errors()["get"]); waited != 0 && i > 0 || waited > 1 {
					t.Errorf("cache %d: %d reads have waited for the server", i, waited)
				}
			}
			s.Thaw()
			for _, c := range caches {
				c.AwaitRecovery()
				if b := c.Log.Breaker(); len(b) != 2 {
					t.Errorf("the breaker has changed: %v, want one outage", b)
				}
			}
		})
	}
}

// A call waits for a server that falls silent until the breaker opens, and from then on for loads only, whatever it
// was waiting for then.
//
//fault:frozen-for-many-caches
func TestServer_SilentForAnyCall(t *testing.T) {
	const timeout, load = 500 * time.Millisecond, 2 * time.Millisecond
	for _, bounded := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			link, plain := redistest.StartMiniLink(t)
			o := *plain.Options()
			o.ContextTimeoutEnabled = bounded
			rdb := redis.NewClient(&o)
			defer rdb.Close()
			begun := time.Now()
			var opened atomic.Int64
			c, err := singlefill.New[string](rdb, "silent", time.Second, &singlefill.Options[string]{
				RedisTimeout: timeout,
				Trace:        &singlefill.Trace{BreakerChanged: func(open bool) { opened.CompareAndSwap(0, int64(time.Since(begun))) }},
			})
			if err != nil {
				t.Fatal(err)
			}
			var wg sync.WaitGroup
			for since := time.Duration(0); since < 3*time.Second; since = time.Since(begun) {
				link.BlackHole(since > time.Second)
				wg.Go(func() {
					_, err := c.GetOrLoad(t.Context(), fmt.Sprint(rand.N(100)), func(context.Context, string) (string, error) {
						time.Sleep(load)
						return "value", nil
					})
					end := time.Since(begun)
					if at := time.Duration(opened.Load()); err != nil || at != 0 && end-max(at, since) > timeout/16+5*load {
						t.Errorf("bounded %t: a call from %v to %v, with the breaker open since %v: %v", bounded, since, end, at, err)
					}
				})
				time.Sleep(3 * time.Millisecond)
			}
			wg.Wait()
			if opened.Load() == 0 {
				t.Error("the breaker has not opened")
			}
			link.BlackHole(false)
			time.Sleep(time.Minute)
			_ = c.Close()
		})
	}
}

// A server that stalls, or refuses writes for a while, breaks no read.
//
//fault:short-freeze
//fault:long-freeze
func TestServer_Stalls(t *testing.T) {
	for _, fault := range []struct {
		name  string
		reads bool // are answered during the fault
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
					t.Error("the server has not slept")
				}
			}
		}},
		{"paused", false, func(t *testing.T, s *redistest.Server) func() {
			redistest.Do(t, s.Admin(), "client", "pause", 800, "all") // UNPAUSE would wait, too
			return func() { redistest.Do(t, s.Client(t), "ping") }
		}},
		{"writes paused", true, func(t *testing.T, s *redistest.Server) func() {
			redistest.Do(t, s.Admin(), "client", "pause", 600_000, "write")
			return func() { redistest.Do(t, s.Admin(), "client", "unpause") }
		}},
		{"cannot save", true, func(t *testing.T, s *redistest.Server) func() { return redistest.FailSaves(t, s) }},
	} {
		t.Run(fault.name, func(t *testing.T) {
			t.Parallel()
			s := redistest.Start(t)
			c := cachetest.New(t, s.Client(t), redistest.Namespace(t), cachetest.Impatient)
			c.AwaitCached("kept")
			end := fault.begin(t, s)
			var slowest time.Duration
			redistest.Await(t, "the cache has noticed", func() bool {
				begun := time.Now()
				c.MustLoad(fmt.Sprint("k", c.Loads.Load()))
				slowest = max(slowest, time.Since(begun))
				return c.Log.ErrorCount() > 0
			})
			// A stall of the machine may make a read fail, but must not lose the value.
			awaitKept := func() {
				redistest.Await(t, "a hit", func() bool {
					v, err := c.Get(t.Context(), "kept")
					return v == "value of kept" && err == nil
				})
			}
			if fault.reads {
				awaitKept()
			} else {
				c.MustLoad("kept")
			}
			if err := c.Set(t.Context(), "k", "v"); err == nil && fault.name != "asleep for a second" {
				t.Error("Set = nil")
			}
			t.Logf("the slowest call took %v; RedisTimeout is %v", slowest.Round(time.Millisecond), cachetest.Impatient)
			end()
			c.WantErrors()
			c.AwaitRecovery()
			awaitKept()
		})
	}
}

// A FLUSHALL during a load costs the entry and nothing else.
//
//fault:flushall
func TestServer_FlushedDuringLoad(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	c := cachetest.New(t, s.Client(t), redistest.Namespace(t), cachetest.Patient)
	c.During = func(key string) {
		if !strings.HasPrefix(held(s, c, key), "H") {
			t.Error("the lock is not held during the load")
		}
		if err := s.Admin().FlushAll(context.Background()).Err(); err != nil {
			t.Error(err)
		}
	}
	c.MustLoad("k")
	c.During = nil
	c.WantLoads(1)
	c.WantNoErrors()
	c.WantStat("Fenced", 1)
	c.WantStat("Stored", 0)
	c.WantMiss("k")
	if n := s.Admin().DBSize(t.Context()).Val(); n != 0 {
		t.Errorf("%d keys exist", n)
	}
	c.MustLoad("k")
	c.WantHit("k")
	c.WantLoads(2)
}

// A FLUSHALL of a warm cache costs one load of each key, MaxLoads at a time in each process.
//
//fault:everything-cold
func TestServer_FlushedWhenWarm(t *testing.T) {
	t.Parallel()
	const keys, maxLoads = 1000, 2
	s := redistest.Start(t)
	a, b := newPair(t, s.Client(t), s.Client(t), cachetest.Patient,
		func(o *singlefill.Options[string]) { o.MaxLoads = maxLoads })
	readAll := func(callers int) { // of each process
		var wg sync.WaitGroup
		for _, c := range []*cachetest.Cache{a, b} {
			for g := range callers {
				wg.Go(func() {
					for i := 0; i < keys && !t.Failed(); i++ {
						c.WantValue(fmt.Sprint("k", (i+g*31)%keys))
					}
				})
			}
		}
		wg.Wait()
	}
	readAll(1)
	a.WantLoads(keys)
	a.During = func(string) { time.Sleep(time.Millisecond) } // the source is at its limit
	redistest.Must(t, s.Admin().FlushAll(t.Context()).Err())
	if n := s.Admin().DBSize(t.Context()).Val(); n != 0 {
		t.Errorf("%d keys are left", n)
	}
	begun := time.Now()
	readAll(4)
	t.Logf("%d keys were back after %v, with %d loads at a time in two processes", keys,
		time.Since(begun).Round(time.Millisecond), a.Most.Load())
	a.WantLoads(2 * keys)
	if most := a.Most.Load(); most > 2*maxLoads {
		t.Errorf("%d loads at a time, MaxLoads is %d in each of two processes", most, maxLoads)
	}
	readAll(1)
	a.WantLoads(2 * keys)
	wantNoErrors(a, b)
}

// A healthy Redis is not taken for a dead one when many more keys are cold than the client has
// connections. The commands need more time than RedisTimeout, even if each is answered at once.
//
//fault:many-commands
func TestClient_ManyColdKeys(t *testing.T) {
	t.Parallel()
	const keys, connections, redisTimeout = 1000, 10, 2 * time.Second
	const each = redisTimeout * connections / keys // of the reads alone
	s := redistest.Start(t)
	few := func(o *redis.Options) {
		o.PoolSize = connections
		redistest.Distant(each)(o)
	}
	a, b := newPair(t, s.Client(t, few), s.Client(t, few), redisTimeout)
	var loaded sync.Map
	a.During = func(key string) {
		if _, again := loaded.LoadOrStore(key, true); again {
			t.Errorf("%s is loaded again", key)
		}
		time.Sleep(10 * time.Millisecond)
	}
	var wg sync.WaitGroup
	for _, c := range []*cachetest.Cache{a, b} {
		for i := range keys {
			wg.Go(func() { c.WantValue(fmt.Sprint("k", i)) })
		}
	}
	redistest.Await(t, "commands wait to be sent", func() bool { return a.Stats().CommandsQueued > 0 })
	wg.Wait()
	a.WantLoads(keys)
	for _, c := range []*cachetest.Cache{a, b} {
		c.WantNoErrors()
		if n := c.Stats(); n.LoadsUnlocked != 0 || n.BreakerOpens != 0 {
			t.Errorf("Stats are %+v", n)
		}
	}
}

// SCRIPT FLUSH is invisible to callers.
//
//fault:script-flush
func TestServer_ForgetsScripts(t *testing.T) {
	t.Parallel()
	const keys = 100
	s := redistest.Start(t)
	a, b := newPair(t, s.Client(t), s.Client(t), cachetest.Patient)
	flush := func() {
		if err := s.Admin().ScriptFlush(context.Background()).Err(); err != nil {
			t.Error(err)
		}
	}
	a.During = func(string) { flush() } // and at any other moment
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
				flush()
			}
		}
	}()
	for i := range keys {
		var wg sync.WaitGroup
		for _, c := range []*cachetest.Cache{a, b} {
			for range 5 {
				wg.Go(func() { c.MustLoad(fmt.Sprint("k", i)) })
			}
		}
		wg.Wait()
	}
	close(stop)
	<-stopped
	if s.Calls("script|flush") < 2*keys || s.Calls("eval") == 0 {
		t.Errorf("the fault has not come about: %v", s.AllCalls())
	}
	a.WantLoads(keys)
	wantNoErrors(a, b)
	redistest.WantTTLs(t, s.Admin())
}

// Evictions cost loads and nothing else. The memory is enough for a tenth of the keys, so entries
// and locks of running loads may go at any time.
//
//fault:eviction
func TestServer_EvictsKeys(t *testing.T) {
	t.Parallel()
	const keys = 300
	s := redistest.Start(t, "--maxmemory-policy", "allkeys-random", "--maxmemory-samples", "1")
	large := strings.Repeat("x", 4096)
	a, b := newPair(t, s.Client(t), s.Client(t), cachetest.Patient)
	redistest.Do(t, s.Admin(), "config", "set", "maxmemory", info(t, s, "memory", "used_memory")+1_000_000)
	var wg sync.WaitGroup
	for _, c := range []*cachetest.Cache{a, b} {
		for g := range 4 {
			wg.Go(func() {
				for i := range 500 {
					key := fmt.Sprint("k", (i*7+g*13)%keys)
					v, err := c.GetOrLoad(context.Background(), key, func(_ context.Context, key string) (string, error) {
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
	n := info(t, s, "stats", "evicted_keys")
	if n < 100 {
		t.Errorf("%d keys were evicted", n)
	}
	for _, c := range []*cachetest.Cache{a, b} {
		stats := c.Stats()
		if stats.LoadsUnlocked != 0 || stats.RedisErrors != 0 || stats.BreakerOpens != 0 {
			t.Errorf("Stats are %+v", stats)
		}
		t.Logf("%d keys evicted, %d loads, %d of them refused at the store", n, stats.Loads, stats.Fenced)
	}
}

// A key that another program deletes or overwrites during its load keeps no caller from the value.
//
//fault:foreign-key
func TestServer_KeyOverwrittenDuringLoad(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	redistest.Planted(t, "{")
	for _, which := range []string{"value", "lock"} {
		for what, put := range map[string][]any{
			"deleted": nil, "a text": {"set", "some text"}, "a list": {"rpush", "x"}, "a hash": {"hset", "x", "y"},
			"an entry": {"set", foreignEntry(t)}, "a foreign lock": {"set", "H" + strings.Repeat("x", 42)},
		} {
			t.Run(which+" becomes "+what, func(t *testing.T) {
				a, b := newPair(t, s.Client(t), s.Client(t), cachetest.Patient)
				key := a.ValueKey("k")
				if which == "lock" {
					key = a.LockKey("k")
				}
				var wg sync.WaitGroup
				a.During = func(string) {
					a.During = nil
					goWait(t, &wg, b, s, "k")
					_, err := s.Admin().TxPipelined(t.Context(), func(p redis.Pipeliner) error { // one step
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
				a.MustLoad("k")
				wg.Wait()
				b.MustLoad("k")
				a.AwaitLoads()
				b.AwaitLoads()
				a.WantHit("k")
				b.WantHit("k")
				if n := a.Loads.Load(); n > 2 {
					t.Errorf("%d loads", n)
				}
				if ttl := s.Admin().PTTL(t.Context(), a.ValueKey("k")).Val(); ttl <= 0 {
					t.Errorf("the value has a TTL of %v", ttl)
				}
				wantNoErrors(a, b)
			})
		}
	}
}

// foreignEntry returns an entry that is well formed, with a payload that is no value of the cache.
func foreignEntry(t testing.TB) string {
	t.Helper()
	data, err := entry.Entry{FreshUntil: time.Now().Add(time.Hour), Payload: []byte("x")}.Encode()
	redistest.Must(t, err)
	return string(data)
}

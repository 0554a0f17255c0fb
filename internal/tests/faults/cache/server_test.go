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

// A call gets its value although the server dies in the middle of it. Only the entry is lost.
//
//fault:crash-in-call
//fault:flushall
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

// A healthy Redis is not taken for a dead one when many more keys are cold than the client has
// connections. The commands need more time than RedisTimeout, even if each is answered at once. Each key
// is loaded once, MaxLoads at a time in each process.
//
//fault:many-commands
//fault:everything-cold
//fault:slow-network
func TestClient_ManyColdKeys(t *testing.T) {
	t.Parallel()
	const keys, maxLoads, connections, redisTimeout = 1000, 20, 10, 2 * time.Second
	const each = redisTimeout * connections / keys // of the reads alone
	s := redistest.Start(t)
	p := redistest.NewProxy(t, s.Addr)
	p.Delay(each)
	few := func(o *redis.Options) { o.PoolSize = connections }
	a, b := newPair(t, p.Client(t, few), p.Client(t, few), redisTimeout,
		func(o *singlefill.Options[string]) { o.MaxLoads = maxLoads })
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
	if most := a.Most.Load(); most > 2*maxLoads {
		t.Errorf("%d loads at a time, MaxLoads is %d in each of two processes", most, maxLoads)
	}
	b.WantHit("k0")
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
	flushes, stop := s.FlushScripts()
	a.During = func(string) { // at least one in each load, and others at any moment
		before := flushes.Load()
		redistest.Await(t, "the scripts are gone", func() bool { return flushes.Load() > before })
	}
	for i := range keys {
		var wg sync.WaitGroup
		for _, c := range []*cachetest.Cache{a, b} {
			for range 5 {
				wg.Go(func() { c.MustLoad(fmt.Sprint("k", i)) })
			}
		}
		wg.Wait()
	}
	stop()
	if s.Calls("eval") == 0 {
		t.Errorf("the fault has not come about: %v", s.AllCalls())
	}
	a.WantLoads(keys)
	wantNoErrors(a, b)
}

// A key that is evicted during its load, or that another program deletes or overwrites, keeps no caller from the
// value.
//
//fault:foreign-key
//fault:eviction
func TestServer_KeyOverwrittenDuringLoad(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	redistest.Planted(t, "{")
	foreign, err := entry.Entry{FreshUntil: time.Now().Add(time.Hour), Payload: []byte("x")}.Encode() // no value
	redistest.Must(t, err)
	for _, which := range []string{"value", "lock"} {
		for what, put := range map[string][]any{
			"deleted": nil, "a text": {"set", "some text"}, "a list": {"rpush", "x"}, "a hash": {"hset", "x", "y"},
			"an entry": {"set", foreign}, "a foreign lock": {"set", "H" + strings.Repeat("x", 42)},
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

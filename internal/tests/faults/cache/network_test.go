package cache_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// A Redis that does not answer breaks no read, and is used again when it is back.
//
//fault:unreachable
func TestGetOrLoad_UnreachableRedis(t *testing.T) {
	for _, fault := range []struct {
		name       string
		begin, end func(s *redistest.Server, p *redistest.Proxy)
	}{
		{"refused",
			func(_ *redistest.Server, p *redistest.Proxy) { p.Refuse(true); p.Cut() },
			func(_ *redistest.Server, p *redistest.Proxy) { p.Refuse(false) }},
		{"black hole",
			func(_ *redistest.Server, p *redistest.Proxy) { p.BlackHole(true) },
			func(_ *redistest.Server, p *redistest.Proxy) { p.BlackHole(false) }},
		{"frozen",
			func(s *redistest.Server, _ *redistest.Proxy) { s.Freeze() },
			func(s *redistest.Server, _ *redistest.Proxy) { s.Thaw() }},
		{"killed",
			func(s *redistest.Server, _ *redistest.Proxy) { s.Kill() },
			func(s *redistest.Server, _ *redistest.Proxy) { s.Restart() }},
	} {
		for _, used := range []string{"from the start", "after use"} {
			t.Run(fault.name+" "+used, func(t *testing.T) {
				t.Parallel()
				s := redistest.Start(t)
				p := redistest.NewProxy(t, s.Addr)
				c := cachetest.New(t, p.Client(t), redistest.Namespace(t), cachetest.Impatient)
				if used == "after use" {
					c.AwaitCached("k")
				}
				fault.begin(s, p)
				c.AwaitLoads()
				c.Loads.Store(0)
				unlocked := c.Stats().LoadsUnlocked

				calls := int64(0)
				redistest.Await(t, "the breaker is open", func() bool {
					calls++
					c.MustLoad("k")
					return c.Stats().BreakerOpen
				})
				for range 50 {
					calls++
					c.MustLoad("k")
				}
				c.WantLoads(calls)
				if _, err := c.Get(t.Context(), "k"); err == nil || errors.Is(err, singlefill.ErrMiss) {
					t.Errorf("Get = %v, want an error of Redis", err)
				}
				c.WantErrors()
				c.AwaitLoads()
				if n := c.Stats().LoadsUnlocked - unlocked; n != calls || !c.LastLoad().Unlocked {
					t.Errorf("%d of %d loads were unlocked, the last one is %+v", n, calls, c.LastLoad())
				}

				fault.end(s, p)
				c.AwaitRecovery()
				if got := c.Log.Breaker(); !slices.Equal(got[:2], []bool{true, false}) || c.Stats().BreakerOpens < 1 {
					t.Errorf("Trace.BreakerChanged reported %v, Stats are %+v", got, c.Stats())
				}
				redistest.WantTTLs(t, s.Admin())
			})
		}
	}
}

// A silent Redis costs a call RedisTimeout, and nothing once the breaker is open.
//
//fault:unreachable
func TestBreaker_SilentRedis(t *testing.T) {
	t.Parallel()
	const loadTime = 70 * time.Millisecond
	for _, used := range []bool{false, true} {
		t.Run(fmt.Sprintf("connected before=%t", used), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				link, rdb := redistest.StartMiniLink(t)
				c := cachetest.New(t, rdb, "ns", cachetest.Impatient)
				if used {
					c.MustLoad("before")
					c.WantHit("before")
				}
				c.During = func(string) { time.Sleep(loadTime) }
				link.BlackHole(true)
				call := func(key string) time.Duration {
					begun := time.Now()
					c.MustLoad(key)
					return time.Since(begun)
				}
				calls := 0
				for !c.Stats().BreakerOpen {
					if took := call("k"); took != cachetest.Impatient+loadTime {
						t.Fatalf("call %d took %v, want RedisTimeout and the time of the load", calls, took)
					}
					if calls++; calls > 10 {
						t.Fatal("the breaker does not open")
					}
				}
				c.AwaitLoads()
				synctest.Wait()
				commands, probes := link.Sent()
				for range 100 {
					if took := call("k"); took != loadTime {
						t.Fatalf("with the breaker open, a call took %v, want the time of the load", took)
					}
				}
				commandsAfter, probesAfter := link.Sent()
				if commandsAfter != commands {
					t.Errorf("%d commands were sent while the breaker was open", commandsAfter-commands)
				}
				if probesAfter == probes {
					t.Error("no PING was sent while the breaker was open")
				}
				begun := time.Now()
				if err := c.Delete(t.Context(), "k"); err == nil || time.Since(begun) > cachetest.Impatient {
					t.Errorf("Delete = %v after %v", err, time.Since(begun))
				}

				link.BlackHole(false)
				time.Sleep(2 * cachetest.Impatient) // two probes; no call is needed
				if s := c.Stats(); s.BreakerOpen || s.BreakerOpens != 1 {
					t.Fatalf("two probes after Redis was back: %+v", s)
				}
				c.MustLoad("k")
				c.WantHit("k")
			})
		})
	}
}

// A silence at any step costs one RedisTimeout, which the read and the lock share.
//
//fault:silence
func TestGetOrLoad_SilenceAtAnyStep(t *testing.T) {
	t.Parallel()
	for _, silentAt := range []string{"get", "evalsha", "store"} {
		t.Run(silentAt, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				link, rdb := redistest.StartMiniLink(t)
				c := cachetest.New(t, rdb, "ns", cachetest.Impatient)
				c.MustLoad("before") // the server knows the scripts from here on
				if silentAt == "store" {
					c.During = func(string) { link.BlackHoleAt("evalsha") }
				} else {
					link.BlackHoleAt(silentAt)
				}
				begun := time.Now()
				c.MustLoad("k")
				if took := time.Since(begun); took != cachetest.Impatient {
					t.Errorf("took %v, want %v", took, cachetest.Impatient)
				}
				if !link.Swallows() {
					t.Error("the fault has not come about")
				}
				c.WantErrors()
				if unlocked := c.LastLoad().Unlocked; unlocked != (silentAt != "store") {
					t.Errorf("LoadInfo.Unlocked = %t", unlocked)
				}
			})
		})
	}
}

// A slow Redis is used like a fast one.
//
//fault:slow-network
func TestGetOrLoad_SlowRedis(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	p := redistest.NewProxy(t, s.Addr)
	p.Delay(40 * time.Millisecond)
	a, b := newPair(t, p.Client(t), p.Client(t), cachetest.Patient)
	loading, goOn := make(chan struct{}), make(chan struct{})
	a.During = func(string) { close(loading); <-goOn }
	var wg sync.WaitGroup
	wg.Go(func() { a.MustLoad("k") })
	<-loading
	wg.Go(func() { b.MustLoad("k") })
	close(goOn)
	wg.Wait()
	a.WantHit("k")
	a.WantLoads(1)
	a.WantNoErrors()
	b.WantNoErrors()
	if p.Commands() == 0 {
		t.Error("no command went through the proxy")
	}
}

// Replies that arrive byte by byte are replies.
//
//fault:crumbs
func TestGetOrLoad_TricklingReplies(t *testing.T) {
	for _, protocol := range []int{2, 3} {
		t.Run(fmt.Sprint("resp", protocol), func(t *testing.T) {
			t.Parallel()
			s := redistest.Start(t)
			p := redistest.NewProxy(t, s.Addr)
			p.Trickle(1, 100*time.Microsecond)
			as := func(o *redis.Options) { o.Protocol = protocol }
			a, b := newPair(t, p.Client(t, as), p.Client(t, as), cachetest.Patient)
			loading, goOn := make(chan struct{}), make(chan struct{})
			a.During = func(string) { close(loading); <-goOn }
			var wg sync.WaitGroup
			wg.Go(func() { a.MustLoad("k") })
			<-loading
			goWait(t, &wg, b, s, "k")
			close(goOn)
			wg.Wait()
			a.During = nil
			b.WantHit("k")
			if err := b.Set(t.Context(), "k", "value of k"); err != nil {
				t.Error(err)
			}
			if err := a.Expire(t.Context(), "k"); err != nil {
				t.Error(err)
			}
			if err := a.Delete(t.Context(), "k"); err != nil {
				t.Error(err)
			}
			b.WantMiss("k")
			a.WantLoads(1)
			a.WantNoErrors()
			b.WantNoErrors()
			if n := p.Counts().Sliced; n < 10 {
				t.Errorf("%d replies arrived byte by byte", n)
			}
		})
	}
}

// A Redis that executes everything and whose replies are lost breaks no read.
//
//fault:one-way
func TestBreaker_LostReplies(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	p := redistest.NewProxy(t, s.Addr)
	c := cachetest.New(t, p.Client(t, redistest.NoRetry), redistest.Namespace(t), cachetest.Impatient)
	c.AwaitCached("kept")
	// HELLO is answered, since the client sends no commands before.
	rule := p.On(func(cmd []string) bool { return !strings.EqualFold(cmd[0], "HELLO") }, redistest.MuteReply)
	begun := time.Now()
	calls := 0
	redistest.Await(t, "the breaker is open", func() bool {
		calls++
		c.MustLoad(fmt.Sprint("k", calls))
		return c.Stats().BreakerOpen
	})
	t.Logf("the breaker was open after %d calls and %v; RedisTimeout is %v", calls,
		time.Since(begun).Round(time.Millisecond), cachetest.Impatient)
	if rule.Fired() == 0 {
		t.Error("no reply was lost")
	}
	c.WantErrors()
	rule.Times(0)
	c.AwaitRecovery()
}

// A flapping server never leaves the breaker stuck, and each change of the breaker is reported.
//
//fault:flapping
func TestBreaker_FlappingServer(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	p := redistest.NewProxy(t, s.Addr)
	quick := func(o *redis.Options) { o.MaxRetries, o.DialerRetries, o.PoolSize = -1, 1, 200 }
	// A lock whose command was cut off can only expire, so LockTTL is short.
	c := cachetest.New(t, p.Client(t, quick), redistest.Namespace(t), 50*time.Millisecond, lockTTL(200*time.Millisecond))
	var stop atomic.Bool
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := 0; !stop.Load(); i++ {
				c.MustLoad(fmt.Sprintf("k%d-%d", g, i%50))
			}
		})
	}
	defer wg.Wait()
	defer stop.Store(true)
	const times = 10
	for range times {
		before := c.Stats().BreakerOpens
		p.Refuse(true)
		redistest.Await(t, "the breaker opens", func() bool {
			p.Cut() // a connection may have been accepted after the last Cut
			return c.Stats().BreakerOpens > before
		})
		p.Refuse(false)
		redistest.Await(t, "the breaker closes", func() bool { return !c.Stats().BreakerOpen })
	}
	stop.Store(true)
	wg.Wait()
	c.AwaitRecovery()
	redistest.Await(t, "the last change of the breaker is reported", func() bool { return len(c.Log.Breaker())%2 == 0 })
	reported := c.Log.Breaker()
	for i, open := range reported {
		if open != (i%2 == 0) {
			t.Fatalf("Trace.BreakerChanged reported %v", reported)
		}
	}
	if n := c.Stats().BreakerOpens; n < times || len(reported) != int(2*n) {
		t.Errorf("the breaker has opened %d times, Trace.BreakerChanged reported %d changes", n, len(reported))
	}
}

// Callers get their values while the server closes all connections again and again.
//
//fault:killed-connections
func TestGetOrLoad_KilledConnections(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	a, b := newPair(t, s.Client(t), s.Client(t), 500*time.Millisecond)
	a.During = func(string) { time.Sleep(time.Millisecond) }
	stop := make(chan struct{})
	var kills atomic.Int64
	var killer, callers sync.WaitGroup
	killer.Go(func() {
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				n, _ := s.Admin().ClientKillByFilter(context.Background(), "type", "normal", "skipme", "yes").Result()
				kills.Add(n)
			}
		}
	})
	var mu sync.Mutex
	var slowest time.Duration
	for _, c := range []*cachetest.Cache{a, b} {
		for g := range 8 {
			callers.Go(func() {
				for n := 0; kills.Load() < 100; n++ {
					begun := time.Now()
					c.MustLoad(fmt.Sprintf("k%d", n%500))
					if n%50 == 49 {
						_ = c.Delete(context.Background(), fmt.Sprintf("k%d", (n+g)%500))
					}
					mu.Lock()
					slowest = max(slowest, time.Since(begun))
					mu.Unlock()
				}
			})
		}
	}
	callers.Wait()
	close(stop)
	killer.Wait()
	t.Logf("%d connections killed; the slowest call took %v; %d of %d loads without the lock", kills.Load(),
		slowest.Round(time.Millisecond), a.Stats().LoadsUnlocked+b.Stats().LoadsUnlocked, a.Loads.Load())
	if slices.Contains(a.Log.Breaker(), true) {
		t.Log("the breaker has opened")
	}
	a.AwaitRecovery()
	b.AwaitRecovery()
	before := a.Loads.Load()
	for i := range 500 {
		key := fmt.Sprintf("after%d", i)
		a.MustLoad(key)
		b.MustLoad(key)
	}
	a.WantLoads(before + 500)
}

// A holder that a partition cuts off is replaced after LockTTL, and its store is refused
// afterwards. The time is that of a bubble, so the bounds are exact.
//
//fault:isolated-holder
func TestGetOrLoad_IsolatedHolder(t *testing.T) {
	t.Parallel()
	const ttl = 3 * time.Second
	// The store is sent within the partition, or after it.
	for _, cut := range []time.Duration{3 * ttl, 3*ttl + ttl/2} {
		t.Run(fmt.Sprint(cut), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				link, far := redistest.StartMiniLink(t)
				a := cachetest.New(t, far, "ns", cachetest.Impatient, lockTTL(ttl))
				b := cachetest.New(t, redistest.NewMiniClient(t, link.Mini), "ns", cachetest.Impatient, lockTTL(ttl))
				b.MustLoad("before")
				var versions atomic.Int64
				load := func(takes time.Duration) singlefill.Loader[string] {
					return func(context.Context, string) (string, error) {
						v := fmt.Sprint("v", versions.Add(1))
						time.Sleep(takes)
						return v, nil
					}
				}
				get := func(c *cachetest.Cache, takes time.Duration, want string) {
					if v, err := c.GetOrLoad(context.Background(), "k", load(takes)); v != want || err != nil {
						t.Errorf("GetOrLoad = %q, %v, want %s", v, err, want)
					}
				}
				var wg sync.WaitGroup
				wg.Go(func() { get(a, 3*ttl+ttl/4, "v1") })
				time.Sleep(time.Millisecond)
				link.BlackHole(true)
				begun := time.Now()
				get(b, 0, "v2")
				took := time.Since(begun)
				t.Logf("replaced after %v, LockTTL is %v", took, ttl)
				if took < ttl-10*time.Millisecond || took > ttl+10*time.Millisecond {
					t.Errorf("another process has loaded it after %v, want LockTTL (%v) and one poll", took, ttl)
				}
				time.Sleep(cut - time.Since(begun))
				if commands, probes := link.Sent(); commands+probes == 0 || !link.Swallows() {
					t.Error("nothing was lost")
				}
				link.BlackHole(false)
				wg.Wait()
				time.Sleep(2 * ttl)
				if v, err := b.Get(t.Context(), "k"); v != "v2" || err != nil {
					t.Errorf("Redis has %q, %v, want v2", v, err)
				}
				if v, err := a.Get(t.Context(), "k"); v != "v2" || err != nil {
					t.Errorf("the first process gets %q, %v, want v2", v, err)
				}
				if s := a.Stats(); s.Stored != 0 || s.Loads != 1 {
					t.Errorf("Stats of the first process are %+v", s)
				}
			})
		})
	}
}

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

// outages are what keeps a cache behind a proxy from its Redis.
var outages = map[string]func(s *redistest.Server, p *redistest.Proxy) (end func()){
	"refused": func(_ *redistest.Server, p *redistest.Proxy) func() {
		p.Refuse(true)
		p.Cut()
		return func() { p.Refuse(false) }
	},
	"black hole": func(_ *redistest.Server, p *redistest.Proxy) func() {
		p.BlackHole(true)
		return func() { p.BlackHole(false) }
	},
	"frozen": func(s *redistest.Server, _ *redistest.Proxy) func() { s.Freeze(); return s.Thaw },
	"killed": func(s *redistest.Server, _ *redistest.Proxy) func() { s.Kill(); return s.Restart },
	"replies lost": func(_ *redistest.Server, p *redistest.Proxy) func() {
		// HELLO is answered, since the client sends no commands before.
		rule := p.On(func(cmd []string) bool { return !strings.EqualFold(cmd[0], "HELLO") }, redistest.MuteReply)
		return func() { rule.Times(0) }
	},
}

// A Redis that does not answer, or whose replies are lost, breaks no read, and is used again when it is
// back.
//
//fault:unreachable
//fault:one-way
//fault:short-freeze
func TestGetOrLoad_UnreachableRedis(t *testing.T) {
	for name, begin := range outages {
		for _, used := range []string{"from the start", "after use"} {
			t.Run(name+" "+used, func(t *testing.T) {
				s, p := start(t)
				rdb := p.Client(t, func(o *redis.Options) { o.ContextTimeoutEnabled = used == "after use" })
				c := cachetest.New(t, rdb, redistest.Namespace(t), cachetest.Impatient)
				if used == "after use" {
					c.AwaitCached("k")
				}
				end := begin(s, p)
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

				end()
				c.AwaitRecovery()
				if got := c.Log.Breaker(); !slices.Equal(got[:2], []bool{true, false}) || c.Stats().BreakerOpens < 1 {
					t.Errorf("Trace.BreakerChanged reported %v, Stats are %+v", got, c.Stats())
				}
			})
		}
	}
}

// A holder that a partition cuts off is replaced after LockTTL, and its store is refused
// afterwards. The time is fake, so the bounds are exact.
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
				for _, c := range []*cachetest.Cache{a, b} {
					cachetest.WantGet(t, c.Cache, "k", "v2", nil)
				}
				if s := a.Stats(); s.Stored != 0 || s.Loads != 1 {
					t.Errorf("Stats of the first process are %+v", s)
				}
			})
		})
	}
}

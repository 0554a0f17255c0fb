package cache_test

import (
	"context"
	"errors"
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

// newRefresh returns a cache of rdb. Through admin it stores an old value of k that a read
// refreshes.
func newRefresh(t testing.TB, rdb, admin redis.UniversalClient, kind string,
	redisTimeout time.Duration) *cachetest.Cache {
	t.Helper()
	c := cachetest.New(t, rdb, redistest.Namespace(t), redisTimeout, func(o *singlefill.Options[string]) {
		o.Codec, o.Jitter, o.StaleWhileRevalidate, o.RetryAfter = singlefill.Raw, -1, time.Hour, time.Hour
	})
	cachetest.PutEntry(t, admin, c.Namespace, "k", cachetest.RefreshKinds[kind]("old"), time.Hour)
	return c
}

// wantOld fails the test unless GetOrLoad returns the old value of k.
func wantOld(t testing.TB, c *cachetest.Cache) {
	t.Helper()
	if v, err := c.GetOrLoad(context.Background(), "k", c.Load); v != "old" || err != nil {
		t.Errorf("GetOrLoad = %q, %v; want the old value", v, err)
	}
}

// Calls get their values although Redis dies during a refresh.
//
//fault:crash-in-call
func TestRefresh_RedisDies(t *testing.T) {
	t.Parallel()
	for kind := range cachetest.RefreshKinds {
		for name, fault := range map[string]struct {
			begin, end func(s *redistest.Server, p *redistest.Proxy)
		}{
			"killed": {
				func(s *redistest.Server, _ *redistest.Proxy) { s.Kill() },
				func(s *redistest.Server, _ *redistest.Proxy) { s.Restart() }},
			"cut off": {
				func(_ *redistest.Server, p *redistest.Proxy) { p.Refuse(true); p.Cut() },
				func(_ *redistest.Server, p *redistest.Proxy) { p.Refuse(false) }},
			"black hole": {
				func(_ *redistest.Server, p *redistest.Proxy) { p.BlackHole(true) },
				func(_ *redistest.Server, p *redistest.Proxy) { p.BlackHole(false) }},
		} {
			t.Run(kind+", "+name, func(t *testing.T) {
				s, p := start(t)
				rdb := p.Client(t, func(o *redis.Options) { o.MaxRetries, o.DialerRetries = -1, 1 })
				c := newRefresh(t, rdb, s.Admin(), kind, stallTimeout)
				loading, goOn := make(chan struct{}), make(chan struct{})
				var first sync.Once
				c.During = func(string) { first.Do(func() { close(loading) }); <-goOn }
				wantOld(t, c)
				<-loading
				fault.begin(s, p)
				const herd = 20
				var callers sync.WaitGroup
				var joined atomic.Int64
				for range herd {
					callers.Go(func() {
						ctx := redistest.OnDone(context.Background(), func() { joined.Add(1) })
						v, err := c.GetOrLoad(ctx, "k", c.Load)
						if v != "value of k" || err != nil {
							t.Errorf("GetOrLoad = %q, %v", v, err)
						}
					})
				}
				redistest.Await(t, "all callers wait", func() bool { return joined.Load() == herd })
				redistest.Await(t, "reads have failed", func() bool { return c.Log.HasError("get", "") })
				close(goOn)
				callers.Wait()
				c.During = nil
				c.MustLoad("k")
				if most := c.Most.Load(); most != 1 {
					t.Errorf("%d loads of one key at a time", most)
				}
				c.WantErrors()
				fault.end(s, p)
				c.AwaitRecovery()
				_ = c.Close()
				redistest.Await(t, "no connection is in use", func() bool {
					n := rdb.PoolStats()
					return n.TotalConns == n.IdleConns
				})
				redistest.WantTTLs(t, s.Admin())
			})
		}
	}
}

// A refresh one of whose commands or replies is lost is repeated or done, and no lock is left
// behind.
//
//fault:lost-request
func TestRefresh_LostReply(t *testing.T) {
	t.Parallel()
	for _, act := range []string{"get_or_lock", "store", "release"} {
		for fault, action := range map[string]redistest.Action{
			"reply lost": redistest.DropReply, "command lost": redistest.CloseBefore, "silence": redistest.MuteReply,
		} {
			for client, configure := range retries {
				t.Run(act+", "+fault+", "+client, func(t *testing.T) {
					s, p := newWarm(t)
					rule := p.On(cachetest.Script(t, act), action).Times(1)
					c := newRefresh(t, p.Client(t, configure), s.Admin(), "stale", 600*time.Millisecond)
					load := c.Load
					if act == "release" {
						load = func(context.Context, string) (string, error) { return "", errors.New("boom") }
					}
					if v, err := c.GetOrLoad(t.Context(), "k", load); v != "old" || err != nil {
						t.Errorf("GetOrLoad = %q, %v; want the old value", v, err)
					}
					awaitHit(t, rule)
					switch {
					case act == "release": // no process loads until RetryAfter
						redistest.Await(t, "the failure is recorded", func() bool { return strings.HasPrefix(held(s, c, "k"), "F") })
						wantOld(t, c)
						_ = c.Close()
						c.WantLoads(0)
					case action == redistest.MuteReply: // the lock's RedisTimeout may be over, which ends the refresh
						redistest.Await(t, "the lock is free", func() bool { return !strings.HasPrefix(held(s, c, "k"), "H") })
						_ = c.Close()
					default:
						redistest.Await(t, "the new value is stored", func() bool {
							v, err := c.Get(t.Context(), "k")
							return err == nil && v == "value of k"
						})
						_ = c.Close()
						c.WantLoads(1)
						if info := c.LastLoad(); !info.Stored || info.Fenced || !info.Refresh {
							t.Errorf("Trace.LoadDone reported %+v", info)
						}
						if strings.HasPrefix(held(s, c, "k"), "H") {
							t.Error("the lock is left behind")
						}
					}
					if most := c.Most.Load(); most > 1 {
						t.Errorf("%d loads at a time", most)
					}
					if client != "client retries" {
						c.WantErrors()
					}
					redistest.WantTTLs(t, s.Admin())
				})
			}
		}
	}
}

// A refresh that Redis refuses is tried once in RetryAfter, and readers get the old value. The breaker stays
// closed.
//
//fault:replica
//fault:missing-right
func TestRefused_Refresh(t *testing.T) {
	t.Parallel()
	start := func(t *testing.T) (*redistest.Server, *redis.Client) {
		s := redistest.Start(t)
		return s, s.Client(t)
	}
	startUser := func(rules ...string) func(t *testing.T) (*redistest.Server, *redis.Client) {
		return func(t *testing.T) (*redistest.Server, *redis.Client) {
			s := redistest.Start(t)
			return s, s.Client(t, s.User(t, append([]string{"~*", "&*", "+@all"}, rules...)...))
		}
	}
	startReplica := func(t *testing.T) (*redistest.Server, *redis.Client) {
		master := redistest.Start(t)
		return master, redistest.StartReplica(t, master).Client(t)
	}
	for _, refusal := range []struct {
		name  string
		says  []string // as some server says it; nil: the library does without what is refused
		start func(t *testing.T) (writable *redistest.Server, rdb *redis.Client)
	}{
		{"out of memory", []string{"OOM"}, start},
		{"read-only replica", []string{"read only"}, startReplica},
		{"no scripts", nil, startUser("-@scripting")},
		{"no scripts, no transactions", []string{"NOPERM"}, startUser("-@scripting", "-watch")},
		{"no writes", []string{"can't run", "ACL failure in script"}, startUser("-@write", "+get")},
	} {
		for kind := range cachetest.RefreshKinds {
			t.Run(refusal.name+", "+kind, func(t *testing.T) {
				t.Parallel()
				s, rdb := refusal.start(t)
				c := newRefresh(t, rdb, s.Admin(), kind, cachetest.Patient)
				redistest.Await(t, "the client sees the entry", func() bool { return redistest.Exists(t, rdb, c.ValueKey("k")) })
				if refusal.name == "out of memory" {
					redistest.Do(t, s.Admin(), "config", "set", "maxmemory", "1")
				}
				wantOld(t, c)
				if refusal.says == nil {
					redistest.Await(t, "the new value is stored", func() bool {
						v, err := c.Get(t.Context(), "k")
						return err == nil && v == "value of k"
					})
					c.WantLoads(1)
					c.WantNoErrors()
					return
				}
				redistest.Await(t, "the refusal is reported", func() bool { return c.Log.HasError("lock", refusal.says...) })
				for range 300 {
					wantOld(t, c)
				}
				_ = c.Close()
				c.WantLoads(0)
				if n := c.Stats().RedisErrors; n != 1 {
					t.Errorf("%d refusals, want one in RetryAfter; %v", n, c.Log.Errors())
				}
				c.WantStat("BreakerOpens", 0)
				c.WantStat("Hits", 301)
			})
		}
	}
}

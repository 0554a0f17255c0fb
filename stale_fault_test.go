package singlefill_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/redistest"
)

// refreshFault puts a value to be refreshed where f finds it.
func refreshFault(t testing.TB, rdb, admin redis.UniversalClient, kind string, redisTimeout time.Duration, change ...func(*singlefill.Options[string])) *faultCache {
	t.Helper()
	f := newFaultCache(t, rdb, redistest.Namespace(t), redisTimeout, append([]func(*singlefill.Options[string]){func(o *singlefill.Options[string]) {
		p := refreshOptions()
		o.Codec, o.Jitter, o.StaleWhileRevalidate, o.RetryAfter = p.Codec, p.Jitter, p.StaleWhileRevalidate, p.RetryAfter
	}}, change...)...)
	putEntry(t, admin, f.ns, "k", refreshKinds[kind](), time.Hour)
	return f
}

func (f *faultCache) mustGetOld() {
	f.t.Helper()
	v, err := f.GetOrLoad(context.Background(), "k", f.load)
	wantValue(f.t, v, err, "v0")
}

// A Redis that dies during a refresh costs no call its value.
//
//fault:crash-in-call
func TestRefresh_RedisDies(t *testing.T) {
	t.Parallel()
	for kind := range refreshKinds {
		for name, fault := range map[string]struct {
			begin, end func(s *redistest.Server, p *redistest.Proxy)
		}{
			"killed":     {func(s *redistest.Server, _ *redistest.Proxy) { s.Kill() }, func(s *redistest.Server, _ *redistest.Proxy) { s.Restart() }},
			"cut off":    {func(_ *redistest.Server, p *redistest.Proxy) { p.Refuse(true); p.Cut() }, func(_ *redistest.Server, p *redistest.Proxy) { p.Refuse(false) }},
			"black hole": {func(_ *redistest.Server, p *redistest.Proxy) { p.BlackHole(true) }, func(_ *redistest.Server, p *redistest.Proxy) { p.BlackHole(false) }},
		} {
			t.Run(kind+", "+name, func(t *testing.T) {
				t.Parallel()
				s := redistest.Start(t)
				p := redistest.NewProxy(t, s.Addr)
				rdb := p.Client(t, func(o *redis.Options) { o.MaxRetries, o.DialerRetries = -1, 1 })
				f := refreshFault(t, rdb, s.Admin(), kind, impatience)
				begun, goOn := make(chan struct{}), make(chan struct{})
				var first sync.Once
				f.during = func(string) { first.Do(func() { close(begun) }); <-goOn }
				f.mustGetOld()
				receive(t, "the refresh loads", begun)
				fault.begin(s, p)
				var herd []*call[string]
				for range 20 {
					herd = append(herd, goGet(context.Background(), f.Cache, "k", f.load).waits(t))
				}
				redistest.Await(t, "readers have got no reply", func() bool { return f.log.said("get", "") })
				close(goOn)
				for _, a := range herd {
					a.want(t, "value of k")
				}
				f.during = nil
				f.mustLoad("k")
				if most := f.most.Load(); most != 1 {
					t.Errorf("%d loads of one key at once", most)
				}
				f.wantCounted()
				fault.end(s, p)
				f.recovers()
				_ = f.Close()
				redistest.Await(t, "no connection is in use", func() bool {
					n := rdb.PoolStats()
					return n.TotalConns == n.IdleConns
				})
				noImmortalKeys(t, s.Admin())
			})
		}
	}
}

// A lost reply to a refresh costs no call its value, and leaves no lock.
//
//fault:lost-request
func TestRefresh_LostReply(t *testing.T) {
	t.Parallel()
	for _, act := range []string{"get_or_lock", "store", "release"} {
		for _, action := range []redistest.Action{redistest.DropReply, redistest.CloseBefore, redistest.MuteReply} {
			for name, change := range map[string]func(*redis.Options){"client tries again": func(*redis.Options) {}, "client does not": onceOnly} {
				t.Run(fmt.Sprintf("%s %d, %s", act, action, name), func(t *testing.T) {
					t.Parallel()
					s := redistest.Start(t)
					p := redistest.NewProxy(t, s.Addr)
					warm := newFaultCache(t, s.Client(t), "other", patience)
					warm.mustLoad("k")
					boom := errors.New("boom")
					_, _ = warm.GetOrLoad(t.Context(), "e", fails[string](boom))
					rule := p.On(faultAct(t, act), action).Times(1)
					f := refreshFault(t, p.Client(t, change), s.Admin(), "stale", 600*time.Millisecond)
					load := f.load
					if act == "release" {
						load = fails[string](boom)
					}
					v, err := f.GetOrLoad(t.Context(), "k", load)
					wantValue(t, v, err, "v0")
					receive(t, "the fault comes about", rule.Hit())
					lock := f.lock("k")
					if act == "release" { // the whole fleet leaves the source alone
						redistest.Await(t, "the failure is in the lock key", func() bool { return strings.HasPrefix(s.Admin().Get(t.Context(), lock).Val(), "F") })
						f.mustGetOld()
						_ = f.Close()
						f.wantLoads(0)
					} else if action == redistest.MuteReply { // the time of the lock's command may be over; then there is another refresh
						redistest.Await(t, "the new value is stored, or nothing is held", func() bool {
							return !strings.HasPrefix(s.Admin().Get(t.Context(), lock).Val(), "H")
						})
						_ = f.Close()
					} else {
						redistest.Await(t, "the new value is stored", func() bool {
							v, err := f.Get(t.Context(), "k")
							return err == nil && v == "value of k"
						})
						_ = f.Close()
						f.wantLoads(1)
						if info := f.lastLoad(); !info.Stored || info.Fenced || !info.Refresh {
							t.Errorf("Trace.LoadDone got %+v", info)
						}
						if faultExists(t, s.Admin(), lock) && strings.HasPrefix(s.Admin().Get(t.Context(), lock).Val(), "H") {
							t.Error("the lock is left behind")
						}
					}
					if most := f.most.Load(); most > 1 {
						t.Errorf("%d loads at a time", most)
					}
					if name == "client does not" {
						f.wantCounted()
					}
					noImmortalKeys(t, s.Admin())
				})
			}
		}
	}
}

// A refresh that Redis refuses is tried no more often than RetryAfter says, and readers get the old
// value.
//
//fault:missing-right
func TestRefresh_RedisRefuses(t *testing.T) {
	t.Parallel()
	user := func(rules ...any) func(t *testing.T, ns string) (*redis.Client, redis.UniversalClient) {
		return func(t *testing.T, _ string) (*redis.Client, redis.UniversalClient) {
			s := redistest.Start(t)
			faultDo(t, s.Admin())(append([]any{"acl", "setuser", "app", "on", ">pw", "~*", "&*", "+@all"}, rules...)...)
			return s.Client(t, func(o *redis.Options) { o.Username, o.Password = "app", "pw" }), s.Admin()
		}
	}
	for _, c := range []struct {
		name   string
		says   []string // as one server or another does; nil: nothing is refused that cannot be done in another way
		start  func(t *testing.T, ns string) (rdb *redis.Client, admin redis.UniversalClient)
		refuse func(t *testing.T, rdb *redis.Client)
	}{
		{"out of memory", []string{"OOM"}, func(t *testing.T, _ string) (*redis.Client, redis.UniversalClient) {
			s := redistest.Start(t)
			return s.Client(t), s.Admin()
		}, func(t *testing.T, rdb *redis.Client) { faultDo(t, rdb)("config", "set", "maxmemory", "1") }},
		{"read-only replica", []string{"read only"}, func(t *testing.T, _ string) (*redis.Client, redis.UniversalClient) {
			master := redistest.Start(t)
			return redistest.StartReplica(t, master).Client(t), master.Admin()
		}, func(t *testing.T, rdb *redis.Client) {}},
		{"no scripts", nil, user("-@scripting"), func(*testing.T, *redis.Client) {}},
		{"no scripts, no transactions", []string{"NOPERM"}, user("-@scripting", "-watch"), func(*testing.T, *redis.Client) {}},
		{"no writing", []string{"can't run", "ACL failure in script"}, user("-@write", "+get"), func(*testing.T, *redis.Client) {}},
	} {
		for kind := range refreshKinds {
			t.Run(c.name+", "+kind, func(t *testing.T) {
				t.Parallel()
				rdb, admin := c.start(t, "")
				f := refreshFault(t, rdb, admin, kind, patience)
				redistest.Await(t, "the entry is there", func() bool { return rdb.Exists(t.Context(), f.value("k")).Val() == 1 })
				c.refuse(t, rdb)
				if c.says == nil {
					f.mustGetOld()
					redistest.Await(t, "the new value is there", func() bool {
						v, err := f.Get(t.Context(), "k")
						return err == nil && v == "value of k"
					})
					f.wantLoads(1)
					f.wantNoErrors()
					return
				}
				f.mustGetOld()
				redistest.Await(t, "the refusal is traced", func() bool { return f.log.said("lock", c.says...) })
				for range 300 {
					f.mustGetOld()
				}
				_ = f.Close()
				f.wantLoads(0)
				if n := f.Stats().RedisErrors; n != 1 {
					t.Errorf("%d refusals, want one in RetryAfter; %v", n, f.log.errors())
				}
				f.wantStats("BreakerOpens", 0, func(s singlefill.Stats) int64 { return s.BreakerOpens })
				f.wantStats("Hits", 301, func(s singlefill.Stats) int64 { return s.Hits })
			})
		}
	}
}

// A refresh whose value Redis has no memory for keeps the old one.
//
//fault:refused-writes
func TestRefresh_WithoutMemory(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	f := refreshFault(t, s.Client(t), s.Admin(), "stale", patience)
	f.during = func(string) { faultDo(t, s.Admin())("config", "set", "maxmemory", "1") }
	f.mustGetOld()
	redistest.Await(t, "a value could not be stored", func() bool { return f.Stats().StoreErrors == 1 })
	if !f.log.said("store", "OOM") || f.lastLoad().StoreErr == nil || !f.lastLoad().Refresh {
		t.Errorf("Trace got %+v, %v", f.lastLoad(), f.log.errors())
	}
	f.mustGetOld()
	if faultExists(t, s.Admin(), f.lock("k")) && strings.HasPrefix(s.Admin().Get(t.Context(), f.lock("k")).Val(), "H") {
		t.Error("the lock is left behind")
	}
}

// Expire says why it failed.
//
//fault:unreachable-delete
func TestExpire_SaysWhyItFailed(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, says string
		start      func(t *testing.T, ns string) *redis.Client // of a server that has the keys k and l
		still      string                                      // what k holds
	}{
		{"redis is down", "deadline exceeded", func(t *testing.T, _ string) *redis.Client {
			s := redistest.Start(t)
			s.Kill()
			return s.Client(t)
		}, ""},
		{"read-only replica", "READONLY", func(t *testing.T, ns string) *redis.Client {
			master := redistest.Start(t)
			expirePut(t, master.Admin(), ns)
			return redistest.StartReplica(t, master).Client(t)
		}, "v"},
		{"out of memory", "OOM", func(t *testing.T, ns string) *redis.Client {
			s := redistest.Start(t)
			expirePut(t, s.Admin(), ns)
			faultDo(t, s.Admin())("config", "set", "maxmemory", "1")
			return s.Client(t)
		}, "v"},
		{"without any right", "NOPERM", func(t *testing.T, ns string) *redis.Client {
			s := redistest.Start(t)
			expirePut(t, s.Admin(), ns)
			faultDo(t, s.Admin())("acl", "setuser", "reader", "on", ">pw", "%R~*", "+@read")
			return s.Client(t, func(o *redis.Options) { o.Username, o.Password = "reader", "pw" })
		}, "v"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			ns := redistest.Namespace(t)
			rdb := c.start(t, ns)
			f := newFaultCache(t, rdb, ns, patience, func(o *singlefill.Options[string]) { o.Codec = singlefill.Raw })
			err := f.Expire(t.Context(), "k", "l")
			if err == nil || !strings.HasPrefix(err.Error(), "singlefill: expire: ") || !strings.Contains(err.Error(), c.says) {
				t.Errorf("Expire = %v, want %q", err, "singlefill: expire: … "+c.says)
			}
			if !f.log.said("expire", c.says) || f.Stats().RedisErrors != 1 {
				t.Errorf("Trace got %v, %+v", f.log.errors(), f.Stats())
			}
			if c.still != "" {
				if v, err := f.Get(t.Context(), "k"); err != nil || v != c.still {
					t.Errorf("Get = %q, %v, want %q", v, err, c.still)
				}
			}
		})
	}
}

func expirePut(t testing.TB, admin *redis.Client, ns string) {
	for _, key := range []string{"k", "l"} {
		putEntry(t, admin, ns, key, entry.Entry{FreshUntil: time.Now().Add(time.Hour), Payload: []byte("v")}, time.Hour)
	}
}

package singlefill_test

import (
	"context"
	"encoding/binary"
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
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/redistest"
)

// refreshKinds are entries of v0 that every read refreshes: one that is stale, and one that soon will be and
// has taken so long to load that the lot is certain.
var refreshKinds = map[string]func() entry.Entry{
	"stale": func() entry.Entry {
		return entry.Entry{FreshUntil: time.Now().Add(-time.Second), WrittenAt: time.Now().Add(-time.Minute), Payload: []byte("v0")}
	},
	"early": func() entry.Entry {
		return entry.Entry{FreshUntil: time.Now().Add(time.Second), WrittenAt: time.Now(), LoadTime: 1000 * time.Hour, Payload: []byte("v0")}
	},
}

const notToBeKept = "a value that is not to be kept"

func refreshOptions() *singlefill.Options[string] {
	return &singlefill.Options[string]{
		Codec: singlefill.Raw, Jitter: -1, StaleWhileRevalidate: time.Hour, RetryAfter: time.Hour, NotFoundTTL: -1,
		TTLFunc: func(_, v string) time.Duration {
			if v == notToBeKept {
				return 0
			}
			return time.Hour
		},
	}
}

// A refreshing is a cache in the middle of a refresh of the key k.
type refreshing struct {
	*singlefill.Cache[string]
	elsewhere *singlefill.Cache[string] // in another process
	src       *source[string]
	load      *loading[string] // of the refresh
	ns        string
}

func beginRefresh(t testing.TB, rdb, look redis.UniversalClient, kind string) *refreshing {
	t.Helper()
	r := &refreshing{ns: redistest.Namespace(t)}
	r.Cache, r.elsewhere = newCacheIn(t, rdb, r.ns, refreshOptions()), newCacheIn(t, rdb, r.ns, refreshOptions())
	r.src = newSource[string](t)
	entryPut(t, look, r.ns, "k", refreshKinds[kind](), time.Hour)
	goGet(t.Context(), r.Cache, "k", r.src.load).want(t, "v0")
	r.load = r.src.next(t)
	return r
}

func (r *refreshing) by(who string) *singlefill.Cache[string] {
	if who == "here" {
		return r.Cache
	}
	return r.elsewhere
}

// refreshEach runs a test in the middle of a refresh of every kind, on every client.
func refreshEach(t *testing.T, run func(t *testing.T, r *refreshing, rdb, look redis.UniversalClient)) {
	expireEach(t, func(t *testing.T, rdb, look redis.UniversalClient) {
		for kind := range refreshKinds {
			t.Run(kind, func(t *testing.T) { run(t, beginRefresh(t, rdb, look, kind), rdb, look) })
		}
	})
}

// supersede does to the key k what breaks loads.
func supersede(t testing.TB, c *singlefill.Cache[string], how string) {
	t.Helper()
	var err error
	switch how {
	case "Delete":
		err = c.Delete(context.Background(), "k")
	case "Set":
		err = c.Set(context.Background(), "k", "set")
	case "Expire":
		err = c.Expire(context.Background(), "k")
	}
	if err != nil {
		t.Fatal(err)
	}
}

var supersededLeaves = map[string]string{"Delete": "", "Set": "set", "Expire": "v0"}

//fault:delete-in-load
func TestWhatComesDuringARefreshWins(t *testing.T) {
	t.Parallel()
	expireEach(t, func(t *testing.T, rdb, look redis.UniversalClient) {
		for kind := range refreshKinds {
			for how, leaves := range supersededLeaves {
				for _, who := range []string{"here", "elsewhere"} {
					for _, end := range []ending[string]{{"v1", nil}, {notToBeKept, nil}, {"", singlefill.ErrNotFound}, {"", errors.New("boom")}} {
						name := fmt.Sprintf("%s, %s %s, %v", kind, how, who, end)
						r := beginRefresh(t, rdb, look, kind)
						supersede(t, r.by(who), how)
						r.load.ends <- end
						_ = r.Close()
						wantStored(t, look, r.ns, "k", leaves)
						wantUnlocked(t, look, r.ns, "k")
						if how == "Expire" {
							if _, e := entryWant(t, look, r.ns, "k"); !e.Expired {
								t.Errorf("%s: the entry is not expired any more", name)
							}
						}
						r.src.want(t, 1)
						if s := r.Stats(); s.Refreshes != 1 || s.Stored != 0 || (end.value == "v1") != (s.Fenced == 1) || s.RedisErrors != 0 {
							t.Errorf("%s: %+v, want one refresh, refused", name, s)
						}
						if lock, found := stored(t, look, r.ns+":{k}:lock"); found {
							t.Errorf("%s: the lock key holds %q", name, lock)
						}
					}
				}
			}
		}
	})
}

func TestARefreshThatBringsNothingToKeepEmptiesTheKey(t *testing.T) {
	t.Parallel()
	for _, end := range []ending[string]{{notToBeKept, nil}, {"", singlefill.ErrNotFound}} {
		refreshEach(t, func(t *testing.T, r *refreshing, rdb, look redis.UniversalClient) {
			wantStored(t, look, r.ns, "k", "v0")
			r.load.ends <- end
			_ = r.Close()
			wantStored(t, look, r.ns, "k", "")
			wantUnlocked(t, look, r.ns, "k")
			entrySeen(t, rdb, look, r.ns, "k")
			goGet(t.Context(), r.elsewhere, "k", gives("v2")).want(t, "v2") // at once, whatever RetryAfter says
		})
	}
}

func TestALoadAfterADeleteDuringARefreshIsNewer(t *testing.T) {
	t.Parallel()
	for _, order := range []string{"the refresh ends first", "the load ends first"} {
		for _, who := range []string{"here", "elsewhere"} {
			t.Run(who+", "+order, func(t *testing.T) {
				refreshEach(t, func(t *testing.T, r *refreshing, rdb, look redis.UniversalClient) {
					supersede(t, r.by(who), "Delete")
					entrySeen(t, rdb, look, r.ns, "k")
					after := goGet(t.Context(), r.Cache, "k", r.src.load)
					newer := r.src.next(t) // without waiting for the refresh
					if order == "the refresh ends first" {
						r.load.give("v1")
						newer.give("v2")
						after.want(t, "v2")
					} else {
						newer.give("v2")
						after.want(t, "v2")
						r.load.give("v1")
					}
					_ = r.Close()
					wantStored(t, look, r.ns, "k", "v2")
					wantUnlocked(t, look, r.ns, "k")
					r.src.want(t, 2)
					if s := r.Stats(); s.Refreshes != 1 || s.Loads != 2 || s.Stored != 1 || s.Fenced != 1 {
						t.Errorf("%+v, want a refresh, refused, and a load, stored", s)
					}
				})
			})
		}
	}
}

// A Delete that the process of the refresh hears of only when it stores: a reader that has been handed over to the
// refresh must not take its value, nor the old one in place of its error.
func TestARefreshIsRefusedToThoseWhoCameAfterADelete(t *testing.T) {
	t.Parallel()
	for _, err := range []error{nil, errors.New("boom")} {
		t.Run(fmt.Sprint(err), func(t *testing.T) {
			t.Parallel()
			p, ns, rdb := refreshProxied(t)
			slow, direct := newCacheIn(t, p.Client(t), ns, refreshOptions()), newCacheIn(t, rdb, ns, refreshOptions())
			entryPut(t, rdb, ns, "k", refreshKinds["stale"](), time.Hour)
			src := newSource[string](t)
			goGet(t.Context(), slow, "k", src.load).want(t, "v0")
			load := src.next(t)
			supersede(t, direct, "Delete")
			renewal := p.On(isScript(t, "renew"), redistest.HoldRequest)
			after := goGet(t.Context(), slow, "k", src.load).waits(t)
			receive(t, "the reader has been handed over: the lock is looked at", renewal.Hit())
			load.ends <- ending[string]{"v1", err}
			newer := src.next(t)
			renewal.Release()
			newer.give("v2")
			after.want(t, "v2")
			_ = slow.Close()
			wantStored(t, rdb, ns, "k", "v2")
			src.want(t, 2)
		})
	}
}

func refreshProxied(t testing.TB) (p *redistest.Proxy, ns string, rdb *redis.Client) {
	server := redistest.Shared(t)
	rdb = server.Client(t)
	warm := newCache[string](t, rdb, nil) // the server knows the scripts from here on
	_, _ = warm.GetOrLoad(t.Context(), "k", gives("v"))
	return redistest.NewProxy(t, server.Addr), redistest.Namespace(t), rdb
}

func TestAnExpireDuringARefreshCausesAnotherOne(t *testing.T) {
	t.Parallel()
	refreshEach(t, func(t *testing.T, r *refreshing, rdb, look redis.UniversalClient) {
		expireAll(t, r.Cache, rdb, look, r.ns, "k")
		goGet(t.Context(), r.Cache, "k", r.src.load).want(t, "v0")
		newer := r.src.next(t) // without waiting for the first one
		newer.give("v2")
		wantGet(t, r.Cache, "k", "v2", nil)
		r.load.give("v1")
		_ = r.Close()
		wantStored(t, look, r.ns, "k", "v2")
		r.src.want(t, 2)
		if s := r.Stats(); s.Refreshes != 2 || s.Stored != 1 || s.Fenced != 1 {
			t.Errorf("%+v, want two refreshes, one stored and one refused", s)
		}
	})
}

func TestAfterAFailedRefreshTheSourceIsAskedAtOnceOnlyIfTheKeyChanges(t *testing.T) {
	t.Parallel()
	for how := range supersededLeaves {
		if how == "Set" {
			continue // a value that is fresh needs no load
		}
		t.Run(how, func(t *testing.T) {
			refreshEach(t, func(t *testing.T, r *refreshing, rdb, look redis.UniversalClient) {
				r.load.fail(errors.New("boom"))
				redistest.Await(t, "the refresh is over", func() bool { return r.Stats().LoadErrors == 1 })
				for _, c := range []*singlefill.Cache[string]{r.Cache, r.elsewhere} {
					goGet(t.Context(), c, "k", mustNotLoad[string](t)).want(t, "v0") // RetryAfter is an hour
				}
				supersede(t, r.Cache, how)
				entrySeen(t, rdb, look, r.ns, "k")
				again := goGet(t.Context(), r.Cache, "k", r.src.load)
				if how == "Expire" {
					again.want(t, "v0")
				}
				r.src.next(t).give("v2")
				if how == "Delete" {
					again.want(t, "v2")
				}
				_ = r.Close()
				wantStored(t, look, r.ns, "k", "v2")
				r.src.want(t, 2)
			})
		})
	}
}

func TestARefreshLoadsNothingOnceItsEntryIsGone(t *testing.T) {
	t.Parallel()
	for kind := range refreshKinds {
		for how, leaves := range supersededLeaves {
			for _, who := range []string{"here", "elsewhere"} {
				for _, scripts := range []bool{true, false} {
					t.Run(fmt.Sprintf("%s, %s %s, scripts %t", kind, how, who, scripts), func(t *testing.T) {
						t.Parallel()
						p, ns, rdb := refreshProxied(t)
						slow, direct := newCacheIn(t, p.Client(t), ns, refreshOptions()), newCacheIn(t, rdb, ns, refreshOptions())
						lock := p.On(isScript(t, "get_or_lock"), redistest.HoldRequest).Times(1)
						if !scripts {
							s := redistest.Start(t)
							asUser := expireNoScripts(t, s)
							rdb, p = s.Admin(), redistest.NewProxy(t, s.Addr)
							slow, direct = newCacheIn(t, p.Client(t, asUser), ns, refreshOptions()), newCacheIn(t, s.Client(t, asUser), ns, refreshOptions())
							lock = p.On(redistest.Command("watch"), redistest.HoldRequest).Times(1)
						}
						entryPut(t, rdb, ns, "k", refreshKinds[kind](), time.Hour)
						goGet(t.Context(), slow, "k", mustNotLoad[string](t)).want(t, "v0")
						receive(t, "the refresh asks for the lock", lock.Hit())
						supersede(t, map[string]*singlefill.Cache[string]{"here": slow, "elsewhere": direct}[who], how)
						lock.Release()
						_ = slow.Close()
						wantStored(t, rdb, ns, "k", leaves)
						if lock, found := stored(t, rdb, ns+":{k}:lock"); found {
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

func TestReadersOfAValueThatVanishesShareItsRefresh(t *testing.T) {
	boom := errors.New("boom")
	for kind := range refreshKinds {
		for _, end := range []ending[string]{{"v1", nil}, {"", singlefill.ErrNotFound}, {"", boom}} {
			t.Run(fmt.Sprint(kind, " ", end.err), func(t *testing.T) {
				inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
					r := beginRefresh(t, rdb, rdb, kind)
					if n, err := rdb.Del(t.Context(), r.ns+":{k}").Result(); n != 1 || err != nil { // evicted, say
						t.Fatal(n, err)
					}
					var herd []*call[string]
					for range 20 {
						herd = append(herd, goGet(t.Context(), r.Cache, "k", r.src.load))
						synctest.Wait() // it has found nothing, and waits
					}
					begun := time.Now()
					r.load.ends <- end
					for _, a := range herd {
						switch {
						case end.err == boom: // there is an old value in its place, which nobody has deleted
							a.want(t, "v0")
						case end.err != nil:
							a.wantErr(t, end.err)
						default:
							a.want(t, end.value)
						}
					}
					wantElapsed(t, "all have their answer", begun, 0)
					_ = r.Close()
					wantUnlocked(t, rdb, r.ns, "k")
					r.src.want(t, 1)
					if s := r.Stats(); s.Refreshes != 1 || s.Misses != 20 || end.err == boom && s.StaleOnError != 20 && kind == "stale" {
						t.Errorf("%+v, want one refresh and 20 misses", s)
					}
				})
			})
		}
	}
}

func TestAValueThatVanishesDuringItsRefreshIsNotLoadedTwice(t *testing.T) {
	t.Parallel()
	refreshEach(t, func(t *testing.T, r *refreshing, rdb, look redis.UniversalClient) {
		if n, err := look.Del(t.Context(), r.ns+":{k}").Result(); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		var herd []*call[string]
		for i := range 20 {
			herd = append(herd, goGet(t.Context(), r.by([]string{"here", "elsewhere"}[i%2]), "k", r.src.load).waits(t))
		}
		r.load.give("v1")
		for _, a := range herd {
			if v, err := a.result(t); err != nil || v != "v1" && !(strings.Contains(t.Name(), "/csc") && v == "v0") {
				t.Errorf("got %q, %v; want v1", v, err)
			}
		}
		_ = r.Close()
		wantStored(t, look, r.ns, "k", "v1")
		wantUnlocked(t, look, r.ns, "k")
		r.src.want(t, 1)
	})
}

func TestARefreshThatAsksForItsOwnKeyIsToldWhenThatIsInVain(t *testing.T) {
	t.Parallel()
	for _, first := range []string{"the loader", "another caller"} {
		t.Run(first, func(t *testing.T) {
			t.Parallel()
			p, ns, rdb := refreshProxied(t)
			c := newCacheIn(t, p.Client(t), ns, refreshOptions())
			entryPut(t, rdb, ns, "k", refreshKinds["stale"](), time.Hour)
			begun, asks, asked := make(chan struct{}), make(chan struct{}), make(chan struct{})
			goGet(t.Context(), c, "k", func(ctx context.Context, key string) (string, error) {
				v, err := c.GetOrLoad(ctx, key, mustNotLoad[string](t))
				wantValue(t, v, err, "v0") // as long as it is there
				close(begun)
				<-asks
				_, err = c.GetOrLoad(&waitingContext{Context: ctx, asked: asked}, key, mustNotLoad[string](t))
				if err != singlefill.ErrRecursive {
					t.Errorf("the loader got %v, want ErrRecursive itself", err)
				}
				return "v1", nil
			}).want(t, "v0")
			receive(t, "the refresh loads", begun)
			if err := rdb.Del(t.Context(), ns+":{k}").Err(); err != nil {
				t.Fatal(err)
			}
			read := p.On(redistest.Command("get"), redistest.HoldReply).Times(1)
			if first == "the loader" {
				close(asks)
				receive(t, "the loader's read finds nothing", read.Hit())
			}
			innocent := goGet(t.Context(), c, "k", mustNotLoad[string](t)).waits(t)
			if first != "the loader" {
				receive(t, "a read finds nothing", read.Hit())
				close(asks)
				receive(t, "the loader waits too", asked)
			}
			read.Release()
			innocent.want(t, "v1")
			_ = c.Close()
			wantStored(t, rdb, ns, "k", "v1")
		})
	}
}

func TestWhileARefreshRunsEachReadIsOneGET(t *testing.T) {
	t.Parallel()
	const reads = 1000
	for kind := range refreshKinds {
		for _, who := range []string{"here", "elsewhere"} {
			t.Run(kind+", "+who, func(t *testing.T) {
				t.Parallel()
				p, ns, rdb := refreshProxied(t)
				here, elsewhere := newCacheIn(t, p.Client(t), ns, refreshOptions()), newCacheIn(t, rdb, ns, refreshOptions())
				entryPut(t, rdb, ns, "k", refreshKinds[kind](), time.Hour)
				src := newSource[string](t)
				begun := time.Now()
				goGet(t.Context(), map[string]*singlefill.Cache[string]{"here": here, "elsewhere": elsewhere}[who], "k", src.load).want(t, "v0")
				load := src.next(t)
				gets := p.On(redistest.Command("get"), redistest.Pass)
				scripts := p.On(redistest.Command("evalsha", "eval"), redistest.Pass)
				others := p.On(func(cmd []string) bool { return !redistest.Command("hello")(cmd) }, redistest.Pass)
				hits := here.Stats().Hits
				for range reads {
					v, err := here.GetOrLoad(t.Context(), "k", mustNotLoad[string](t))
					wantValue(t, v, err, "v0")
				}
				// A lock that is held elsewhere is looked at once a second, our own is renewed more rarely.
				most := int(time.Since(begun) / time.Second)
				if who == "elsewhere" {
					most++
				}
				if n := gets.Fired(); n != reads {
					t.Errorf("%d GETs for %d reads", n, reads)
				}
				if n := scripts.Fired(); n > most {
					t.Errorf("%d scripts for %d reads, want at most %d", n, reads, most)
				}
				if n := others.Fired(); n > 0 {
					t.Errorf("%d other commands for %d reads", n, reads)
				}
				if n := here.Stats().Hits - hits; n != reads {
					t.Errorf("%d hits of %d reads", n, reads)
				}
				load.give("v1")
				wantGet(t, here, "k", "v1", nil)
				src.want(t, 1)
			})
		}
	}
}

func TestReadersOfAStaleValueWaitForNothing(t *testing.T) {
	for kind := range refreshKinds {
		t.Run(kind, func(t *testing.T) {
			inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				ns := redistest.Namespace(t)
				opts := refreshOptions()
				opts.MaxLoads = 1
				c := newCacheIn(t, rdb, ns, opts)
				src := newSource[string](t)
				entryPut(t, rdb, ns, "k", refreshKinds[kind](), time.Hour)
				lock := "H" + strings.Repeat("T", 26) + fmt.Sprintf("%016d", time.Now().UnixMicro())
				if err := rdb.Set(t.Context(), ns+":{k}:lock", lock, 20*time.Second).Err(); err != nil { // of a process that is dead
					t.Fatal(err)
				}
				busy := goGet(t.Context(), c, "busy", src.load) // takes the only place
				other := src.next(t)
				read := func() {
					t.Helper()
					begun := time.Now()
					v, err := c.GetOrLoad(t.Context(), "k", src.load)
					wantValue(t, v, err, "v0")
					wantElapsed(t, "a read", begun, 0)
				}
				for range 40 { // the lock ends after half of it
					read()
					time.Sleep(time.Second)
				}
				src.want(t, 1)
				other.give("v")
				busy.want(t, "v")
				time.Sleep(time.Second) // for which the refresh is not tried again
				read()
				load := src.next(t)
				read()
				load.give("v1")
				synctest.Wait()
				goGet(t.Context(), c, "k", src.load).want(t, "v1")
				src.want(t, 2)
			})
		})
	}
}

// refreshFault puts a value to be refreshed where f finds it.
func refreshFault(t testing.TB, rdb, admin redis.UniversalClient, kind string, redisTimeout time.Duration, change ...func(*singlefill.Options[string])) *faultCache {
	t.Helper()
	f := newFaultCache(t, rdb, redistest.Namespace(t), redisTimeout, append([]func(*singlefill.Options[string]){func(o *singlefill.Options[string]) {
		p := refreshOptions()
		o.Codec, o.Jitter, o.StaleWhileRevalidate, o.RetryAfter = p.Codec, p.Jitter, p.StaleWhileRevalidate, p.RetryAfter
	}}, change...)...)
	entryPut(t, admin, f.ns, "k", refreshKinds[kind](), time.Hour)
	return f
}

func (f *faultCache) mustGetOld() {
	f.t.Helper()
	v, err := f.GetOrLoad(context.Background(), "k", f.load)
	wantValue(f.t, v, err, "v0")
}

//fault:crash-in-call
func TestARedisThatDiesDuringARefreshCostsNoCallItsValue(t *testing.T) {
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
				redistest.Await(t, "readers have asked in vain", func() bool { return f.log.said("get", "") })
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

//fault:lost-request
func TestALostReplyOfARefreshHarmsNobody(t *testing.T) {
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
						redistest.Await(t, "the failure is told", func() bool { return strings.HasPrefix(s.Admin().Get(t.Context(), lock).Val(), "F") })
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
							t.Errorf("Trace.LoadDone was told %+v", info)
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

// A server that answers but refuses: the old value is served on, and the refresh is tried no more often than RetryAfter says.
//
//fault:missing-right
func TestARedisThatRefusesARefreshIsLeftAloneAndSoAreTheReaders(t *testing.T) {
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
				redistest.Await(t, "the refusal is told", func() bool { return f.log.said("lock", c.says...) })
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

//fault:refused-writes
func TestWithoutMemoryForItsValueARefreshKeepsTheOldOne(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	f := refreshFault(t, s.Client(t), s.Admin(), "stale", patience)
	f.during = func(string) { faultDo(t, s.Admin())("config", "set", "maxmemory", "1") }
	f.mustGetOld()
	redistest.Await(t, "a value could not be stored", func() bool { return f.Stats().StoreErrors == 1 })
	if !f.log.said("store", "OOM") || f.lastLoad().StoreErr == nil || !f.lastLoad().Refresh {
		t.Errorf("Trace was told %+v, %v", f.lastLoad(), f.log.errors())
	}
	f.mustGetOld()
	if faultExists(t, s.Admin(), f.lock("k")) && strings.HasPrefix(s.Admin().Get(t.Context(), f.lock("k")).Val(), "H") {
		t.Error("the lock is left behind")
	}
}

func TestAReadThatEndsDuringCloseBeginsNoRefresh(t *testing.T) {
	t.Parallel()
	for kind := range refreshKinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			p, ns, rdb := refreshProxied(t)
			c := newCacheIn(t, p.Client(t), ns, refreshOptions())
			entryPut(t, rdb, ns, "k", refreshKinds[kind](), time.Hour)
			read := p.On(redistest.Command("get"), redistest.HoldReply).Times(1)
			reads := goGet(t.Context(), c, "k", mustNotLoad[string](t))
			receive(t, "the read is answered", read.Hit())
			closed := make(chan struct{})
			go func() {
				_ = c.Close()
				close(closed)
			}()
			redistest.Await(t, "the cache refuses calls", func() bool {
				_, err := c.Get(t.Context(), "k")
				return err == singlefill.ErrClosed
			})
			read.Release()
			reads.want(t, "v0")
			receive(t, "Close returns", closed)
			if s := c.Stats(); s.Loads != 0 {
				t.Errorf("%+v, want no load", s)
			}
		})
	}
}

func TestCloseWaitsForARefreshAndNothingStartsAfterIt(t *testing.T) {
	t.Parallel()
	t.Run("which stores", func(t *testing.T) {
		refreshEach(t, func(t *testing.T, r *refreshing, rdb, look redis.UniversalClient) {
			closed := make(chan struct{})
			go func() {
				_ = r.Close()
				close(closed)
			}()
			redistest.Await(t, "the cache refuses calls", func() bool {
				_, err := r.Get(t.Context(), "k")
				return err == singlefill.ErrClosed
			})
			select {
			case <-closed:
				t.Error("Close has returned before the refresh")
			default:
			}
			r.load.give("v1")
			receive(t, "Close returns", closed)
			wantStored(t, look, r.ns, "k", "v1")
			wantUnlocked(t, look, r.ns, "k")
		})
	})
	t.Run("at any moment", func(t *testing.T) {
		t.Parallel()
		const rounds, readers = 300, 4
		_, rdb := redistest.StartMini(t)
		ns := redistest.Namespace(t)
		kinds := []string{"stale", "early"}
		ran := 0
		for round := range rounds {
			entryPut(t, rdb, ns, "k", refreshKinds[kinds[round%2]](), time.Hour)
			if err := rdb.Del(t.Context(), ns+":{k}:lock").Err(); err != nil {
				t.Fatal(err)
			}
			opts := patient(refreshOptions())
			opts.MaxLoads = 1 + round%3
			c, err := singlefill.New(rdb, ns, time.Hour, opts)
			if err != nil {
				t.Fatal(err)
			}
			var closed atomic.Bool
			var running, loads atomic.Int64
			load := func(context.Context, string) (string, error) {
				running.Add(1)
				loads.Add(1)
				if closed.Load() {
					t.Error("a load begins after Close")
				}
				runtime.Gosched()
				running.Add(-1)
				return "v1", nil
			}
			var wg sync.WaitGroup
			for range readers {
				wg.Go(func() {
					for {
						v, err := c.GetOrLoad(t.Context(), "k", load)
						if err == singlefill.ErrClosed {
							return
						}
						if err != nil || v != "v0" && v != "v1" {
							t.Errorf("got %q, %v", v, err)
							return
						}
					}
				})
			}
			time.Sleep(time.Duration(rand.IntN(int(time.Millisecond)))) // any moment will do
			_ = c.Close()
			closed.Store(true)
			if n := running.Load(); n != 0 {
				t.Errorf("%d loads run after Close", n)
			}
			s := c.Stats()
			wg.Wait()
			if n := loads.Load(); n != s.Loads || s.Loading != 0 || s.Loads != s.Stored {
				t.Errorf("%d loads, %+v", n, s)
			}
			wantUnlocked(t, rdb, ns, "k")
			ran += int(loads.Load())
		}
		if ran == 0 {
			t.Errorf("there was no refresh in %d rounds", rounds)
		}
	})
}

// TestNeitherTwoLoadsAtATimeNorAnythingDeletedWhateverHappens lets two caches read values that are stale almost at once,
// of a source that fails at times, while writers delete, set and expire. Nobody gets a version older than the last
// Delete or Set that had returned, also in place of an error. Two loads of a key run at a time only if one of these
// came between.
//
//fault:delete-in-load
func TestNeitherTwoLoadsAtATimeNorAnythingDeletedWhateverHappens(t *testing.T) {
	t.Parallel()
	const keys, readers, rounds = 3, 4, 1000
	for _, kind := range []string{"mini", "single", "cluster", "no scripts"} {
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
				asUser := expireNoScripts(t, s)
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
				c := newCacheIn(t, rdb, ns, opts)
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

	writes       sync.Mutex // one write at a time, or the order of two would not be known
	mu           sync.Mutex
	begun, ended int         // writes
	running      map[int]int // loads, by how many writes had ended before the call that began them
}

type refreshCall struct{}

// call notes in a context, which the Loader's is made from, how many writes have ended.
func (s *refreshState) call(ctx context.Context) context.Context {
	s.mu.Lock()
	defer s.mu.Unlock()
	return context.WithValue(ctx, refreshCall{}, s.ended)
}

func (s *refreshState) begin(ctx context.Context) (value string, end func()) {
	since := ctx.Value(refreshCall{}).(int)
	s.mu.Lock()
	defer s.mu.Unlock()
	switch { // a load that a write has broken before it began is no load too many
	case s.begun == since && s.running[since] > 0:
		s.t.Error("a load begins while one runs, and no write has broken either")
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

// Clocks that differ. A cache trusts the times in an entry's header, which are its writer's; here one cache lives with
// a clock that is a minute ahead of Redis', or behind. A hook makes it so: it shifts the times in all that this cache
// writes, and shifts them back in all that it reads.
type clockHook struct {
	ahead                  time.Duration
	store, lookup, expires func(cmd []string) bool
}

const clockSkew = time.Minute

// clockCache makes a cache in a process of its own, whose clock is ahead.
func clockCache(t testing.TB, m *miniredis.Miniredis, ns string, opts *singlefill.Options[string], ahead time.Duration) *singlefill.Cache[string] {
	t.Helper()
	rdb := redistest.NewMiniClient(t, m)
	rdb.AddHook(&clockHook{ahead, isScript(t, "store"), isScript(t, "get_or_lock"), isScript(t, "expire")})
	return newCacheIn(t, rdb, ns, opts)
}

// clockShift moves the times of an entry, or of its header, by d.
func clockShift(data string, d time.Duration) string {
	const fresh, end = 3, 19 // FreshUntil, WrittenAt
	if len(data) < 35 || data[0] != 0xC1 {
		return data
	}
	return data[:fresh] + clockShiftTimes(data[fresh:end], d) + data[end:]
}

func clockShiftTimes(times string, d time.Duration) string {
	b := []byte(times)
	for ; len(times) > 0; times = times[8:] {
		at := b[len(b)-len(times):]
		binary.BigEndian.PutUint64(at, binary.BigEndian.Uint64(at)+uint64(d.Milliseconds()))
	}
	return string(b)
}

func (h *clockHook) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h *clockHook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		h.write(cmd)
		err := next(ctx, cmd)
		switch cmd := cmd.(type) {
		case *redis.StringCmd:
			if cmd.Name() == "get" && err == nil {
				cmd.SetVal(clockShift(cmd.Val(), -h.ahead))
			}
		case *redis.Cmd:
			if reply, ok := cmd.Val().([]any); ok && len(reply) == 4 && reply[0] == "hit" {
				reply[1] = clockShift(reply[1].(string), -h.ahead)
			}
		}
		return err
	}
}

func (h *clockHook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		for _, cmd := range cmds {
			h.write(cmd)
		}
		return next(ctx, cmds)
	}
}

// write shifts what a command is about to write, or shows as known.
func (h *clockHook) write(cmd redis.Cmder) {
	args := cmd.Args()
	switch cmd.Name() {
	case "set":
		args[2] = clockShift(fmt.Sprintf("%s", args[2]), h.ahead)
	case "eval", "evalsha":
		script := []string{cmd.Name(), args[1].(string)}
		argv := args[3+args[2].(int):]
		switch {
		case h.store(script), h.lookup(script):
			argv[2] = clockShift(fmt.Sprintf("%s", argv[2]), h.ahead)
		case h.expires(script):
			argv[0] = clockShiftTimes(argv[0].(string), h.ahead)
		}
	}
}

// eachClock runs a test in a bubble with a cache whose clock is right and one whose clock is not.
func eachClock(t *testing.T, opts func() *singlefill.Options[string], run func(t *testing.T, right, wrong *singlefill.Cache[string], ahead time.Duration)) {
	for _, ahead := range []time.Duration{clockSkew, -clockSkew} {
		t.Run(fmt.Sprintf("ahead by %v", ahead), func(t *testing.T) {
			inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				ns := redistest.Namespace(t)
				right, wrong := newCacheIn(t, rdb, ns, opts()), clockCache(t, m, ns, opts(), ahead)
				if err := wrong.Set(t.Context(), "probe", "v"); err != nil {
					t.Fatal(err)
				}
				if _, e := entryWant(t, rdb, ns, "probe"); !e.WrittenAt.Equal(time.Now().Add(ahead)) {
					t.Fatalf("written at %v, want %v ahead of now", e.WrittenAt, ahead)
				}
				run(t, right, wrong, ahead)
			})
		})
	}
}

func clockOptions(life, swr, sie, retryAfter time.Duration) func() *singlefill.Options[string] {
	return func() *singlefill.Options[string] {
		opts := entryWindows(swr, sie)
		opts.RetryAfter, opts.TTLFunc = retryAfter, func(string, string) time.Duration { return life }
		return opts
	}
}

//fault:process-clock
func TestAWrongClockShiftsWhenAValueIsFreshAndPastItsTTLItIsGone(t *testing.T) {
	const life, swr, sie, step = 10 * time.Minute, 3 * time.Minute, 5 * time.Minute, 5 * time.Second
	boom := errors.New("boom")
	opts := clockOptions(life, swr, sie, time.Millisecond)
	eachClock(t, opts, func(t *testing.T, right, wrong *singlefill.Cache[string], ahead time.Duration) {
		for key, test := range map[string]struct {
			writer, reader *singlefill.Cache[string]
			ahead          time.Duration // reader of writer
		}{
			"wrong reader": {right, wrong, ahead}, "wrong writer": {wrong, right, -ahead}, "both wrong": {wrong, wrong, 0}, "both right": {right, right, 0},
		} {
			goGet(t.Context(), test.writer, key, gives("v")).want(t, "v")
			begun := time.Now()
			fresh, served, got := time.Duration(0), time.Duration(0), time.Duration(0) // until when
			for ; time.Since(begun) < life+sie+3*time.Minute; time.Sleep(step) {
				at := time.Since(begun)
				if _, err := test.reader.Get(t.Context(), key); err == nil {
					got = at
				}
				v, info, err := test.reader.GetOrLoadInfo(t.Context(), key, fails[string](boom))
				switch {
				case err == nil && v == "v":
					served = at
					if !info.Stale {
						fresh = at
					}
				case err != boom:
					t.Fatalf("%s after %v: %v", key, at, err)
				}
				if info.Age < 0 {
					t.Errorf("%s: the age is %v", key, info.Age)
				}
			}
			end := life + sie
			for what, until := range map[string][2]time.Duration{
				"fresh":           {fresh, life - test.ahead},
				"found by Get":    {got, life + swr - test.ahead},
				"served at worst": {served, min(end, end-test.ahead)},
			} {
				if until[0] != until[1]-step {
					t.Errorf("%s: %s until %v, want until %v", key, what, until[0]+step, until[1])
				}
			}
		}
	})
}

// A load that begins before the end of the last window and fails after it.
func TestAWrongClockServesNothingThatRedisHasEnded(t *testing.T) {
	const life, sie = 10 * time.Minute, 5 * time.Minute
	boom := errors.New("boom")
	eachClock(t, clockOptions(life, 0, sie, time.Millisecond), func(t *testing.T, right, wrong *singlefill.Cache[string], ahead time.Duration) {
		goGet(t.Context(), right, "k", gives("v")).want(t, "v")
		time.Sleep(life + sie - max(0, ahead) - time.Second)
		goGet(t.Context(), wrong, "k", fails[string](boom)).want(t, "v")
		time.Sleep(max(0, ahead) + time.Second)
		goGet(t.Context(), wrong, "k", fails[string](boom)).wantErr(t, boom)
	})
}

func TestCachesWithDifferentClocksShareTheirLoads(t *testing.T) {
	const life, run = 10 * time.Minute, 10 * time.Hour
	for name, swr := range map[string]time.Duration{"loaded": 0, "refreshed": 5 * time.Minute} {
		t.Run(name, func(t *testing.T) {
			eachClock(t, clockOptions(life, swr, 0, time.Second), func(t *testing.T, right, wrong *singlefill.Cache[string], _ time.Duration) {
				begun := time.Now()
				loads := 0
				load := func(context.Context, string) (string, error) {
					loads++
					return fmt.Sprint(int(time.Since(begun) / time.Second)), nil
				}
				for ; time.Since(begun) < run; time.Sleep(5 * time.Second) {
					for _, c := range []*singlefill.Cache[string]{right, wrong} {
						v, err := c.GetOrLoad(t.Context(), "k", load)
						at, _ := strconv.Atoi(v)
						if age := time.Since(begun) - time.Duration(at)*time.Second; err != nil || age > life+clockSkew+10*time.Second {
							t.Fatalf("%q, %v at %v", v, err, time.Since(begun))
						}
						synctest.Wait() // a refresh has ended
					}
				}
				if least, most := int(run/(life+clockSkew)), int(run/(life-clockSkew))+1; loads < least || loads > most {
					t.Errorf("%d loads in %v, want %d to %d", loads, run, least, most)
				}
			})
		})
	}
}

func TestClocksThatDifferByMoreThanALifeCostLoadsButNeverTwoAtATime(t *testing.T) {
	const life, loadTime, callers, run = 30 * time.Second, 300 * time.Millisecond, 3, 20 * time.Minute
	for name, opts := range map[string]func() *singlefill.Options[string]{
		"no windows": clockOptions(life, 0, 0, time.Second), "refreshed": clockOptions(life, 20*time.Second, 0, time.Second),
		"kept for errors": clockOptions(life, 0, 20*time.Second, time.Second), "both": clockOptions(life, 20*time.Second, 2*time.Minute, time.Second),
	} {
		t.Run(name, func(t *testing.T) {
			eachClock(t, opts, func(t *testing.T, right, wrong *singlefill.Cache[string], _ time.Duration) {
				begun := time.Now()
				var running, loads atomic.Int64
				load := func(context.Context, string) (string, error) {
					if n := running.Add(1); n > 1 {
						t.Errorf("%d loads at a time", n)
					}
					defer running.Add(-1)
					loads.Add(1)
					time.Sleep(loadTime)
					return "v", nil
				}
				var wg sync.WaitGroup
				calls := 0
				for _, c := range []*singlefill.Cache[string]{right, wrong} {
					for i := range callers {
						wg.Go(func() {
							for time.Since(begun) < run {
								sent := time.Now()
								v, err := c.GetOrLoad(t.Context(), "k", load)
								wantValue(t, v, err, "v")
								if took := time.Since(sent); took > 4*loadTime { // a load elsewhere, one here, and polls
									t.Errorf("a call took %v", took)
								}
								time.Sleep(time.Duration(500+77*i) * time.Millisecond)
							}
						})
					}
					calls += callers * int(run/(500*time.Millisecond))
				}
				wg.Wait()
				if n := int(loads.Load()); n < int(run/(life+20*time.Second+clockSkew)) || n > calls/2 {
					t.Errorf("%d loads in %v, %d calls at most", n, run, calls)
				}
				for _, c := range []*singlefill.Cache[string]{right, wrong} {
					if s := c.Stats(); s.RedisErrors+s.BadValues+s.LoadErrors+s.LoadsUnlocked != 0 {
						t.Errorf("%+v, want no trouble", s)
					}
				}
			})
		})
	}
}

//fault:process-clock
func TestExpireIsSeenAtOnceWhateverTheClocks(t *testing.T) {
	const life = 10 * time.Minute
	for name, opts := range map[string]func() *singlefill.Options[string]{
		"no windows": clockOptions(life, 0, 0, time.Second), "refreshed": clockOptions(life, 5*time.Minute, 0, time.Second),
		"kept for errors": clockOptions(life, 0, 5*time.Minute, time.Second),
	} {
		t.Run(name, func(t *testing.T) {
			eachClock(t, opts, func(t *testing.T, right, wrong *singlefill.Cache[string], ahead time.Duration) {
				caches := map[string]*singlefill.Cache[string]{"right": right, "wrong": wrong}
				for writerName, writer := range caches {
					for expirerName, expirer := range caches {
						for readerName, reader := range caches {
							key := fmt.Sprint(writerName, expirerName, readerName)
							if err := writer.Set(t.Context(), key, "old"); err != nil {
								t.Fatal(err)
							}
							time.Sleep(time.Second)
							if err := expirer.Expire(t.Context(), key); err != nil {
								t.Fatal(err)
							}
							v, info, err := reader.GetOrLoadInfo(t.Context(), key, gives("new"))
							if name == "refreshed" {
								if err != nil || v != "old" || !info.Stale {
									t.Errorf("%s: %q, %+v, %v; want the old value, stale", key, v, info, err)
								}
							} else if err != nil || v != "new" {
								t.Errorf("%s: %q, %+v, %v; want the new value", key, v, info, err)
							}
							synctest.Wait()
							goGet(t.Context(), reader, key, gives("newer")).want(t, "new")
						}
					}
				}
			})
		})
	}
}

//fault:server-clock
func TestRetryAfterGoesByTheServersClock(t *testing.T) {
	const life, retryAfter = 10 * time.Minute, 10 * time.Second // less than LockTTL
	for name, opts := range map[string]func() *singlefill.Options[string]{
		"refreshed": clockOptions(life, time.Hour, 0, retryAfter), "kept for errors": clockOptions(life, 0, time.Hour, retryAfter),
	} {
		t.Run(name, func(t *testing.T) {
			eachClock(t, opts, func(t *testing.T, right, wrong *singlefill.Cache[string], _ time.Duration) {
				for key, caches := range map[string][2]*singlefill.Cache[string]{"wrong fails": {wrong, right}, "right fails": {right, wrong}} {
					goGet(t.Context(), right, key, gives("old")).want(t, "old")
					time.Sleep(life + clockSkew)
					var loads []time.Duration
					begun := time.Now()
					load := func(context.Context, string) (string, error) {
						loads = append(loads, time.Since(begun))
						return "", errors.New("boom")
					}
					for ; time.Since(begun) < 2*retryAfter; time.Sleep(time.Second) {
						for _, c := range caches {
							goGet(t.Context(), c, key, load).want(t, "old")
							synctest.Wait()
						}
					}
					// Another process looks again each second, and may have done so just before.
					if len(loads) != 2 || loads[0] != 0 || loads[1] < retryAfter || loads[1] > retryAfter+2*time.Second {
						t.Errorf("%s: the source is asked at %v, want now and after %v", key, loads, retryAfter)
					}
				}
			})
		})
	}
}

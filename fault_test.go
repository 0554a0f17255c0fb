package singlefill_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"slices"
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
)

// In these tests Redis fails. What is asserted throughout: callers get what the source has, in a time that
// RedisTimeout bounds and not the client's own settings; the trouble is counted; and what comes after it is
// what was before it.

const (
	// impatience is the RedisTimeout of a cache that is to give up on Redis.
	impatience = 150 * time.Millisecond

	// patience is the RedisTimeout of a cache that is to see no errors but those that a test has made.
	patience = 3 * time.Second

	// faultBound tells what RedisTimeout bounds from what the client's own settings do: 5 s and more.
	faultBound = 4 * time.Second
)

// A faultSource is what the caches ask when Redis has nothing. It says how often, and how many at once.
type faultSource struct {
	loads, running, most atomic.Int64

	during func(key string) // called by each load; nil: nothing
}

func (s *faultSource) load(_ context.Context, key string) (string, error) {
	s.loads.Add(1)
	n := s.running.Add(1)
	defer s.running.Add(-1)
	for m := s.most.Load(); n > m && !s.most.CompareAndSwap(m, n); m = s.most.Load() {
	}
	if s.during != nil {
		s.during(key)
	}
	return "value of " + key, nil
}

// A faultLog is what Trace has told.
type faultLog struct {
	mu     sync.Mutex
	failed map[string][]error // by op
	opened []bool
	loads  []singlefill.LoadInfo
}

func (l *faultLog) trace() *singlefill.Trace {
	return &singlefill.Trace{
		RedisError: func(_ context.Context, op string, err error) {
			l.mu.Lock()
			defer l.mu.Unlock()
			if l.failed == nil {
				l.failed = make(map[string][]error)
			}
			l.failed[op] = append(l.failed[op], err)
		},
		BreakerChanged: func(open bool) {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.opened = append(l.opened, open)
		},
		LoadDone: func(_ context.Context, info singlefill.LoadInfo) {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.loads = append(l.loads, info)
		},
	}
}

func (l *faultLog) errors() map[string][]error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return maps.Clone(l.failed)
}

func (l *faultLog) count() (n int) {
	for _, errs := range l.errors() {
		n += len(errs)
	}
	return n
}

// said reports whether an error of the operation has the text.
// said reports whether an error of op was told with one of the texts: servers have words of their own.
func (l *faultLog) said(op string, texts ...string) bool {
	return slices.ContainsFunc(l.errors()[op], func(err error) bool {
		return slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(err.Error(), text) })
	})
}

func (l *faultLog) breaker() []bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.opened)
}

func (l *faultLog) done() []singlefill.LoadInfo {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.loads)
}

// A faultCache is a cache, its source and what it has told.
type faultCache struct {
	*singlefill.Cache[string]
	*faultSource
	log *faultLog
	ns  string
	t   testing.TB
}

func newFaultCache(t testing.TB, rdb redis.UniversalClient, ns string, redisTimeout time.Duration, change ...func(*singlefill.Options[string])) *faultCache {
	t.Helper()
	f := &faultCache{faultSource: &faultSource{}, log: &faultLog{}, ns: ns, t: t}
	opts := singlefill.Options[string]{RedisTimeout: redisTimeout, LockTTL: 10 * time.Second, Trace: f.log.trace()}
	for _, c := range change {
		c(&opts)
	}
	var err error
	if f.Cache, err = singlefill.New(rdb, ns, time.Hour, &opts); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// mustLoad asks for key and fails the test unless it gets the right value in time.
func (f *faultCache) mustLoad(key string) {
	f.t.Helper()
	begun := time.Now()
	v, err := f.GetOrLoad(context.Background(), key, f.load)
	if took := time.Since(begun); took > faultBound {
		f.t.Errorf("GetOrLoad(%s) took %v", key, took)
	}
	if err != nil || v != "value of "+key {
		f.t.Fatalf("GetOrLoad(%s) = %q, %v", key, v, err)
	}
}

// mustHit asks for key and fails the test unless Redis has the right value.
func (f *faultCache) mustHit(key string) {
	f.t.Helper()
	if v, err := f.Get(context.Background(), key); err != nil || v != "value of "+key {
		f.t.Errorf("Get(%s) = %q, %v: want a hit", key, v, err)
	}
}

func (f *faultCache) mustMiss(key string) {
	f.t.Helper()
	if v, err := f.Get(context.Background(), key); err != singlefill.ErrMiss {
		f.t.Errorf("Get(%s) = %q, %v: want ErrMiss", key, v, err)
	}
}

func (f *faultCache) value(key string) string { return f.ns + ":{" + key + "}" }
func (f *faultCache) lock(key string) string  { return f.value(key) + ":lock" }

// recovers waits until the cache stores again, without any help but calls for keys never asked for before.
func (f *faultCache) recovers() {
	f.t.Helper()
	redistest.Await(f.t, "the breaker is closed", func() bool { return !f.Stats().BreakerOpen })
	n := 0
	redistest.Await(f.t, "values are cached again", func() bool {
		n++
		key := fmt.Sprintf("afterwards-%d", n)
		f.mustLoad(key)
		_, err := f.Get(context.Background(), key)
		return err == nil
	})
}

// settled waits until the loads are over, of which a caller hears earlier than Trace and Stats.
func (f *faultCache) settled() {
	f.t.Helper()
	redistest.Await(f.t, "each load is over", func() bool { return int(f.Stats().Loads) == len(f.log.done()) })
}

// lastLoad returns what LoadDone was told last.
func (f *faultCache) lastLoad() singlefill.LoadInfo {
	f.t.Helper()
	f.settled()
	done := f.log.done()
	if len(done) == 0 {
		f.t.Fatal("there was no load")
	}
	return done[len(done)-1]
}

func (f *faultCache) wantStats(what string, want int64, got func(singlefill.Stats) int64) {
	f.t.Helper()
	f.settled()
	if n := got(f.Stats()); n != want {
		f.t.Errorf("%s: %d, want %d; %+v; errors %v", what, n, want, f.Stats(), f.log.errors())
	}
}

func (f *faultCache) wantLoads(want int64) {
	f.t.Helper()
	if n := f.loads.Load(); n != want {
		f.t.Errorf("%d loads, want %d", n, want)
	}
}

func (f *faultCache) wantNoErrors() {
	f.t.Helper()
	f.settled()
	if n := f.Stats().RedisErrors; n != 0 || f.log.count() != 0 {
		f.t.Errorf("%d errors of Redis were counted, want none: %v", n, f.log.errors())
	}
}

// wantCounted fails the test unless there were errors, each told once and counted once.
func (f *faultCache) wantCounted() {
	f.t.Helper()
	f.settled()
	if f.log.count() == 0 {
		f.t.Error("no error of Redis was told, want some")
	}
	redistest.Await(f.t, "each error is told once and counted once", func() bool {
		return int(f.Stats().RedisErrors) == f.log.count()
	})
}

// faultExists reports whether a key is there.
func faultExists(t testing.TB, rdb redis.UniversalClient, key string) bool {
	t.Helper()
	n, err := rdb.Exists(context.Background(), key).Result()
	if err != nil {
		t.Fatal(err)
	}
	return n == 1
}

// noImmortalKeys fails the test if any key on the server has no TTL.
func noImmortalKeys(t testing.TB, rdb *redis.Client) {
	t.Helper()
	ctx := context.Background()
	keys, err := rdb.Keys(ctx, "*").Result()
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range keys {
		if ttl, err := rdb.PTTL(ctx, key).Result(); err != nil || ttl == -1 {
			t.Errorf("PTTL of %s = %d, %v", key, ttl, err)
		}
	}
}

// faultAct matches the commands of one act on the fill lock, by the name of its script.
func faultAct(t testing.TB, name string) func(cmd []string) bool {
	t.Helper()
	src, err := os.ReadFile("internal/fill/lua/" + name + ".lua")
	if err != nil {
		t.Fatal(err)
	}
	sha := redis.NewScript(string(src)).Hash()
	return func(cmd []string) bool {
		return len(cmd) > 1 && (strings.EqualFold(cmd[0], "evalsha") && cmd[1] == sha ||
			strings.EqualFold(cmd[0], "eval") && cmd[1] == string(src))
	}
}

// onceOnly makes a client that does not try again by itself.
func onceOnly(o *redis.Options) { o.MaxRetries = -1 }

//fault:unreachable
func TestARedisThatNeverAnswersBreaksNoReadAndIsUsedWhenItIsBack(t *testing.T) {
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
				f := newFaultCache(t, p.Client(t), redistest.Namespace(t), impatience)
				if used == "after use" {
					redistest.Await(t, "a value is cached", func() bool {
						f.mustLoad("k")
						_, err := f.Get(t.Context(), "k")
						return err == nil
					})
				}
				fault.begin(s, p)
				f.loads.Store(0)

				calls := int64(0)
				redistest.Await(t, "the breaker is open", func() bool {
					calls++
					f.mustLoad("k")
					return f.Stats().BreakerOpen
				})
				for range 50 {
					calls++
					f.mustLoad("k")
				}
				f.wantLoads(calls)
				if _, err := f.Get(t.Context(), "k"); err == nil || errors.Is(err, singlefill.ErrMiss) {
					t.Errorf("Get = %v, want an error of Redis", err)
				}
				f.wantCounted()
				f.settled()
				if unlocked := f.Stats().LoadsUnlocked; unlocked != calls || !f.lastLoad().Unlocked {
					t.Errorf("LoadsUnlocked is %d of %d loads, the last one: %+v", unlocked, calls, f.lastLoad())
				}

				fault.end(s, p)
				f.recovers()
				if got := f.log.breaker(); !slices.Equal(got[:2], []bool{true, false}) || f.Stats().BreakerOpens < 1 {
					t.Errorf("Trace.BreakerChanged was told %v, Stats %+v", got, f.Stats())
				}
				noImmortalKeys(t, s.Admin())
			})
		}
	}
}

// A muteDialer gives connections to a miniredis and counts the commands written to them. While mute is set,
// what is written gets lost.
type muteDialer struct {
	m    *miniredis.Miniredis
	mute atomic.Bool

	mu     sync.Mutex
	sent   map[string]int // by name
	muteAt string         // this command sets mute
}

type muteConn struct {
	net.Conn
	d *muteDialer
}

func (d *muteDialer) dial(context.Context, string, string) (net.Conn, error) {
	conn, err := d.m.Dial()
	return &muteConn{conn, d}, err
}

func (c *muteConn) Write(b []byte) (int, error) {
	c.d.count(strings.Split(string(b), "\r\n"))
	if c.d.mute.Load() {
		return len(b), nil
	}
	return c.Conn.Write(b)
}

func (d *muteDialer) count(lines []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i, line := range lines {
		if strings.HasPrefix(line, "*") && i+2 < len(lines) {
			name := strings.ToLower(lines[i+2])
			d.sent[name]++
			if name == d.muteAt {
				d.mute.Store(true)
			}
		}
	}
}

// muteAtNext makes the server silent from the next command of the name on.
func (d *muteDialer) muteAtNext(name string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.muteAt = name
}

// butPing returns how many commands were sent other than the breaker's, and how many connections it tried or
// asked on.
func (d *muteDialer) butPing() (n, pings int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for name, count := range d.sent {
		switch name {
		case "ping", "hello": // of a connection that is dead from the start the breaker sees no more
			pings += count
		default:
			n += count
		}
	}
	return n, pings
}

// muteClient returns a client of a miniredis that can go silent, for use in a bubble.
func muteClient(t testing.TB) (*muteDialer, *redis.Client) {
	m, twin := redistest.StartMini(t)
	d := &muteDialer{m: m, sent: make(map[string]int)}
	opt := *twin.Options()
	opt.Dialer = d.dial
	rdb := redis.NewClient(&opt)
	t.Cleanup(func() { _ = rdb.Close() })
	return d, rdb
}

//fault:unreachable
func TestASilentRedisCostsACallRedisTimeoutAndNothingOnceTheBreakerIsOpen(t *testing.T) {
	t.Parallel()
	const loadTime = 70 * time.Millisecond
	for _, used := range []bool{false, true} {
		t.Run(fmt.Sprintf("connected before=%t", used), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d, rdb := muteClient(t)
				f := newFaultCache(t, rdb, "ns", impatience)
				if used {
					f.mustLoad("before")
					f.mustHit("before")
				}
				f.during = func(string) { time.Sleep(loadTime) }
				d.mute.Store(true)
				call := func(key string) time.Duration {
					begun := time.Now()
					f.mustLoad(key)
					return time.Since(begun)
				}
				calls := 0
				for !f.Stats().BreakerOpen {
					if took := call("k"); took != impatience+loadTime {
						t.Fatalf("call %d took %v, want RedisTimeout and the time of the load", calls, took)
					}
					if calls++; calls > 10 {
						t.Fatal("the breaker does not open")
					}
				}
				f.settled()
				synctest.Wait()
				before, asked := d.butPing()
				for range 100 {
					if took := call("k"); took != loadTime {
						t.Fatalf("with the breaker open, a call took %v, want the time of the load", took)
					}
				}
				after, pings := d.butPing()
				if after != before {
					t.Errorf("%d commands were sent while the breaker was open", after-before)
				}
				if pings == asked {
					t.Error("nobody asked whether Redis is back")
				}
				begun := time.Now()
				if err := f.Delete(t.Context(), "k"); err == nil || time.Since(begun) > impatience {
					t.Errorf("Delete = %v after %v", err, time.Since(begun))
				}

				d.mute.Store(false)
				time.Sleep(2 * impatience) // no call is needed
				if s := f.Stats(); s.BreakerOpen || s.BreakerOpens != 1 {
					t.Fatalf("after Redis was back for two ticks: %+v", s)
				}
				f.mustLoad("k")
				f.mustHit("k")
			})
		})
	}
}

// The read and the lock share one RedisTimeout: who has waited that long for the one does not ask for the other.
//
//fault:silence
func TestASilenceAtAnyStepCostsOneRedisTimeout(t *testing.T) {
	t.Parallel()
	for _, silentAt := range []string{"get", "evalsha", "store"} {
		t.Run(silentAt, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d, rdb := muteClient(t)
				f := newFaultCache(t, rdb, "ns", impatience)
				f.mustLoad("before") // the server knows the scripts from here on
				if silentAt == "store" {
					f.during = func(string) { d.muteAtNext("evalsha") }
				} else {
					d.muteAtNext(silentAt)
				}
				begun := time.Now()
				f.mustLoad("k")
				if took := time.Since(begun); took != impatience {
					t.Errorf("took %v, want %v", took, impatience)
				}
				if !d.mute.Load() {
					t.Error("the fault has not come about")
				}
				f.wantCounted()
				if unlocked := f.lastLoad().Unlocked; unlocked != (silentAt != "store") {
					t.Errorf("LoadInfo.Unlocked = %t", unlocked)
				}
			})
		})
	}
}

//fault:slow-network
func TestASlowRedisIsUsedLikeAFastOne(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	p := redistest.NewProxy(t, s.Addr)
	p.Delay(40 * time.Millisecond)
	ns := redistest.Namespace(t)
	a, b := newFaultCache(t, p.Client(t), ns, patience), newFaultCache(t, p.Client(t), ns, patience)
	b.faultSource = a.faultSource
	loading, loaded := make(chan struct{}), make(chan struct{})
	a.during = func(string) { close(loading); <-loaded }
	var wg sync.WaitGroup
	wg.Go(func() { a.mustLoad("k") })
	<-loading
	wg.Go(func() { b.mustLoad("k") })
	close(loaded)
	wg.Wait()
	a.mustHit("k")
	a.wantLoads(1)
	a.wantNoErrors()
	b.wantNoErrors()
	if p.Commands() == 0 {
		t.Error("nothing went through the proxy")
	}
}

//fault:crash-in-call
func TestARedisThatDiesOnTheWayCostsNoCallItsValue(t *testing.T) {
	t.Parallel()
	// start returns a cache on a server that knows the scripts already.
	start := func(t *testing.T) (*redistest.Server, *redistest.Proxy, *faultCache) {
		t.Parallel()
		s := redistest.Start(t)
		p := redistest.NewProxy(t, s.Addr)
		newFaultCache(t, s.Client(t), "other", patience).mustLoad("k")
		return s, p, newFaultCache(t, p.Client(t), redistest.Namespace(t), impatience)
	}
	// dieAt kills the server when it is to get the command of an act.
	dieAt := func(t *testing.T, act string) {
		s, p, f := start(t)
		rule := p.On(faultAct(t, act), redistest.HoldRequest)
		got := make(chan struct{})
		go func() {
			defer close(got)
			f.mustLoad("k")
		}()
		<-rule.Hit()
		s.Kill()
		rule.Release()
		<-got
		f.wantLoads(1)
		f.wantCounted()
		if act == "store" {
			f.wantStats("StoreErrors", 1, func(s singlefill.Stats) int64 { return s.StoreErrors })
			if info := f.lastLoad(); info.StoreErr == nil || info.Stored || info.Fenced || info.Unlocked || info.Err != nil {
				t.Errorf("Trace.LoadDone was told %+v", info)
			}
		}
		s.Restart()
		f.recovers()
	}
	t.Run("between read and lock", func(t *testing.T) { dieAt(t, "get_or_lock") })
	t.Run("between load and store", func(t *testing.T) { dieAt(t, "store") })
	t.Run("during the load", func(t *testing.T) {
		s, _, f := start(t)
		f.during = func(string) { s.Kill() }
		f.mustLoad("k")
		f.wantLoads(1)
		f.wantCounted()
		f.wantStats("StoreErrors", 1, func(s singlefill.Stats) int64 { return s.StoreErrors })
		f.during = nil
		s.Restart()
		f.recovers()
	})
	t.Run("restarted during the load", func(t *testing.T) {
		s, _, f := start(t)
		f.during = func(string) { s.Restart() }
		f.mustLoad("k")
		f.wantLoads(1)
		f.during = nil
		f.settled()
		// The lock is gone with everything else, so the store is refused, or the client did not get there.
		if st := f.Stats(); st.Stored != 0 || st.Fenced+st.StoreErrors != 1 {
			t.Errorf("%+v", st)
		}
		if faultExists(t, s.Admin(), f.value("k")) || faultExists(t, s.Admin(), f.lock("k")) {
			t.Error("keys are there after the restart")
		}
		f.recovers()
	})
}

//fault:lost-reply
func TestALostReplyOfTheStoreHarmsNobody(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*redis.Options)
	}{
		{"client tries again", func(*redis.Options) {}},
		{"client does not", onceOnly},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := redistest.Start(t)
			p := redistest.NewProxy(t, s.Addr)
			rule := p.On(faultAct(t, "store"), redistest.DropReply).Times(1)
			newFaultCache(t, s.Client(t), "other", patience).mustLoad("k")
			f := newFaultCache(t, p.Client(t, c.change), redistest.Namespace(t), patience)
			var stored string
			f.mustLoad("k")
			<-rule.Hit()
			stored = s.Admin().Get(t.Context(), f.value("k")).Val()
			f.mustLoad("k")
			f.mustHit("k")
			f.wantLoads(1)
			if again := s.Admin().Get(t.Context(), f.value("k")).Val(); stored == "" || again != stored {
				t.Errorf("the entry was %q, and is %q", stored, again)
			}
			if faultExists(t, s.Admin(), f.lock("k")) {
				t.Error("the lock is left behind")
			}
			info := f.lastLoad()
			if c.name == "client tries again" {
				f.wantNoErrors()
				if !info.Stored || info.Fenced || info.StoreErr != nil {
					t.Errorf("Trace.LoadDone was told %+v", info)
				}
			} else {
				f.wantCounted()
				if info.Fenced || info.Err != nil {
					t.Errorf("Trace.LoadDone was told %+v", info)
				}
			}
			noImmortalKeys(t, s.Admin())
		})
	}
}

//fault:lost-reply
func TestALostReplyOfTheLockLocksNobodyOut(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*redis.Options)
		action redistest.Action
	}{
		{"client tries again", func(*redis.Options) {}, redistest.DropReply},
		{"client does not", onceOnly, redistest.DropReply},
		{"connection stays open, client tries again", func(*redis.Options) {}, redistest.MuteReply},
		{"connection stays open, client does not", onceOnly, redistest.MuteReply},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := redistest.Start(t)
			p := redistest.NewProxy(t, s.Addr)
			rule := p.On(faultAct(t, "get_or_lock"), c.action).Times(1)
			ns := redistest.Namespace(t)
			newFaultCache(t, s.Client(t), "other", patience).mustLoad("k")
			f := newFaultCache(t, p.Client(t, c.change), ns, 600*time.Millisecond)
			f.mustLoad("k")
			<-rule.Hit()
			f.wantLoads(1)
			if !f.lastLoad().Unlocked {
				f.mustHit("k")
			}
			if c.name == "client tries again" {
				f.mustHit("k")
				f.wantNoErrors()
			} else if strings.HasSuffix(c.name, "does not") {
				f.wantCounted()
			}
			redistest.Await(t, "the leaked lock is not held any more", func() bool {
				return !strings.HasPrefix(s.Admin().Get(t.Context(), f.lock("k")).Val(), "H")
			})
			if err := f.Delete(t.Context(), "k"); err != nil {
				t.Fatal(err)
			}
			other := newFaultCache(t, s.Client(t), ns, patience)
			other.mustLoad("k")
			other.wantLoads(1)
			other.wantStats("Waits", 0, func(s singlefill.Stats) int64 { return s.Waits })
			other.mustHit("k")
			noImmortalKeys(t, s.Admin())
		})
	}
}

//fault:late-command
func TestALockCommandThatArrivesAfterItsCallerHasGivenUpTakesNothing(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	p := redistest.NewProxy(t, s.Addr)
	ns := redistest.Namespace(t)
	newFaultCache(t, s.Client(t), "other", patience).mustLoad("k")
	rule := p.On(faultAct(t, "get_or_lock"), redistest.HoldRequest).Times(1)
	f := newFaultCache(t, p.Client(t, onceOnly), ns, impatience)
	f.mustLoad("k")
	<-rule.Hit()
	f.wantLoads(1)
	redistest.Await(t, "the attempt is marked as abandoned", func() bool {
		return strings.HasPrefix(s.Admin().Get(t.Context(), f.lock("k")).Val(), "X")
	})
	before := s.Calls("evalsha")
	rule.Release()
	redistest.Await(t, "the late command is executed", func() bool { return s.Calls("evalsha") > before })
	if lock := s.Admin().Get(t.Context(), f.lock("k")).Val(); !strings.HasPrefix(lock, "X") {
		t.Errorf("the lock key holds %q", lock)
	}
	other := newFaultCache(t, s.Client(t), ns, patience)
	other.mustLoad("k")
	other.wantStats("Waits", 0, func(s singlefill.Stats) int64 { return s.Waits })
	other.mustHit("k")
	noImmortalKeys(t, s.Admin())
}

// The same, where a second try has been answered: the first one is still to be refused when all is over.
//
//fault:late-command
func TestALockCommandThatArrivesAfterTheLoadTakesNothing(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	p := redistest.NewProxy(t, s.Addr)
	newFaultCache(t, s.Client(t), "other", patience).mustLoad("k")
	rule := p.On(faultAct(t, "get_or_lock"), redistest.HoldRequest).Times(1)
	f := newFaultCache(t, p.Client(t, onceOnly), redistest.Namespace(t), patience)
	loaded := make(chan struct{})
	go func() {
		defer close(loaded)
		f.mustLoad("k")
	}()
	<-rule.Hit()
	p.Cut() // the client tries again, on another connection
	<-loaded
	if info := f.lastLoad(); !info.Stored {
		t.Fatalf("the second try has not led to a load under the lock: %+v", info)
	}
	redistest.Await(t, "the attempt is marked as abandoned", func() bool {
		return strings.HasPrefix(s.Admin().Get(t.Context(), f.lock("k")).Val(), "X")
	})
	before := s.Calls("evalsha")
	rule.Release()
	redistest.Await(t, "the late command is executed", func() bool { return s.Calls("evalsha") > before })
	if lock := s.Admin().Get(t.Context(), f.lock("k")).Val(); strings.HasPrefix(lock, "H") {
		t.Errorf("the lock key holds %q", lock)
	}
	f.mustHit("k")
	f.wantLoads(1)
	noImmortalKeys(t, s.Admin())
}

// A release that was held up must not hit whoever has the lock by then, nor a renewal bring a lock back.
//
//fault:late-command
func TestACommandThatArrivesLateTouchesNobodyElsesLock(t *testing.T) {
	t.Parallel()
	for _, act := range []string{"release", "renew", "store"} {
		t.Run(act, func(t *testing.T) {
			t.Parallel()
			s := redistest.Start(t)
			p := redistest.NewProxy(t, s.Addr)
			ns := redistest.Namespace(t)
			boom := errors.New("boom")
			options := func(o *singlefill.Options[string]) { o.LockTTL = 500 * time.Millisecond }
			warm := newFaultCache(t, s.Client(t), "other", impatience, options)
			warm.mustLoad("k")
			_, _ = warm.GetOrLoad(t.Context(), "e", func(context.Context, string) (string, error) { return "", boom })

			f := newFaultCache(t, p.Client(t, onceOnly), ns, impatience, options)
			rule := p.On(faultAct(t, act), redistest.HoldRequest).Times(1)
			finish := make(chan struct{})
			done := make(chan struct{})
			go func() {
				defer close(done)
				_, err := f.GetOrLoad(context.Background(), "k", func(context.Context, string) (string, error) {
					if act == "renew" {
						<-rule.Hit()
					}
					<-finish
					if act == "release" {
						return "", boom
					}
					return "old", nil
				})
				if act == "release" && err != boom || act != "release" && err != nil {
					t.Errorf("GetOrLoad = %v", err)
				}
			}()
			if act != "renew" {
				close(finish)
			}
			<-rule.Hit()
			// Somebody deletes the key, and another process takes the lock.
			admin := s.Admin()
			if err := admin.Del(t.Context(), f.value("k"), f.lock("k")).Err(); err != nil {
				t.Fatal(err)
			}
			other := newFaultCache(t, s.Client(t), ns, impatience, func(o *singlefill.Options[string]) { o.LockTTL = 20 * time.Second })
			var held string
			other.during = func(key string) {
				held = admin.Get(context.Background(), other.lock(key)).Val()
				before := s.Calls("evalsha")
				rule.Release()
				redistest.Await(t, "the late command is executed", func() bool { return s.Calls("evalsha") > before })
				now := admin.Get(context.Background(), other.lock(key)).Val()
				if !strings.HasPrefix(held, "H") || now != held {
					t.Errorf("the lock held %q, and holds %q after a late %s", held, now, act)
				}
				if left := admin.PTTL(context.Background(), other.lock(key)).Val(); left < 10*time.Second {
					t.Errorf("a late %s left the lock %v to live", act, left)
				}
			}
			other.mustLoad("k")
			if act == "renew" {
				close(finish)
			}
			<-done
			other.mustHit("k")
			other.wantLoads(1)
			noImmortalKeys(t, admin)
		})
	}
}

//fault:flushall
func TestAFlushInMidLoadCostsTheEntryAndNothingElse(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	f := newFaultCache(t, s.Client(t), redistest.Namespace(t), patience)
	f.during = func(key string) {
		if !strings.HasPrefix(s.Admin().Get(context.Background(), f.lock(key)).Val(), "H") {
			t.Error("the lock is not held during the load")
		}
		if err := s.Admin().FlushAll(context.Background()).Err(); err != nil {
			t.Error(err)
		}
	}
	f.mustLoad("k")
	f.during = nil
	f.wantLoads(1)
	f.wantNoErrors()
	f.wantStats("Fenced", 1, func(s singlefill.Stats) int64 { return s.Fenced })
	f.wantStats("Stored", 0, func(s singlefill.Stats) int64 { return s.Stored })
	f.mustMiss("k")
	if n := s.Admin().DBSize(t.Context()).Val(); n != 0 {
		t.Errorf("%d keys are there", n)
	}
	f.mustLoad("k")
	f.mustHit("k")
	f.wantLoads(2)
}

//fault:flushall
func TestARestartCostsTheEntriesAndNothingElse(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	f := newFaultCache(t, s.Client(t), redistest.Namespace(t), patience)
	f.mustLoad("k")
	f.mustHit("k")
	s.Restart()
	f.mustLoad("k") // by EVAL: the script is unknown
	f.mustHit("k")
	f.wantLoads(2)
	if s.Calls("eval") == 0 {
		t.Error("the server has not forgotten the scripts")
	}
}

//fault:refused-writes
func TestWithoutMemoryHitsWorkMissesLoadAndNoLockStays(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	admin := s.Admin()
	full := func(on bool) {
		limit := "0"
		if on {
			limit = "1"
		}
		if err := admin.ConfigSet(context.Background(), "maxmemory", limit).Err(); err != nil {
			t.Error(err)
		}
	}
	f := newFaultCache(t, s.Client(t), redistest.Namespace(t), patience)
	f.mustLoad("kept")
	f.mustLoad("deleted")

	full(true)
	f.mustHit("kept")
	f.mustLoad("kept")
	f.wantLoads(2)
	for i := range 20 {
		f.mustLoad(fmt.Sprintf("missing-%d", i))
	}
	f.wantLoads(22)
	f.wantCounted()
	if !f.log.said("lock", "OOM") {
		t.Errorf("want an OOM for the lock, were told %v", f.log.errors())
	}
	if f.Stats().BreakerOpens != 0 {
		t.Error("a refusal has opened the breaker")
	}
	if err := f.Set(t.Context(), "kept", "v"); err == nil {
		t.Error("Set = nil without memory")
	}
	if err := f.Delete(t.Context(), "deleted"); err != nil {
		t.Errorf("Delete = %v: it needs no memory", err)
	}
	f.mustMiss("deleted")

	// The memory may also run out between lock and store.
	boom := errors.New("boom")
	for _, want := range []error{nil, boom, singlefill.ErrNotFound} {
		full(false)
		key := fmt.Sprintf("loading-%v", want)
		_, err := f.GetOrLoad(t.Context(), key, func(context.Context, string) (string, error) {
			if !faultExists(t, admin, f.lock(key)) {
				t.Error("no lock is held")
			}
			full(true)
			return "v", want
		})
		if err != want {
			t.Errorf("GetOrLoad = %v, want %v", err, want)
		}
		if faultExists(t, admin, f.lock(key)) {
			t.Errorf("the lock of a load that ended with %v is left behind", want)
		}
		f.mustMiss(key)
	}
	f.wantStats("StoreErrors", 2, func(s singlefill.Stats) int64 { return s.StoreErrors })

	full(false)
	f.mustLoad("missing-0")
	f.mustHit("missing-0")
	noImmortalKeys(t, admin)
}

//fault:replica
func TestAReplicaAsTheOnlyServerIsReadAndNotWritten(t *testing.T) {
	t.Parallel()
	master := redistest.Start(t)
	replica := redistest.StartReplica(t, master)
	ns := redistest.Namespace(t)
	w := newFaultCache(t, master.Client(t), ns, patience)
	w.mustLoad("kept")
	f := newFaultCache(t, replica.Client(t), ns, impatience)
	redistest.Await(t, "the replica has the entry", func() bool { return faultExists(t, replica.Admin(), f.value("kept")) })
	f.mustHit("kept")
	f.wantNoErrors()
	for range 2 * breakerLimit {
		f.mustLoad("missing")
	}
	f.wantLoads(2 * breakerLimit)
	f.wantCounted()
	if !f.log.said("lock", "READONLY", "can't write against a read only") {
		t.Errorf("want READONLY for the lock, were told %v", f.log.errors())
	}
	if err := f.Delete(t.Context(), "kept"); err == nil {
		t.Error("Delete on a replica = nil")
	}
	if err := f.Set(t.Context(), "kept", "v"); err == nil {
		t.Error("Set on a replica = nil")
	}
	w.mustHit("kept")
	if f.Stats().BreakerOpens != 0 {
		t.Error("a refusal has opened the breaker: hits would be lost")
	}
	f.mustHit("kept")
}

// breakerLimit is how many failures in a row open the breaker.
const breakerLimit = 5

//fault:script-flush
func TestScriptFlushesAreNotSeen(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	ns := redistest.Namespace(t)
	caches := []*faultCache{newFaultCache(t, s.Client(t), ns, patience), newFaultCache(t, s.Client(t), ns, patience)}
	caches[1].faultSource = caches[0].faultSource
	flush := func() {
		if err := s.Admin().ScriptFlush(context.Background()).Err(); err != nil {
			t.Error(err)
		}
	}
	keys := int64(0)
	load := func() {
		keys++
		var wg sync.WaitGroup
		for _, f := range caches {
			for range 5 {
				wg.Go(func() { f.mustLoad(fmt.Sprintf("k%d", keys)) })
			}
		}
		wg.Wait()
	}

	for range 5 {
		load()
		flush()
	}
	caches[0].during = func(string) { flush() }
	for range 5 {
		load()
	}
	caches[0].during = nil
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
	s.ResetCalls()
	for range 100 {
		load()
	}
	close(stop)
	<-stopped

	if s.Calls("script|flush") < 10 || s.Calls("eval") == 0 {
		t.Errorf("the fault has not come about: %v", s.AllCalls())
	}
	caches[0].wantLoads(keys)
	for _, f := range caches {
		f.wantNoErrors()
	}
	noImmortalKeys(t, s.Admin())
}

//fault:missing-right
func TestWithoutARightReadsAreAnsweredAndWritesSayWhatIsMissing(t *testing.T) {
	for _, c := range []struct {
		rule    string // an ACL rule, on top of all rights
		quiet   bool   // nothing is missing that cannot be done in another way
		cached  bool   // what is loaded is stored
		deletes bool   // Delete works
		sets    bool   // Set works
	}{
		{rule: "-@scripting", quiet: true, cached: true, deletes: true, sets: true},
		{rule: "-evalsha", quiet: true, cached: true, deletes: true, sets: true},
		{rule: "-eval", quiet: true, cached: true, deletes: true, sets: true},
		{rule: "-ping", quiet: true, cached: true, deletes: true, sets: true},
		{rule: "-multi", quiet: true, cached: true, deletes: true},
		{rule: "-get", deletes: true, sets: true},
		{rule: "-set", deletes: true},
		{rule: "-del", cached: true},
		{rule: "-@scripting -watch", deletes: true, sets: true},
		{rule: "-@scripting -get", deletes: true, sets: true},
		{rule: "-@scripting -exec", deletes: true},
		{rule: "-@write"},
		{rule: "resetkeys ~other:*"},
		{rule: "resetkeys %R~*"}, // a user that may only read
		{rule: "-@all"},
		{rule: "off"}, // and so not even the password is right
	} {
		t.Run(c.rule, func(t *testing.T) {
			t.Parallel()
			s := redistest.Start(t)
			admin := s.Admin()
			rules := []any{"acl", "setuser", "app", "on", ">pw", "~*", "&*", "+@all"}
			for rule := range strings.FieldsSeq(c.rule) {
				rules = append(rules, rule)
			}
			if err := admin.Do(t.Context(), rules...).Err(); err != nil {
				t.Fatal(err)
			}
			asUser := func(o *redis.Options) { o.Username, o.Password = "app", "pw" }
			ns := redistest.Namespace(t)
			a, b := newFaultCache(t, s.Client(t, asUser), ns, patience), newFaultCache(t, s.Client(t, asUser), ns, patience)

			if c.cached { // two processes at once: the load ends when the second one is known to wait for it
				var wg sync.WaitGroup
				a.during = func(string) {
					before := s.Calls("pttl")
					wg.Go(func() { b.mustLoad("k") })
					redistest.Await(t, "the other process has seen the lock", func() bool { return s.Calls("pttl") > before })
				}
				a.mustLoad("k")
				wg.Wait()
				a.mustHit("k")
				a.during = nil
			}
			for i := range 2 * breakerLimit {
				a.mustLoad("k")
				b.mustLoad(fmt.Sprintf("k%d", i%2))
			}
			if c.cached {
				a.wantLoads(1)
				b.wantLoads(2)
			} else {
				a.wantLoads(2 * breakerLimit)
				b.wantLoads(2 * breakerLimit)
			}
			if c.quiet {
				a.wantNoErrors()
				b.wantNoErrors()
			} else {
				a.wantCounted()
			}
			if held := faultExists(t, admin, a.lock("k")); held && c.rule != "-del" {
				t.Error("the lock is left behind")
			}

			// Who may not write is told so. Where Delete works, it fences a load.
			if err := a.Delete(t.Context(), "k"); (err == nil) != c.deletes {
				t.Errorf("Delete = %v", err)
			}
			a.during = func(key string) {
				if err := b.Delete(context.Background(), key); (err == nil) != c.deletes {
					t.Errorf("Delete = %v", err)
				}
			}
			a.mustLoad("fenced")
			a.settled()
			if held := faultExists(t, admin, a.value("fenced")); held && c.deletes {
				t.Error("a value was stored that was deleted during its load")
			}
			if err := a.Set(t.Context(), "k", "set"); (err == nil) != c.sets {
				t.Errorf("Set = %v", err)
			}
			noImmortalKeys(t, admin)
			for _, f := range []*faultCache{a, b} {
				if f.Stats().BreakerOpens != 0 {
					t.Errorf("a refusal has opened the breaker: %v", f.log.errors())
				}
			}
		})
	}
}

// A faultRun is a server and how to bring trouble over it and end it.
type faultRun struct {
	rdb        *redis.Client
	begin, end func()
}

// faultDo returns a function that sends admin a command, of which only the success matters.
func faultDo(t testing.TB, admin *redis.Client) func(args ...any) {
	return func(args ...any) {
		t.Helper()
		if err := admin.Do(context.Background(), args...).Err(); err != nil {
			t.Errorf("%v: %v", args, err)
		}
	}
}

// patientOnce makes a client for one command that takes its time.
func patientOnce(o *redis.Options) { o.MaxRetries, o.ReadTimeout = -1, -1 }

func startLoading(t *testing.T) faultRun {
	s := redistest.Start(t)
	do := faultDo(t, s.Admin())
	return faultRun{s.Client(t), func() {
		do("debug", "populate", 10000)
		do("save")
		do("config", "set", "key-load-delay", "200")
		do("config", "set", "loading-process-events-interval-bytes", "1024")
		once, asks := s.Client(t, patientOnce), s.Client(t, onceOnly)
		reloaded := make(chan struct{})
		t.Cleanup(func() { <-reloaded })
		go func() {
			defer close(reloaded)
			once.Do(context.Background(), "debug", "reload", "nosave")
		}()
		redistest.Await(t, "the server is loading", func() bool {
			return redis.IsLoadingError(asks.Ping(context.Background()).Err())
		})
	}, func() {}}
}

func startBusy(t *testing.T) faultRun {
	s := redistest.Start(t, "--busy-reply-threshold", "20")
	looped := make(chan struct{})
	return faultRun{s.Client(t), func() {
		once, asks := s.Client(t, patientOnce), s.Client(t, onceOnly)
		go func() {
			defer close(looped)
			once.Do(context.Background(), "eval", "while true do end", 0)
		}()
		redistest.Await(t, "the server is busy", func() bool {
			return redis.HasErrorPrefix(asks.Ping(context.Background()).Err(), "BUSY")
		})
	}, func() {
		faultDo(t, s.Admin())("script", "kill")
		<-looped
	}}
}

func startMasterDown(t *testing.T) faultRun {
	master := redistest.Start(t)
	replica := redistest.StartReplica(t, master)
	do := faultDo(t, replica.Admin())
	do("config", "set", "replica-serve-stale-data", "no")
	do("config", "set", "replica-read-only", "no")
	return faultRun{replica.Client(t), func() {
		master.Kill()
		asks := replica.Client(t, onceOnly)
		redistest.Await(t, "the master is down", func() bool {
			return redis.IsMasterDownError(asks.Get(context.Background(), "x").Err())
		})
	}, func() { do("replicaof", "no", "one") }}
}

func startNoReplicas(t *testing.T) faultRun {
	s := redistest.Start(t)
	do := faultDo(t, s.Admin())
	return faultRun{s.Client(t),
		func() { do("config", "set", "min-replicas-to-write", "1") },
		func() { do("config", "set", "min-replicas-to-write", "0") },
	}
}

func startTooManyClients(t *testing.T) faultRun {
	s := redistest.Start(t)
	do := faultDo(t, s.Admin())
	return faultRun{s.Client(t), func() {
		do("config", "set", "maxclients", "1")
		do("client", "kill", "type", "normal", "skipme", "yes")
	}, func() { do("config", "set", "maxclients", "1000") }}
}

//fault:busy-server
func TestAServerThatIsBusyWithItselfBreaksNoRead(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, says string // "": the connection may be gone before the reply is read
		opens      bool   // the breaker, since the server answers nothing at all
		start      func(t *testing.T) faultRun
	}{
		{"loading", "LOADING", true, startLoading},
		{"busy", "BUSY", true, startBusy},
		{"master down", "MASTERDOWN", true, startMasterDown},
		{"no replicas", "NOREPLICAS", false, startNoReplicas},
		{"too many clients", "", true, startTooManyClients},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			run := c.start(t)
			f := newFaultCache(t, run.rdb, redistest.Namespace(t), 300*time.Millisecond)
			redistest.Await(t, "a value is cached", func() bool {
				f.mustLoad("kept")
				_, err := f.Get(t.Context(), "kept")
				return err == nil
			})
			run.begin()
			n := 0
			redistest.Await(t, "the breaker is open, or there were refusals enough to open it", func() bool {
				n++
				f.mustLoad(fmt.Sprintf("k%d", n))
				return f.Stats().BreakerOpen || !c.opens && n > 2*breakerLimit
			})
			if err := f.Delete(t.Context(), "k1"); err == nil {
				t.Error("Delete = nil")
			}
			if !c.opens {
				f.mustHit("kept")
				f.wantStats("BreakerOpens", 0, func(s singlefill.Stats) int64 { return s.BreakerOpens })
			}
			f.wantCounted()
			if !f.log.said("lock", c.says) && !f.log.said("get", c.says) {
				t.Errorf("want %s, were told %v", c.says, f.log.errors())
			}
			run.end()
			f.recovers()
		})
	}
}

// Set is a transaction, and EXEC alone says no more than that something was wrong before it.
//
//fault:busy-server
func TestSetSaysWhyItWasRefused(t *testing.T) {
	t.Parallel()
	t.Run("out of memory", func(t *testing.T) {
		t.Parallel()
		s := redistest.Start(t)
		f := newFaultCache(t, s.Client(t), redistest.Namespace(t), patience)
		faultDo(t, s.Admin())("config", "set", "maxmemory", "1")
		if err := f.Set(t.Context(), "k", "v"); !redis.IsOOMError(err) {
			t.Errorf("Set = %v, want an OOM", err)
		}
	})
	t.Run("busy", func(t *testing.T) {
		t.Parallel()
		run := startBusy(t)
		f := newFaultCache(t, run.rdb, redistest.Namespace(t), impatience)
		run.begin()
		defer run.end()
		redistest.Await(t, "the breaker is open", func() bool { // as it would be for any other command
			if err := f.Set(t.Context(), "k", "v"); err == nil {
				t.Error("Set = nil")
			}
			return f.Stats().BreakerOpen
		})
	})
}

//fault:frozen-node
//fault:dead-node
func TestOneDeadNodeOfAClusterCostsOnlyItsOwnSlots(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t)
	for _, node := range cluster.Nodes {
		faultDo(t, node.Admin())("config", "set", "cluster-require-full-coverage", "no")
	}
	f := newFaultCache(t, cluster.Client(t), redistest.Namespace(t), 300*time.Millisecond)
	const each = 6
	var living, dead []string
	for i := 0; len(living) < each || len(dead) < each; i++ {
		key := fmt.Sprintf("k%d", i)
		redistest.Await(t, "the value is cached", func() bool {
			f.mustLoad(key)
			_, err := f.Get(t.Context(), key)
			return err == nil
		})
		if faultOwns(t, cluster.Nodes[1], f.value(key)) {
			dead = append(dead, key)
		} else {
			living = append(living, key)
		}
	}
	cluster.Nodes[1].Kill()

	redistest.Await(t, "a round in which all that is on living nodes is a hit", func() bool {
		ok := true
		for i := range each {
			f.mustLoad(dead[i])
			before := f.loads.Load()
			f.mustLoad(living[i])
			ok = ok && f.loads.Load() == before
		}
		return ok
	})
	f.wantCounted()
	if err := f.Delete(t.Context(), dead[0]); err == nil {
		t.Error("Delete of a key on a dead node = nil")
	}
	if err := f.Delete(t.Context(), append(living, dead...)...); err == nil {
		t.Error("Delete of keys on all nodes = nil")
	}
	for _, key := range living { // deleted, and loaded and stored again
		f.mustLoad(key)
		if _, err := f.Get(t.Context(), key); err != nil {
			t.Errorf("a key on a living node: %v", err)
		}
	}
}

// faultOwns reports whether the node of a cluster has the slot of a key.
func faultOwns(t testing.TB, node *redistest.Server, key string) bool {
	t.Helper()
	err := node.Admin().Get(context.Background(), key).Err()
	if _, moved := redis.IsMovedError(err); moved {
		return false
	}
	if err != nil {
		t.Fatal(err)
	}
	return true
}

//fault:unreachable
func TestWithoutRedisEachProcessLoadsOneAtATimeAndAllGetTheValue(t *testing.T) {
	t.Parallel()
	const caches, callers = 4, 100
	synctest.Test(t, func(t *testing.T) {
		d, rdb := muteClient(t)
		d.mute.Store(true)
		var fs []*faultCache
		for range caches {
			f := newFaultCache(t, rdb, "ns", impatience)
			f.during = func(string) { time.Sleep(time.Second) }
			fs = append(fs, f)
		}
		begun := time.Now()
		var wg sync.WaitGroup
		for _, f := range fs {
			for range callers {
				wg.Go(func() { f.mustLoad("k") })
			}
		}
		wg.Wait()
		if took := time.Since(begun); took != impatience+time.Second {
			t.Errorf("took %v, want RedisTimeout and one load", took)
		}
		for _, f := range fs {
			f.wantLoads(1)
		}
		for range callers { // one after another: they join the load that runs
			for _, f := range fs {
				wg.Go(func() { f.mustLoad("k") })
			}
			time.Sleep(30 * time.Millisecond)
		}
		wg.Wait()
		for _, f := range fs {
			if most := f.most.Load(); most != 1 {
				t.Errorf("%d loads of one key ran at once in one process", most)
			}
			if n := f.loads.Load(); n > 4 {
				t.Errorf("%d loads in 4 s at 1 s each", n)
			}
		}
	})
}

//fault:unreachable
func TestMaxLoadsHoldsWithoutRedis(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d, rdb := muteClient(t)
		d.mute.Store(true)
		f := newFaultCache(t, rdb, "ns", impatience, func(o *singlefill.Options[string]) { o.MaxLoads = 3 })
		f.during = func(string) { time.Sleep(100 * time.Millisecond) }
		begun := time.Now()
		var wg sync.WaitGroup
		for i := range 60 {
			wg.Go(func() { // not mustLoad: the last one waits for twenty loads
				key := fmt.Sprintf("k%d", i)
				if v, err := f.GetOrLoad(t.Context(), key, f.load); err != nil || v != "value of "+key {
					t.Errorf("GetOrLoad = %q, %v", v, err)
				}
			})
		}
		wg.Wait()
		if most := f.most.Load(); most != 3 {
			t.Errorf("%d loads ran at once, MaxLoads is 3", most)
		}
		if took, want := time.Since(begun), impatience+20*100*time.Millisecond; took != want {
			t.Errorf("took %v, want %v", took, want)
		}
		f.wantLoads(60)
	})
}

//fault:unreachable-delete
func TestDeleteAndSetWithoutRedisSaySoAndLaterCallersHereLoadAnew(t *testing.T) {
	t.Parallel()
	for _, act := range []string{"delete", "set"} {
		t.Run(act, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d, rdb := muteClient(t)
				d.mute.Store(true)
				f := newFaultCache(t, rdb, "ns", impatience)
				var version, loads atomic.Int64
				finish := make(chan struct{})
				load := func(context.Context, string) (string, error) {
					v := fmt.Sprintf("v%d", version.Load())
					if loads.Add(1) == 1 {
						<-finish
					}
					return v, nil
				}
				first := make(chan string)
				go func() {
					v, err := f.GetOrLoad(context.Background(), "k", load)
					if err != nil {
						t.Error(err)
					}
					first <- v
				}()
				time.Sleep(2 * impatience)
				if loads.Load() != 1 {
					t.Fatal("the first load is not under way")
				}

				version.Store(1)
				begun := time.Now()
				var err error
				if act == "delete" {
					err = f.Delete(t.Context(), "k")
				} else {
					err = f.Set(t.Context(), "k", "v1")
				}
				if took := time.Since(begun); err == nil || took > impatience {
					t.Errorf("%s = %v after %v", act, err, took)
				}
				if v, err := f.GetOrLoad(t.Context(), "k", load); v != "v1" || err != nil {
					t.Errorf("a caller that came later got %q, %v", v, err)
				}
				close(finish)
				if v := <-first; v != "v0" {
					t.Errorf("the caller that came first got %q", v)
				}
			})
		})
	}
}

// A load that begins while a Set, Delete or Expire is being sent may be older than it: later callers do not join it.
//
//fault:failed-delete
func TestInvalidation_LoadDuringCommand(t *testing.T) {
	t.Parallel()
	for act, do := range map[string]func(context.Context, *faultCache) error{
		"delete": func(ctx context.Context, f *faultCache) error { return f.Delete(ctx, "k") },
		"expire": func(ctx context.Context, f *faultCache) error { return f.Expire(ctx, "k") },
		"set":    func(ctx context.Context, f *faultCache) error { return f.Set(ctx, "k", "v1") },
	} {
		t.Run(act, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d, rdb := muteClient(t)
				d.mute.Store(true)
				f := newFaultCache(t, rdb, "ns", impatience)
				for i := 0; !f.Stats().BreakerOpen; i++ {
					f.mustLoad(fmt.Sprint("other", i))
				}
				done := make(chan error, 1)
				go func() { done <- do(t.Context(), f) }()
				time.Sleep(impatience / 2) // the command has been sent
				finish := make(chan struct{})
				older := goGet(t.Context(), f.Cache, "k", func(context.Context, string) (string, error) {
					<-finish
					return "older", nil
				})
				synctest.Wait()
				if err := <-done; err == nil || f.Stats().Loading != 1 {
					t.Fatalf("%s = %v, with %d loads running", act, err, f.Stats().Loading)
				}
				if v, err := f.GetOrLoad(t.Context(), "k", gives("newer")); v != "newer" || err != nil {
					t.Errorf("a caller that came later got %q, %v", v, err)
				}
				close(finish)
				older.want(t, "older")
			})
		})
	}
}

//fault:unreachable-delete
func TestDeleteOfManyKeysWithoutRedisTakesOneRedisTimeout(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d, rdb := muteClient(t)
		d.mute.Store(true)
		f := newFaultCache(t, rdb, "ns", impatience)
		var keys []string
		for i := range 200 {
			keys = append(keys, fmt.Sprintf("k%d", i))
		}
		begun := time.Now()
		if err := f.Delete(t.Context(), keys...); err == nil || time.Since(begun) != impatience {
			t.Errorf("Delete = %v after %v, want an error after %v", err, time.Since(begun), impatience)
		}
	})
}

//fault:flapping
func TestAFlappingServerNeverLeavesTheBreakerStuck(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	p := redistest.NewProxy(t, s.Addr)
	quick := func(o *redis.Options) { o.MaxRetries, o.DialerRetries, o.PoolSize = -1, 1, 200 }
	f := newFaultCache(t, p.Client(t, quick), redistest.Namespace(t), 50*time.Millisecond, func(o *singlefill.Options[string]) {
		o.LockTTL = 200 * time.Millisecond // of a lock that was taken by a command cut off, and can only expire
	})
	var stop atomic.Bool
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := 0; !stop.Load(); i++ {
				f.mustLoad(fmt.Sprintf("k%d-%d", g, i%50))
			}
		})
	}
	defer wg.Wait()
	defer stop.Store(true)
	const times = 20
	for range times {
		before := f.Stats().BreakerOpens
		p.Refuse(true)
		redistest.Await(t, "the breaker opens", func() bool {
			p.Cut() // again: a connection may just have been accepted
			return f.Stats().BreakerOpens > before
		})
		p.Refuse(false)
		redistest.Await(t, "the breaker closes", func() bool { return !f.Stats().BreakerOpen })
	}
	stop.Store(true)
	wg.Wait()
	f.recovers()
	redistest.Await(t, "the last change of the breaker is told", func() bool { return len(f.log.breaker())%2 == 0 })
	told := f.log.breaker()
	for i, open := range told {
		if open != (i%2 == 0) {
			t.Fatalf("Trace.BreakerChanged was told %v", told)
		}
	}
	if n := f.Stats().BreakerOpens; n < times || len(told) != int(2*n) {
		t.Errorf("the breaker has opened %d times, Trace.BreakerChanged was told %d changes", n, len(told))
	}
}

// Who is less patient than RedisTimeout leaves before anything is known; what was asked for goes on and counts.
//
//fault:impatient-callers
func TestImpatientCallersOpenTheBreakerAndThenGetValues(t *testing.T) {
	t.Parallel()
	const deadline = 20 * time.Millisecond
	synctest.Test(t, func(t *testing.T) {
		d, rdb := muteClient(t)
		d.mute.Store(true)
		f := newFaultCache(t, rdb, "ns", impatience)
		call := func(i int) error {
			ctx, cancel := context.WithTimeout(t.Context(), deadline)
			defer cancel()
			begun := time.Now()
			v, err := f.GetOrLoad(ctx, fmt.Sprintf("k%d", i), f.load)
			switch took := time.Since(begun); {
			case err == nil && v != fmt.Sprintf("value of k%d", i):
				t.Errorf("GetOrLoad = %q", v)
			case err != nil && (err != context.DeadlineExceeded || took != deadline):
				t.Errorf("GetOrLoad = %v after %v, want DeadlineExceeded after %v", err, took, deadline)
			}
			return err
		}
		begun := time.Now()
		calls := 0
		for !f.Stats().BreakerOpen {
			if call(calls) == nil {
				t.Fatal("a value came before the breaker was open")
			}
			if calls++; time.Since(begun) > 2*impatience {
				t.Fatal("the breaker does not open")
			}
		}
		if calls < breakerLimit {
			t.Errorf("the breaker is open after %d calls", calls)
		}
		for i := range 50 {
			if err := call(1000 + i); err != nil {
				t.Fatalf("with the breaker open: %v", err)
			}
		}
	})
}

//fault:sentinel
func TestAFailoverCostsTheTimeItTakes(t *testing.T) {
	t.Parallel()
	master := redistest.Start(t)
	replica := redistest.StartReplica(t, master)
	sentinel := redistest.StartSentinel(t, master)
	rdb := redis.NewFailoverClient(&redis.FailoverOptions{
		MasterName: redistest.MasterName, SentinelAddrs: []string{sentinel.Addr}, DisableIdentity: true,
	})
	t.Cleanup(func() { _ = rdb.Close() })
	f := newFaultCache(t, rdb, redistest.Namespace(t), 300*time.Millisecond)
	redistest.Await(t, "a value is cached", func() bool {
		f.mustLoad("kept")
		_, err := f.Get(t.Context(), "kept")
		return err == nil
	})
	redistest.Await(t, "the replica has the entry", func() bool {
		return faultExists(t, replica.Admin(), f.value("kept"))
	})
	master.Kill()
	f.mustLoad("kept")
	f.mustLoad("new")
	f.wantCounted()
	f.recovers()
	redistest.Await(t, "what the replica had is a hit", func() bool {
		_, err := f.Get(t.Context(), "kept")
		return err == nil
	})
	role, err := replica.Admin().Do(t.Context(), "role").Slice()
	if err != nil || role[0] != "master" {
		t.Errorf("the replica's role is %v, %v", role, err)
	}
	noImmortalKeys(t, replica.Admin())
}

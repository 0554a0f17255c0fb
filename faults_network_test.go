package singlefill_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
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
)

// In these tests the network between the caches and Redis is bad: commands arrive twice, replies in crumbs or in
// part, one direction is cut, connections are closed all the time. What is measured is logged.

// faultPair makes two caches, as two processes have them, of one source.
func faultPair(t testing.TB, a, b redis.UniversalClient, ns string, redisTimeout time.Duration,
	change ...func(*singlefill.Options[string])) (x, y *faultCache) {
	t.Helper()
	x, y = newFaultCache(t, a, ns, redisTimeout, change...), newFaultCache(t, b, ns, redisTimeout, change...)
	y.faultSource = x.faultSource
	return x, y
}

// faultScripts makes the server know the scripts, so that each act is one command.
func faultScripts(t testing.TB, s *redistest.Server) {
	t.Helper()
	files, err := filepath.Glob("internal/fill/lua/*.lua")
	if err != nil || len(files) == 0 {
		t.Fatalf("scripts %q, %v", files, err)
	}
	for _, file := range files {
		src, err := os.ReadFile(file)
		if err == nil {
			err = s.Admin().ScriptLoad(t.Context(), string(src)).Err()
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// faultWaits begins a call and returns when it is known to wait for another process's load of key.
func (f *faultCache) faultWaits(wg *sync.WaitGroup, s *redistest.Server, key string) {
	f.t.Helper()
	before := s.Calls("pttl") // which get_or_lock asks for only of a lock that somebody else holds
	wg.Go(func() { f.mustLoad(key) })
	redistest.Await(f.t, "it waits for the other's load", func() bool { return s.Calls("pttl") > before })
}

//fault:repeated-command
func TestACommandThatArrivesTwiceCountsOnce(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	p := redistest.NewProxy(t, s.Addr)
	rules := make(map[string]*redistest.Rule)
	for _, act := range []string{"get_or_lock", "store", "release", "renew", "expire"} {
		rules[act] = p.On(faultAct(t, act), redistest.Twice)
	}
	rules["del"] = p.On(redistest.Command("DEL"), redistest.Twice)
	// The locks are renewed within the test.
	a, b := faultPair(t, p.Client(t), p.Client(t), redistest.Namespace(t), 400*time.Millisecond,
		func(o *singlefill.Options[string]) {
			o.LockTTL, o.StaleIfError = 1300*time.Millisecond, time.Hour
		})
	loading, loaded := make(chan struct{}), make(chan struct{})
	a.during = func(string) { close(loading); <-loaded }
	var wg sync.WaitGroup
	wg.Go(func() { a.mustLoad("k") })
	<-loading
	b.faultWaits(&wg, s, "k")
	<-rules["renew"].Hit()
	close(loaded)
	wg.Wait()
	a.during = nil
	a.mustHit("k")
	b.mustHit("k")
	a.wantLoads(1)

	if err := a.Expire(t.Context(), "k"); err != nil {
		t.Error(err)
	}
	boom := fmt.Errorf("boom")
	fails := func(context.Context, string) (string, error) { return "", boom }
	if v, info, err := b.GetOrLoadInfo(t.Context(), "k", fails); v != "value of k" || err != nil || !info.Stale ||
		info.Err != boom {
		t.Errorf("GetOrLoadInfo of a stale value whose load fails = %q, %+v, %v", v, info, err)
	}
	if _, err := b.GetOrLoad(t.Context(), "bad", fails); err != boom {
		t.Errorf("GetOrLoad = %v, want the Loader's error", err)
	}
	if err := a.Delete(t.Context(), "k"); err != nil {
		t.Error(err)
	}
	b.mustMiss("k")
	a.during = func(key string) {
		if err := b.Delete(context.Background(), key); err != nil {
			t.Error(err)
		}
	}
	a.mustLoad("fenced")
	a.during = nil
	b.mustMiss("fenced")
	for i := range 20 {
		key := fmt.Sprint("more", i)
		wg.Go(func() { a.mustLoad(key) })
		wg.Go(func() { b.mustLoad(key) })
	}
	wg.Wait()
	a.wantLoads(22)
	if most := a.most.Load(); most > 20 {
		t.Errorf("%d loads of 20 keys at once", most)
	}
	a.wantNoErrors()
	b.wantNoErrors()
	if st := a.Stats(); st.Fenced != 1 || st.LocksLost != 0 || st.LoadsUnlocked != 0 {
		t.Errorf("%+v", st)
	}
	for act, rule := range rules {
		if rule.Fired() == 0 {
			t.Errorf("no %s has arrived twice", act)
		}
		t.Logf("%s: %d arrived twice", act, rule.Fired())
	}
}

//fault:crumbs
func TestRepliesInCrumbsAreReplies(t *testing.T) {
	for _, protocol := range []int{2, 3} {
		t.Run(fmt.Sprint("resp", protocol), func(t *testing.T) {
			t.Parallel()
			s := redistest.Start(t)
			p := redistest.NewProxy(t, s.Addr)
			p.Trickle(1, 100*time.Microsecond)
			as := func(o *redis.Options) { o.Protocol = protocol }
			a, b := faultPair(t, p.Client(t, as), p.Client(t, as), redistest.Namespace(t), patience)
			loading, loaded := make(chan struct{}), make(chan struct{})
			a.during = func(string) { close(loading); <-loaded }
			var wg sync.WaitGroup
			wg.Go(func() { a.mustLoad("k") })
			<-loading
			b.faultWaits(&wg, s, "k")
			close(loaded)
			wg.Wait()
			a.during = nil
			b.mustHit("k")
			if err := b.Set(t.Context(), "k", "value of k"); err != nil {
				t.Error(err)
			}
			if err := a.Expire(t.Context(), "k"); err != nil {
				t.Error(err)
			}
			if err := a.Delete(t.Context(), "k"); err != nil {
				t.Error(err)
			}
			b.mustMiss("k")
			a.wantLoads(1)
			a.wantNoErrors()
			b.wantNoErrors()
			if n := p.Counts().Sliced; n < 10 {
				t.Errorf("%d replies came in crumbs", n)
			}
		})
	}
}

//fault:reset
func TestAConnectionThatBreaksInTheMiddleOfAReplyCostsNobodyItsValue(t *testing.T) {
	acts := map[string]func(t *testing.T) func([]string) bool{
		"GET":         func(*testing.T) func([]string) bool { return redistest.Command("GET") },
		"get or lock": func(t *testing.T) func([]string) bool { return faultAct(t, "get_or_lock") },
		"store":       func(t *testing.T) func([]string) bool { return faultAct(t, "store") },
		"DEL":         func(*testing.T) func([]string) bool { return redistest.Command("DEL") },
	}
	for what, match := range acts {
		for client, change := range map[string]func(*redis.Options){"client tries again": func(*redis.Options) {},
			"client does not": onceOnly} {
			t.Run(what+", "+client, func(t *testing.T) {
				t.Parallel()
				s := redistest.Start(t)
				p := redistest.NewProxy(t, s.Addr)
				faultScripts(t, s)
				a, b := faultPair(t, p.Client(t, change), s.Client(t), redistest.Namespace(t), patience)
				rule := p.On(match(t), redistest.ResetReply).Times(1)
				a.mustLoad("k")
				b.mustLoad("k")
				a.mustHit("k")
				a.wantLoads(1)
				err := a.Delete(t.Context(), "k")
				if broken := what == "DEL" && client == "client does not"; (err != nil) != broken {
					t.Errorf("Delete = %v", err)
				}
				b.mustMiss("k") // it was executed all the same
				if faultExists(t, s.Admin(), a.lock("k")) {
					t.Error("the lock is left behind")
				}
				if rule.Fired() != 1 {
					t.Errorf("the fault has come about %d times", rule.Fired())
				}
			})
		}
	}
}

// Redis hears everything, executes it, and is not heard.
//
//fault:one-way
func TestARedisThatIsNotHeardBreaksNoRead(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	p := redistest.NewProxy(t, s.Addr)
	f := newFaultCache(t, p.Client(t, onceOnly), redistest.Namespace(t), impatience)
	redistest.Await(t, "a value is cached", func() bool {
		f.mustLoad("kept")
		_, err := f.Get(t.Context(), "kept")
		return err == nil
	})
	// But for HELLO, or no connection would be made, and nothing be sent.
	rule := p.On(func(cmd []string) bool { return !strings.EqualFold(cmd[0], "HELLO") }, redistest.MuteReply)
	begun := time.Now()
	calls := 0
	redistest.Await(t, "the breaker is open", func() bool {
		calls++
		f.mustLoad(fmt.Sprint("k", calls))
		return f.Stats().BreakerOpen
	})
	t.Logf("the breaker was open after %d calls and %v; RedisTimeout is %v", calls,
		time.Since(begun).Round(time.Millisecond), impatience)
	if rule.Fired() == 0 {
		t.Error("no reply was lost")
	}
	f.wantCounted()
	rule.Times(0)
	f.recovers()
}

// Each lock is taken by a command whose reply is lost, and given back by another one whose reply is lost too.
//
//fault:no-reply
func TestLocksWhoseRepliesAreAllLostAreGivenBack(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	p := redistest.NewProxy(t, s.Addr)
	faultScripts(t, s)
	f := newFaultCache(t, p.Client(t, onceOnly), redistest.Namespace(t), impatience,
		func(o *singlefill.Options[string]) { o.LockTTL = 20 * time.Second })
	rule := p.On(redistest.Command("EVALSHA", "EVAL"), redistest.MuteReply)
	s.ResetCalls()
	const keys = 5
	for i := range keys {
		f.mustLoad(fmt.Sprint("k", i))
	}
	f.wantLoads(keys)
	f.wantCounted()
	if n := s.Calls("set"); n < keys || rule.Fired() < keys {
		t.Errorf("%d locks were taken, %d replies were lost", n, rule.Fired())
	}
	begun := time.Now()
	redistest.Await(t, "no lock is held", func() bool {
		for i := range keys {
			if strings.HasPrefix(s.Admin().Get(context.Background(), f.lock(fmt.Sprint("k", i))).Val(), "H") {
				return false
			}
		}
		return true
	})
	t.Logf("%d locks were free %v after their loads; LockTTL is 20 s", keys, time.Since(begun).Round(time.Millisecond))
	rule.Times(0)
	f.recovers()
}

// A holder on the wrong side of a partition is replaced after LockTTL; what it brings when it is back is refused.
// Time is the bubble's, so that the bounds are exact.
//
//fault:isolated-holder
func TestAHolderThatIsCutOffIsReplacedAfterLockTTLAndItsStoreRefused(t *testing.T) {
	t.Parallel()
	const lockTTL = 3 * time.Second
	for _, cut := range []time.Duration{3 * lockTTL,
		3*lockTTL + lockTTL/2} { // the store comes within the partition, and after it
		t.Run(fmt.Sprint(cut), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d, far := muteClient(t)
				options := func(o *singlefill.Options[string]) { o.LockTTL = lockTTL }
				a := newFaultCache(t, far, "ns", impatience, options)
				b := newFaultCache(t, redistest.NewMiniClient(t, d.m), "ns", impatience, options)
				b.mustLoad("before")
				var versions atomic.Int64
				load := func(takes time.Duration) singlefill.Loader[string] {
					return func(context.Context, string) (string, error) {
						v := fmt.Sprint("v", versions.Add(1))
						time.Sleep(takes)
						return v, nil
					}
				}
				get := func(f *faultCache, takes time.Duration, want string) {
					if v, err := f.GetOrLoad(context.Background(), "k", load(takes)); v != want || err != nil {
						t.Errorf("GetOrLoad = %q, %v, want %s", v, err, want)
					}
				}
				var wg sync.WaitGroup
				wg.Go(func() { get(a, 3*lockTTL+lockTTL/4, "v1") })
				time.Sleep(time.Millisecond)
				d.mute.Store(true)
				begun := time.Now()
				get(b, 0, "v2")
				took := time.Since(begun)
				t.Logf("replaced after %v, LockTTL %v", took, lockTTL)
				if took < lockTTL-10*time.Millisecond || took > lockTTL+10*time.Millisecond {
					t.Errorf("another process has loaded it after %v, want LockTTL (%v) and one poll", took, lockTTL)
				}
				time.Sleep(cut - time.Since(begun))
				if sent, pings := d.butPing(); sent+pings == 0 || !d.mute.Load() {
					t.Error("nothing was lost")
				}
				d.mute.Store(false)
				wg.Wait()
				time.Sleep(2 * lockTTL)
				if v, err := b.Get(t.Context(), "k"); v != "v2" || err != nil {
					t.Errorf("Redis has %q, %v, want v2", v, err)
				}
				if v, err := a.Get(t.Context(), "k"); v != "v2" || err != nil {
					t.Errorf("the first process gets %q, %v, want v2", v, err)
				}
				if st := a.Stats(); st.Stored != 0 || st.Loads != 1 {
					t.Errorf("of the first process: %+v", st)
				}
			})
		})
	}
}

// Every connection is closed by the server, again and again.
//
//fault:killed-connections
func TestClientsThatAreKilledAllTheTimeGetTheirValues(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	a, b := faultPair(t, s.Client(t), s.Client(t), redistest.Namespace(t), 500*time.Millisecond)
	a.during = func(string) { time.Sleep(time.Millisecond) }
	stop := make(chan struct{})
	var kills atomic.Int64
	var storm, load sync.WaitGroup
	storm.Go(func() {
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
	for _, f := range []*faultCache{a, b} {
		for g := range 8 {
			load.Go(func() {
				for n := 0; kills.Load() < 200; n++ {
					begun := time.Now()
					f.mustLoad(fmt.Sprintf("k%d", n%500))
					if n%50 == 49 {
						_ = f.Delete(context.Background(), fmt.Sprintf("k%d", (n+g)%500))
					}
					mu.Lock()
					slowest = max(slowest, time.Since(begun))
					mu.Unlock()
				}
			})
		}
	}
	load.Wait()
	close(stop)
	storm.Wait()
	t.Logf("%d connections killed; the slowest call took %v; %d of %d loads without the lock", kills.Load(),
		slowest.Round(time.Millisecond), a.Stats().LoadsUnlocked+b.Stats().LoadsUnlocked, a.loads.Load())
	if slices.Contains(a.log.breaker(), true) {
		t.Log("the breaker has opened")
	}
	a.recovers()
	b.recovers()
	before := a.loads.Load()
	for i := range 500 {
		key := fmt.Sprintf("after%d", i)
		a.mustLoad(key)
		b.mustLoad(key)
	}
	a.wantLoads(before + 500)
}

// A store that never gets through, while everything else does: a value larger than the server, or a proxy on the
// way, takes (the connection is reset in the middle of the command), or one that takes longer to send than
// RedisTimeout. The value is returned, and the lock given back behind the call.
//
//fault:store-fails
func TestALockIsGivenBackWhenItsStoreNeverGetsThrough(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	p := redistest.NewProxy(t, s.Addr)
	faultScripts(t, s)
	f := newFaultCache(t, p.Client(t), redistest.Namespace(t), impatience, func(o *singlefill.Options[string]) { o.LockTTL = 20 * time.Second })
	rule := p.On(faultAct(t, "store"), redistest.CloseBefore)
	f.mustLoad("k")
	f.settled()
	if rule.Fired() == 0 {
		t.Error("the fault has not come about")
	}
	if err := f.Close(); err != nil { // whatever goes on behind the call is over
		t.Error(err)
	}
	if faultExists(t, s.Admin(), f.lock("k")) {
		t.Errorf("the lock is held for %v more", s.Admin().PTTL(t.Context(), f.lock("k")).Val())
	}
}

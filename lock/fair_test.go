package lock_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"
)

const (
	fairLockKey  = "{n}:lock" // of the name n, which all have in bubbles
	fairQueueKey = "{n}:lock:queue"
	fairAliveKey = "{n}:lock:alive"
	fairFenceKey = "{n}:lock:fence"

	fairWaiterTTL = 5 * time.Second // the default
	fairMaxPause  = 150 * time.Millisecond
)

// fairBubble runs a test with a miniredis that lives by the bubble's clock. Each client is another process:
// to close it is to kill the process, which neither renews, asks nor leaves any more.
func fairBubble(t *testing.T, run func(t *testing.T, m *miniredis.Miniredis)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		m, _ := redistest.StartMini(t)
		run(t, m)
	})
}

func fairMutex(t testing.TB, rdb redis.UniversalClient, name string, opts *lock.Options) *lock.Locker {
	t.Helper()
	l, err := lock.NewFairMutex(rdb, name, opts)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func fairTake(t testing.TB, l *lock.Locker) *lock.Lease {
	t.Helper()
	lease, err := l.TryAcquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return lease
}

func fairRelease(t testing.TB, lease *lock.Lease) {
	t.Helper()
	if err := lease.Release(context.Background()); err != nil {
		t.Error(err)
	}
}

// A fairLine notes who of those that wait gets a lease, in the order of the grants.
type fairLine struct {
	t    testing.TB
	wg   sync.WaitGroup
	hold time.Duration

	mu      sync.Mutex
	granted []int         // protected by mu
	at      []time.Time   // protected by mu
	ends    []time.Time   // protected by mu: when they began to release
	fence   int64         // protected by mu
	errs    map[int]error // protected by mu
}

// join lets who wait, hold and release.
func (f *fairLine) join(ctx context.Context, l *lock.Locker, who int) {
	f.wg.Go(func() {
		lease, err := l.Acquire(ctx)
		f.mu.Lock()
		defer f.mu.Unlock()
		if err != nil {
			if f.errs == nil {
				f.errs = make(map[int]error)
			}
			f.errs[who] = err
			return
		}
		if lease.Fence() <= f.fence {
			f.t.Errorf("%d has got fence %d, after %d", who, lease.Fence(), f.fence)
		}
		f.fence = lease.Fence()
		f.granted, f.at = append(f.granted, who), append(f.at, time.Now())
		time.Sleep(f.hold)
		f.ends = append(f.ends, time.Now())
		fairRelease(f.t, lease)
	})
}

func (f *fairLine) want(who ...int) {
	f.t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	if !slices.Equal(f.granted, who) {
		f.t.Errorf("granted to %v, want %v; %v", f.granted, who, f.errs)
	}
}

func fairUpTo(n int) (who []int) {
	for i := range n {
		who = append(who, i)
	}
	return who
}

// fairKeys returns the keys that are not to stay: all but the last fence, and the marks of ended attempts.
func fairKeys(m *miniredis.Miniredis) []string {
	return slices.DeleteFunc(m.Keys(), func(k string) bool { return k == fairFenceKey || strings.Contains(k, ":ended") })
}

// fairWatch shows tell every script before it is run, with its keys and arguments: if tell answers, it is not run.
func fairWatch(m *miniredis.Miniredis, tell func(p *server.Peer, op, token string, args []string) bool) {
	m.Server().SetPreHook(func(p *server.Peer, cmd string, args ...string) bool {
		if cmd != "EVALSHA" && cmd != "EVAL" {
			return false
		}
		n, _ := strconv.Atoi(args[1])
		rest := args[2+n:] // of acquire: token, TTL, life of the fence, ...; of renew: token, a life
		op := "other"
		if n == 5 {
			op = "acquire"
		} else if len(rest) == 2 {
			op = "renew"
		}
		return tell(p, op, rest[0], args[1:])
	})
}

func TestFairMutexIsGrantedInTheOrderOfArrival(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		const n = 12
		name := redistest.Namespace(t)
		var lockers []*lock.Locker
		for range 3 {
			lockers = append(lockers, fairMutex(t, rdb, name, &lock.Options{RedisTimeout: 9 * time.Second, TTL: time.Minute, WaiterTTL: time.Minute}))
		}
		lease := fairTake(t, lockers[0])
		line := &fairLine{t: t}
		for who := range n {
			line.join(t.Context(), lockers[who%3], who)
			redistest.Await(t, "the waiter has a place", func() bool {
				// by a script, for the client that remembers what it has read
				return rdb.Eval(t.Context(), `return redis.call('ZCARD', KEYS[1])`, []string{"{" + name + "}:lock:queue"}).Val() == int64(who+1)
			})
		}
		if _, err := lockers[1].TryAcquire(t.Context()); err != lock.ErrBusy {
			t.Errorf("TryAcquire: %v", err)
		}
		fairRelease(t, lease)
		line.wg.Wait()
		line.want(fairUpTo(n)...)
		for _, key := range []string{"lock", "lock:queue", "lock:alive"} {
			if n := rdb.Exists(t.Context(), "{"+name+"}:"+key).Val(); n != 0 {
				t.Errorf("%s is left", key)
			}
		}
	})
}

// A place is a number, not a time: all come within the same instant. Asking again for as long as six of them could
// be dead changes nothing, and at no time is there a key that would live for ever.
func TestFairMutexKeepsTheOrderOfOneInstantHoweverLongAndOftenTheyAsk(t *testing.T) {
	t.Parallel()
	fairBubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		const n = 25
		var lockers []*lock.Locker
		for range 4 {
			lockers = append(lockers, fairMutex(t, redistest.NewMiniClient(t, m), "n", nil))
		}
		lease := fairTake(t, lockers[0])
		line := &fairLine{t: t, hold: time.Millisecond}
		begun := time.Now()
		for who := range n {
			line.join(t.Context(), lockers[who%4], who)
			synctest.Wait()
		}
		if time.Since(begun) != 0 {
			t.Fatal("they have not come within one instant")
		}
		for range 30 {
			time.Sleep(time.Second)
			for _, key := range m.Keys() {
				if ttl := m.TTL(key); ttl <= 0 || key != fairFenceKey && ttl > 2*fairWaiterTTL {
					t.Fatalf("%s lives for %v", key, ttl)
				}
			}
		}
		fairRelease(t, lease)
		line.wg.Wait()
		line.want(fairUpTo(n)...)
		synctest.Wait()
		if keys := fairKeys(m); len(keys) != 0 {
			t.Errorf("%v are left", keys)
		}
	})
}

// Who is first in line asks often; those behind may be asleep for as long as a heartbeat allows.
func TestFairMutexIsHandedOnSoon(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 2, 25} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			fairBubble(t, func(t *testing.T, m *miniredis.Miniredis) {
				l := fairMutex(t, redistest.NewMiniClient(t, m), "n", nil)
				lease := fairTake(t, l)
				line := &fairLine{t: t, hold: time.Millisecond}
				for who := range n {
					line.join(t.Context(), l, who)
					synctest.Wait()
				}
				time.Sleep(2 * fairWaiterTTL)
				released := time.Now()
				fairRelease(t, lease)
				line.wg.Wait()
				line.want(fairUpTo(n)...)
				for i, at := range line.at {
					if idle := at.Sub(released); idle > fairWaiterTTL/3 || i == 0 && idle > fairMaxPause {
						t.Errorf("the lease was free for %v before %d got it", idle, i)
					}
					released = line.ends[i]
				}
				t.Logf("%v on average", time.Since(line.ends[0])/time.Duration(max(1, n-1)))
			})
		})
	}
}

func TestFairWaitersAskAtLeastThreeTimesInTheirTTL(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		waiters int
		opts    lock.Options
	}{
		{1, lock.Options{}},
		{12, lock.Options{}}, // without the bound, the last would sleep for 2 s
		{3, lock.Options{WaiterTTL: 40 * time.Millisecond, RedisTimeout: 10 * time.Millisecond}},
		{12, lock.Options{WaiterTTL: 400 * time.Millisecond, RedisTimeout: 10 * time.Millisecond}},
		{12, lock.Options{WaiterTTL: time.Hour}},
	} {
		t.Run(fmt.Sprintf("%d waiters, %v", test.waiters, test.opts.WaiterTTL), func(t *testing.T) {
			fairBubble(t, func(t *testing.T, m *miniredis.Miniredis) {
				l := fairMutex(t, redistest.NewMiniClient(t, m), "n", &test.opts)
				ttl := test.opts.WaiterTTL
				if ttl == 0 {
					ttl = fairWaiterTTL
				}
				lease := fairTake(t, l)
				var mu sync.Mutex
				last := make(map[string]time.Time)
				asked := 0
				fairWatch(m, func(_ *server.Peer, op, token string, args []string) bool {
					mu.Lock()
					defer mu.Unlock()
					if op != "acquire" {
						return false
					}
					asked++
					for _, token := range append(args[11:], token) { // behind five keys and five arguments: others
						if at, again := last[token]; again && time.Since(at) > ttl/3 {
							t.Errorf("heard of again after %v", time.Since(at))
						}
						last[token] = time.Now()
					}
					return false
				})
				line := &fairLine{t: t}
				for who := range test.waiters {
					line.join(t.Context(), l, who)
					synctest.Wait()
				}
				time.Sleep(min(6*ttl, 10*time.Second))
				mu.Lock()
				if len(last) != test.waiters || asked < 4 {
					t.Errorf("%d have asked %d times", len(last), asked)
				}
				mu.Unlock()
				fairRelease(t, lease)
				line.wg.Wait()
				line.want(fairUpTo(test.waiters)...)
			})
		})
	}
}

//fault:long-waits
func TestHundredsOfFairWaitersAskRedisModeratelyAndLeaveNothing(t *testing.T) {
	t.Parallel()
	fairBubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		const n = 200
		l := fairMutex(t, redistest.NewMiniClient(t, m), "n", nil)
		lease := fairTake(t, l)
		line := &fairLine{t: t}
		ctx, cancel := context.WithCancel(t.Context())
		for who := range n {
			line.join(ctx, l, who)
		}
		time.Sleep(5 * time.Second) // those who have just come ask more often
		var asked atomic.Int64
		fairWatch(m, func(*server.Peer, string, string, []string) bool { asked.Add(1); return false })
		time.Sleep(5 * time.Second)
		if perSecond := asked.Load() / 5; perSecond > n {
			t.Errorf("%d commands in a second by %d waiters", perSecond, n)
		}
		if queue, _ := m.ZMembers(fairQueueKey); len(queue) != n {
			t.Errorf("%d are in the queue, of %d", len(queue), n)
		}
		cancel()
		line.wg.Wait()
		synctest.Wait()
		if keys := fairKeys(m); !slices.Equal(keys, []string{fairLockKey}) {
			t.Errorf("there are %v", keys)
		}
		fairRelease(t, lease)
	})
}

//fault:killed-waiters
func TestDeadFairWaitersArePassedOverTogetherWithinOneWaiterTTL(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 10, 200} {
		for _, late := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d, long dead %v", n, late), func(t *testing.T) {
				fairBubble(t, func(t *testing.T, m *miniredis.Miniredis) {
					holder, mortal, live := redistest.NewMiniClient(t, m), redistest.NewMiniClient(t, m), redistest.NewMiniClient(t, m)
					lease := fairTake(t, fairMutex(t, holder, "n", nil))
					doomed, line := &fairLine{t: t}, &fairLine{t: t}
					l := fairMutex(t, mortal, "n", nil)
					for who := range n {
						doomed.join(t.Context(), l, who)
						synctest.Wait()
					}
					line.join(t.Context(), fairMutex(t, live, "n", nil), n)
					synctest.Wait()
					time.Sleep(time.Second)
					_ = mortal.Close()
					died := time.Now()
					if late {
						time.Sleep(2 * fairWaiterTTL)
					}
					released := time.Now()
					fairRelease(t, lease)
					var asked atomic.Int64
					fairWatch(m, func(*server.Peer, string, string, []string) bool { asked.Add(1); return false })
					line.wg.Wait()
					line.want(n)
					if asked.Load() > 60 {
						t.Errorf("asked %d times meanwhile", asked.Load())
					}
					// One who is far back may be asleep when they are passed over, for a heartbeat at most.
					if d := time.Since(died); !late && d > fairWaiterTTL+fairWaiterTTL/3 {
						t.Errorf("waited for %v for the dead", d)
					}
					if d := time.Since(released); late && d > fairMaxPause {
						t.Errorf("waited for %v for those who were long dead", d)
					}
					doomed.wg.Wait()
					synctest.Wait()
					if keys := fairKeys(m); len(keys) != 0 {
						t.Errorf("%v are left", keys)
					}
				})
			})
		}
	}
}

func TestEachFairWaiterIsTakenToBeAliveForItsOwnWaiterTTL(t *testing.T) {
	t.Parallel()
	fairBubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		const long = 20 * time.Second
		mortal := redistest.NewMiniClient(t, m)
		patient := fairMutex(t, mortal, "n", &lock.Options{WaiterTTL: long})
		hasty := fairMutex(t, redistest.NewMiniClient(t, m), "n", &lock.Options{WaiterTTL: 2 * time.Second})
		lease := fairTake(t, hasty)
		doomed, line := &fairLine{t: t}, &fairLine{t: t}
		doomed.join(t.Context(), patient, 0)
		synctest.Wait()
		line.join(t.Context(), hasty, 1)
		time.Sleep(time.Second)
		fairRelease(t, lease)
		_ = mortal.Close() // before it has asked again
		died := time.Now()
		line.wg.Wait()
		// The last it was heard of was one pause ago at most.
		if d := time.Since(died); d < long-fairMaxPause || d > long+fairMaxPause {
			t.Errorf("another one's waiter was passed over after %v, not %v", d, long)
		}
		line.want(1)
		doomed.wg.Wait()
	})
}

// The waiter with the long life is asleep when the others' short ones have passed.
func TestAFairWaiterKeepsItsPlaceWhenOneWithAShortWaiterTTLComesAndGoes(t *testing.T) {
	t.Parallel()
	fairBubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		rdb := redistest.NewMiniClient(t, m)
		patient := fairMutex(t, rdb, "n", nil)
		hasty := fairMutex(t, rdb, "n", &lock.Options{WaiterTTL: 4 * time.Millisecond, RedisTimeout: time.Millisecond})
		lease := fairTake(t, patient)
		line := &fairLine{t: t}
		line.join(t.Context(), patient, 0)
		time.Sleep(time.Second)
		for range 20 { // some of them right after it has asked
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Millisecond)
			if _, err := hasty.Acquire(ctx); !errors.Is(err, lock.ErrBusy) {
				t.Error(err)
			}
			cancel()
			time.Sleep(20 * time.Millisecond)
			if !m.Exists(fairQueueKey) || !m.Exists(fairAliveKey) {
				t.Error("the queue is gone, with one who waits")
			}
		}
		fairRelease(t, lease)
		line.wg.Wait()
	})
}

//fault:cancelled
func TestAFairWaiterThatGivesUpLeavesAtOnce(t *testing.T) {
	t.Parallel()
	fairBubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		l := fairMutex(t, redistest.NewMiniClient(t, m), "n", nil)
		lease := fairTake(t, l)
		line := &fairLine{t: t}
		leaving, cancel := context.WithCancel(t.Context())
		line.join(leaving, l, 0)
		synctest.Wait()
		ending, stop := context.WithTimeout(t.Context(), time.Minute)
		defer stop()
		line.join(ending, l, 1)
		synctest.Wait()
		line.join(t.Context(), l, 2)
		synctest.Wait()
		for left, leave := range []func(){cancel, func() { time.Sleep(time.Minute) }} {
			leave()
			synctest.Wait()
			queue, _ := m.ZMembers(fairQueueKey)
			alive, _ := m.ZMembers(fairAliveKey)
			if want := 2 - left; len(queue) != want || len(alive) != want {
				t.Errorf("%d are in the queue, %d alive, want %d", len(queue), len(alive), want)
			}
		}
		line.mu.Lock()
		for who, why := range []error{context.Canceled, context.DeadlineExceeded} {
			if err := line.errs[who]; !errors.Is(err, lock.ErrBusy) || !errors.Is(err, why) {
				t.Errorf("%d gave up with %v", who, err)
			}
		}
		line.mu.Unlock()
		time.Sleep(time.Second) // by then the last has seen that it is the first
		released := time.Now()
		fairRelease(t, lease)
		line.wg.Wait()
		line.want(2)
		if d := time.Since(released); d > fairMaxPause {
			t.Errorf("the next got it after %v", d)
		}
	})
}

func TestNobodyOvertakesFairWaitersWhileTheLockIsFree(t *testing.T) {
	t.Parallel()
	fairBubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		l := fairMutex(t, redistest.NewMiniClient(t, m), "n", nil)
		other := fairMutex(t, redistest.NewMiniClient(t, m), "n", nil)
		lease := fairTake(t, other) // its release does not wake the waiters of l
		line := &fairLine{t: t}
		line.join(t.Context(), l, 0)
		time.Sleep(time.Minute)
		fairRelease(t, lease)
		if m.Exists(fairLockKey) {
			t.Fatal("the lock is not free: the waiter was not asleep")
		}
		if _, err := other.TryAcquire(t.Context()); err != lock.ErrBusy {
			t.Errorf("TryAcquire: %v", err)
		}
		if queue, _ := m.ZMembers(fairQueueKey); len(queue) != 1 {
			t.Errorf("%d are in the queue: one of them has only tried", len(queue))
		}
		line.join(t.Context(), other, 1)
		line.wg.Wait()
		line.want(0, 1)
	})
}

func TestAnErrorOfTheServerLeavesNoFairWaiterInTheQueue(t *testing.T) {
	t.Parallel()
	fairBubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		l := fairMutex(t, redistest.NewMiniClient(t, m), "n", nil)
		lease := fairTake(t, l)
		line := &fairLine{t: t}
		line.join(t.Context(), l, 0)
		synctest.Wait()
		fairWatch(m, func(p *server.Peer, op, _ string, _ []string) bool {
			if op == "acquire" {
				p.WriteError("ERR something has gone wrong in the script")
			}
			return op == "acquire"
		})
		line.wg.Wait()
		synctest.Wait()
		if err := line.errs[0]; !errors.Is(err, lock.ErrUnavailable) {
			t.Errorf("Acquire: %v", err)
		}
		if m.Exists(fairQueueKey) || m.Exists(fairAliveKey) {
			t.Error("the waiter is still in the queue")
		}
		fairRelease(t, lease)
	})
}

// Whatever key is lost, to an eviction or by hand, and whoever is asleep: nobody waits for ever, and nobody
// holds together with another who has not been told.
//
//fault:foreign-key
func TestNobodyIsStuckWhenAKeyOfAFairMutexIsLost(t *testing.T) {
	t.Parallel()
	for _, keys := range [][]string{
		{fairQueueKey}, {fairAliveKey}, {fairLockKey}, {fairFenceKey}, {fairQueueKey, fairAliveKey},
		{fairLockKey, fairAliveKey}, {fairLockKey, fairQueueKey}, {fairLockKey, fairQueueKey, fairAliveKey, fairFenceKey},
	} {
		t.Run(strings.Join(keys, " "), func(t *testing.T) {
			fairBubble(t, func(t *testing.T, m *miniredis.Miniredis) {
				const n = 12
				l := fairMutex(t, redistest.NewMiniClient(t, m), "n", nil)
				var inside, told atomic.Int32
				var wg sync.WaitGroup
				for who := range n {
					wg.Go(func() {
						lease, err := l.Acquire(t.Context())
						if err != nil {
							t.Error(who, err)
							return
						}
						if n := inside.Add(1); n > 1 && !slices.Contains(keys, fairLockKey) {
							t.Errorf("%d hold it", n)
						}
						select {
						case <-lease.Context().Done():
						case <-time.After(300 * time.Millisecond):
						}
						inside.Add(-1)
						if err := lease.Release(t.Context()); errors.Is(err, lock.ErrLost) {
							told.Add(1)
						} else if err != nil {
							t.Error(who, err)
						}
					})
				}
				done := make(chan struct{})
				go func() { wg.Wait(); close(done) }()
				lost := 0
				for over := false; !over; {
					select {
					case <-done:
						over = true
					case <-time.After(430 * time.Millisecond):
						for _, key := range keys {
							if m.Del(key) && key == fairLockKey {
								lost++
							}
						}
					}
				}
				// One whose lock was lost while it let go of it may not have known.
				if n := int(told.Load()); n > lost || n < lost/2 {
					t.Errorf("%d leases were lost, %d were told", lost, n)
				}
				synctest.Wait()
				if keys := fairKeys(m); len(keys) != 0 {
					t.Errorf("%v are left", keys)
				}
			})
		})
	}
}

func TestTheKeysOfAFairMutexAreGoneWhenAllHaveDied(t *testing.T) {
	t.Parallel()
	fairBubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		rdb := redistest.NewMiniClient(t, m)
		l := fairMutex(t, rdb, "n", nil)
		lease := fairTake(t, l)
		line := &fairLine{t: t}
		for who := range 10 {
			line.join(t.Context(), l, who)
		}
		time.Sleep(5 * time.Second)
		_ = rdb.Close()
		time.Sleep(max(10*time.Second, 2*fairWaiterTTL))
		line.wg.Wait()
		if keys := fairKeys(m); len(keys) != 0 {
			t.Errorf("%v are left", keys)
		}
		if err := context.Cause(lease.Context()); !errors.Is(err, lock.ErrLost) {
			t.Errorf("the holder was told %v", err)
		}
		time.Sleep(24 * time.Hour)
		if keys := m.Keys(); len(keys) != 0 {
			t.Errorf("%v are left after a day", keys)
		}
	})
}

func TestRenewingAFairMutexEndsWithTheLease(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"released", "lost", "lost to another"} {
		t.Run(how, func(t *testing.T) {
			fairBubble(t, func(t *testing.T, m *miniredis.Miniredis) {
				l := fairMutex(t, redistest.NewMiniClient(t, m), "n", nil)
				lease := fairTake(t, l)
				var renewals atomic.Int32
				fairWatch(m, func(_ *server.Peer, op, _ string, _ []string) bool {
					if op == "renew" {
						renewals.Add(1)
					}
					return false
				})
				time.Sleep(time.Minute)
				if renewals.Load() < 17 {
					t.Errorf("%d renewals in a minute", renewals.Load())
				}
				switch how {
				case "released":
					fairRelease(t, lease)
					renewals.Store(1)
				default:
					m.Del(fairLockKey)
					if how != "lost" {
						defer func(second *lock.Lease) {
							synctest.Wait()
							if !m.Exists(fairLockKey) {
								t.Error("the other's lease is gone, too")
							}
							fairRelease(t, second)
						}(fairTake(t, fairMutex(t, redistest.NewMiniClient(t, m), "n", &lock.Options{TTL: 24 * time.Hour})))
					}
					renewals.Store(0)
					<-lease.Context().Done()
					if err := context.Cause(lease.Context()); !errors.Is(err, lock.ErrLost) {
						t.Errorf("told %v", err)
					}
				}
				time.Sleep(time.Hour)
				if n := renewals.Load(); n != 1 {
					t.Errorf("%d renewals, the last but one after the lease had ended", n)
				}
				if err := lease.Release(t.Context()); !errors.Is(err, lock.ErrLost) {
					t.Errorf("Release: %v", err)
				}
			})
		})
	}
}

var fairToken = regexp.MustCompile(`[A-Z2-7]{26}`)

// Were a time of the client's among them, those with a wrong clock would be served before others, or take what
// others hold.
//
//fault:process-clock
func TestNoScriptIsGivenATimeOfTheClient(t *testing.T) {
	t.Parallel()
	fairBubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		var mu sync.Mutex
		said := make(map[string]bool)
		fairWatch(m, func(_ *server.Peer, op, _ string, args []string) bool {
			mu.Lock()
			defer mu.Unlock()
			said[op+" "+fairToken.ReplaceAllString(strings.Join(args, " "), "TOKEN")] = true
			return false
		})
		rdb := redistest.NewMiniClient(t, m)
		session := func() []string {
			mu.Lock()
			clear(said)
			mu.Unlock()
			for i, l := range []func() (*lock.Locker, error){
				func() (*lock.Locker, error) { return lock.NewMutex(rdb, "mutex", nil) },
				func() (*lock.Locker, error) { return lock.NewFairMutex(rdb, "fair", nil) },
				func() (*lock.Locker, error) { return lock.NewSemaphore(rdb, "semaphore", 1, nil) },
			} {
				l, err := l()
				if err != nil {
					t.Fatal(i, err)
				}
				lease := fairTake(t, l)
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second) // time for a renewal
				if _, err := l.Acquire(ctx); !errors.Is(err, lock.ErrBusy) {
					t.Error(i, err)
				}
				cancel()
				fairRelease(t, lease)
				synctest.Wait()
			}
			mu.Lock()
			defer mu.Unlock()
			var all []string
			for s := range said {
				all = append(all, s)
			}
			slices.Sort(all)
			return all
		}
		before := session()
		time.Sleep(1000*time.Hour + 17*time.Millisecond)
		if after := session(); len(before) != 3+3+5 || !slices.Equal(before, after) {
			t.Errorf("at first they were given\n%s\nlater\n%s", strings.Join(before, "\n"), strings.Join(after, "\n"))
		}
	})
}

// A fairPair is a real server, a lease on it, and a waiter who comes through a proxy.
type fairPair struct {
	t       *testing.T
	server  *redistest.Server
	admin   *redis.Client
	proxy   *redistest.Proxy
	name    string
	direct  *lock.Locker
	through *lock.Locker
}

func newFairPair(t *testing.T, change ...func(*redis.Options)) *fairPair {
	s := redistest.Start(t)
	p := &fairPair{t: t, server: s, admin: s.Admin(), proxy: redistest.NewProxy(t, s.Addr), name: redistest.Namespace(t)}
	opts := &lock.Options{TTL: time.Minute, WaiterTTL: time.Minute, RedisTimeout: 9 * time.Second}
	p.direct = fairMutex(t, s.Client(t), p.name, opts)
	c := p.proxy.Client(t, change...)
	p.through = fairMutex(t, c, p.name, opts)
	// The server knows the script, and the connection is made, so that the rules see commands of one form.
	fairRelease(t, fairTake(t, p.through))
	return p
}

func (p *fairPair) key(suffix string) string { return "{" + p.name + "}:lock" + suffix }

func (p *fairPair) queued() int64 { return p.admin.ZCard(p.t.Context(), p.key(":queue")).Val() }

func (p *fairPair) awaitQueued(n int64) {
	p.t.Helper()
	redistest.Await(p.t, fmt.Sprint(n, " in the queue"), func() bool { return p.queued() == n })
}

func (p *fairPair) wantNothing() {
	p.t.Helper()
	redistest.Await(p.t, "nothing is held and nobody queues", func() bool {
		return p.admin.Exists(p.t.Context(), p.key(""), p.key(":queue"), p.key(":alive")).Val() == 0
	})
}

type fairResult struct {
	lease *lock.Lease
	err   error
}

func (p *fairPair) acquire(ctx context.Context) <-chan fairResult {
	c := make(chan fairResult, 1)
	go func() {
		lease, err := p.through.Acquire(ctx)
		c <- fairResult{lease, err}
	}()
	return c
}

func fairAcquires(cmd []string) bool {
	return redistest.Command("evalsha")(cmd) && len(cmd) > 2 && cmd[2] == "5" // lock, fence, tombstone, queue, alive
}

func TestAGrantThatRacedWithLeavingIsGivenBackInTheSameStep(t *testing.T) {
	t.Parallel()
	p := newFairPair(t)
	lease := fairTake(t, p.direct)
	ctx, cancel := context.WithCancel(t.Context())
	got := p.acquire(ctx)
	p.awaitQueued(1)
	held := p.proxy.On(fairAcquires, redistest.HoldReply)
	fairRelease(t, lease)
	redistest.Await(t, "the waiter is granted the lease, and does not know", func() bool {
		return p.admin.Exists(t.Context(), p.key("")).Val() == 1
	})
	<-held.Hit()
	cancel()
	r := <-got
	if r.lease != nil || !errors.Is(r.err, lock.ErrAmbiguous) || !errors.Is(r.err, context.Canceled) {
		t.Errorf("Acquire: %v, %v", r.lease, r.err)
	}
	p.wantNothing()
	fairRelease(t, fairTake(t, p.direct))
	held.Release()
	p.wantNothing()
}

// The proxy delivers the command after its sender has left.
//
//fault:late-command
func TestACommandThatArrivesAfterTheWaiterHasLeftTakesNoPlace(t *testing.T) {
	t.Parallel()
	for _, free := range []bool{false, true} {
		t.Run(fmt.Sprint("free ", free), func(t *testing.T) {
			t.Parallel()
			p := newFairPair(t)
			var lease *lock.Lease
			if !free {
				lease = fairTake(t, p.direct)
			}
			late := p.proxy.On(fairAcquires, redistest.HoldRequest)
			ctx, cancel := context.WithCancel(t.Context())
			got := p.acquire(ctx)
			<-late.Hit()
			cancel()
			if r := <-got; r.lease != nil || !errors.Is(r.err, lock.ErrAmbiguous) {
				t.Errorf("Acquire: %v, %v", r.lease, r.err)
			}
			redistest.Await(t, "the attempt is abandoned", func() bool {
				return p.admin.ZCard(t.Context(), p.key(":ended")).Val() == 2 // and that of newFairPair
			})
			before := p.server.Calls("evalsha")
			late.Release()
			redistest.Await(t, "the late command has arrived", func() bool { return p.server.Calls("evalsha") > before })
			if n := p.queued(); n != 0 {
				t.Errorf("%d in the queue", n)
			}
			if lease != nil {
				fairRelease(t, lease)
			}
			p.wantNothing()
		})
	}
}

// The reply to the grant is lost, and the command is sent again: by the client, or by us if the client does not.
//
//fault:lost-reply
func TestAFairHolderWhoseReplyWasLostIsNotInTheQueue(t *testing.T) {
	t.Parallel()
	for _, retries := range []int{3, -1} {
		for _, contended := range []bool{false, true} {
			t.Run(fmt.Sprintf("retries %d, others wait %v", retries, contended), func(t *testing.T) {
				t.Parallel()
				p := newFairPair(t, func(o *redis.Options) { o.MaxRetries = retries })
				lease := fairTake(t, p.direct)
				got := p.acquire(t.Context())
				p.awaitQueued(1)
				line := &fairLine{t: t}
				if contended {
					line.join(t.Context(), p.direct, 1)
					p.awaitQueued(2)
				}
				free := make(chan struct{})
				lost := p.proxy.On(func(cmd []string) bool {
					if !fairAcquires(cmd) {
						return false
					}
					<-free
					return true
				}, redistest.DropReply).Times(1)
				fairRelease(t, lease)
				close(free)
				r := <-got
				if r.err != nil || lost.Fired() != 1 {
					t.Fatalf("Acquire: %v; %d replies were lost", r.err, lost.Fired())
				}
				want := int64(0)
				if contended {
					want = 1
				}
				if n := p.queued(); n != want {
					t.Errorf("%d in the queue, want %d", n, want)
				}
				fairRelease(t, r.lease)
				line.wg.Wait()
				p.wantNothing()
			})
		}
	}
}

const fairUserRole = "user of a fair mutex"

func init() { redistest.Role(fairUserRole, runFairUser) }

// A fairUser tells a child what to do: Waiters goroutines wait for the lock, and say so when they have it. Who has
// it keeps it until the child is told to release.
type fairUser struct {
	Addr, Name string
	Waiters    int
}

var fairUserTimes = lock.Options{TTL: 4 * time.Second, WaiterTTL: 4 * time.Second, RedisTimeout: time.Second}

func runFairUser(c *redistest.Child) {
	var u fairUser
	if err := json.Unmarshal([]byte(c.Args[0]), &u); err != nil {
		panic(err)
	}
	l, err := lock.NewFairMutex(redis.NewClient(&redis.Options{Addr: u.Addr, PoolSize: 100, DisableIdentity: true}), u.Name, &fairUserTimes)
	if err != nil {
		panic(err)
	}
	for range u.Waiters {
		go func() {
			lease, err := l.Acquire(context.Background())
			for errors.Is(err, lock.ErrAmbiguous) { // frozen in the middle of a command: it begins anew
				lease, err = l.Acquire(context.Background())
			}
			if err != nil {
				panic(err)
			}
			c.Say("held %d", lease.Fence())
			c.Next()
			c.Say("released %v", lease.Release(context.Background()))
		}()
	}
	select {}
}

func spawnFairUser(t *testing.T, u fairUser) *redistest.Process {
	t.Helper()
	args, err := json.Marshal(u)
	if err != nil {
		t.Fatal(err)
	}
	return redistest.Spawn(t, fairUserRole, string(args))
}

func awaitFairQueue(t *testing.T, s *redistest.Server, name string, n int64) {
	t.Helper()
	redistest.Await(t, fmt.Sprint(n, " wait"), func() bool {
		return s.Admin().ZCard(t.Context(), "{"+name+"}:lock:queue").Val() == n
	})
}

//fault:killed-waiters
func TestAFairMutexIsHandedOnWhenProcessesAreKilled(t *testing.T) {
	t.Parallel()
	s := redistest.Shared(t)
	name := redistest.Namespace(t)
	queued := func(n int64) { t.Helper(); awaitFairQueue(t, s, name, n) }
	holder := spawnFairUser(t, fairUser{Addr: s.Addr, Name: name, Waiters: 1})
	holder.Expect("held")
	doomed := spawnFairUser(t, fairUser{Addr: s.Addr, Name: name, Waiters: 10})
	queued(10)
	next := spawnFairUser(t, fairUser{Addr: s.Addr, Name: name, Waiters: 1})
	queued(11)
	doomed.Kill()
	holder.Kill()
	next.Expect("held")
	queued(0)
	next.Send("release")
	next.Expect("released <nil>")
}

//fault:frozen-waiter
func TestAFrozenFairWaiterIsPassedOverAndComesBackAsTheLast(t *testing.T) {
	t.Parallel()
	s := redistest.Shared(t)
	name := redistest.Namespace(t)
	queued := func(n int64) { t.Helper(); awaitFairQueue(t, s, name, n) }
	holder := spawnFairUser(t, fairUser{Addr: s.Addr, Name: name, Waiters: 1})
	holder.Expect("held")
	frozen := spawnFairUser(t, fairUser{Addr: s.Addr, Name: name, Waiters: 1})
	queued(1)
	second := spawnFairUser(t, fairUser{Addr: s.Addr, Name: name, Waiters: 1})
	queued(2)
	frozen.Freeze()
	queued(1) // the other's asking has shown it to be dead
	frozen.Thaw()
	queued(2)
	holder.Send("release")
	second.Expect("held")
	queued(1)
	second.Send("release")
	frozen.Expect("held")
	queued(0)
	frozen.Send("release")
	frozen.Expect("released <nil>")
}

// A place in the queue may live for longer than a lease: it is left for as long as it is there.
func TestAPlaceIsLeftAlsoAfterAnOutageThatIsLongerThanALease(t *testing.T) {
	fairBubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		rdb := redistest.NewMiniClient(t, m)
		lease := fairTake(t, fairMutex(t, rdb, "n", nil))
		cut, f := withFaults(t, m)
		l := fairMutex(t, cut, "n", &lock.Options{TTL: 2 * time.Second, WaiterTTL: time.Minute})
		ended := make(chan error, 1)
		go func() { _, err := l.Acquire(t.Context()); ended <- err }()
		time.Sleep(time.Second)
		f.set(noConnection)
		if err := <-ended; !errors.Is(err, lock.ErrUnavailable) {
			t.Errorf("Acquire: %v, want ErrUnavailable", err)
		}
		time.Sleep(10 * time.Second)
		if !m.Exists(fairQueueKey) {
			t.Error("it does not stand in the queue, so that this proves nothing")
		}
		f.set(nil)
		time.Sleep(time.Second)
		if m.Exists(fairQueueKey) {
			t.Error("it still stands in the queue")
		}
		if err := lease.Release(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

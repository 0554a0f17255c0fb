package lock_test

import (
	"cmp"
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

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"
)

func semaphore(t testing.TB, rdb redis.UniversalClient, name string, size int, opts *lock.Options) *lock.Locker {
	t.Helper()
	l, err := lock.NewSemaphore(rdb, name, size, opts)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// semPatient is for tests in which no stall of the machine may make a lease end or a command time out.
var semPatient = lock.Options{TTL: time.Minute, WaiterTTL: time.Minute, RedisTimeout: 9 * time.Second}

// A semCheck sees how many hold a semaphore at once, in two ways: it asks the server in one step, and it notes
// from when till when each has held it, by the server's clock.
type semCheck struct {
	t    testing.TB
	rdb  redis.UniversalClient
	name string
	size int

	mu     sync.Mutex
	spells [][2]int64 // protected by mu: µs
	fences []int64    // protected by mu
}

// look returns the server's time.
func (c *semCheck) look() int64 {
	r, err := c.rdb.Eval(context.Background(), `
		local t = redis.call('TIME')
		local ms = string.format('(%.0f', math.floor(tonumber(t[1]) * 1000 + tonumber(t[2]) / 1000))
		return {tonumber(t[1]), tonumber(t[2]), redis.call('ZCOUNT', KEYS[1], ms, '+inf')}`, []string{"{" + c.name + "}:lock"}).Int64Slice()
	if err != nil {
		c.t.Error(err)
		return 0
	}
	if r[2] > int64(c.size) {
		c.t.Errorf("%d hold it, of %d", r[2], c.size)
	}
	return r[0]*1_000_000 + r[1]
}

// run takes, holds and releases, in n goroutines for so many rounds.
func (c *semCheck) run(n, rounds int, l func(who int) *lock.Locker) {
	var wg sync.WaitGroup
	for who := range n {
		wg.Go(func() {
			for range rounds {
				lease, err := l(who).Acquire(c.t.Context())
				if err != nil {
					c.t.Error(err)
					return
				}
				from := c.look()
				c.mu.Lock()
				c.fences = append(c.fences, lease.Fence())
				c.mu.Unlock()
				till := c.look()
				if err := lease.Release(c.t.Context()); err != nil {
					c.t.Error(err)
				}
				c.mu.Lock()
				c.spells = append(c.spells, [2]int64{from, till})
				c.mu.Unlock()
			}
		})
	}
	wg.Wait()
	if len(c.spells) != n*rounds {
		c.t.Errorf("held %d times, want %d", len(c.spells), n*rounds)
	}
	if most := semMost(c.spells); most > c.size {
		c.t.Errorf("%d held it at once, of %d", most, c.size)
	}
	slices.Sort(c.fences)
	if same := len(c.fences) - len(slices.Compact(c.fences)); same != 0 {
		c.t.Errorf("%d leases had the fence of another", same)
	}
	redistest.Await(c.t, "nothing is left", func() bool {
		n, err := c.rdb.Eval(context.Background(), `return redis.call('EXISTS', KEYS[1]) + redis.call('EXISTS', KEYS[2])`,
			[]string{"{" + c.name + "}:lock", "{" + c.name + "}:lock:details"}).Int()
		return n == 0 && err == nil
	})
}

// semMost returns how many of the spells overlap at most. Those that touch do not: what ends within a µs may
// have ended before.
func semMost(spells [][2]int64) (most int) {
	type edge struct {
		at int64
		by int
	}
	var edges []edge
	for _, s := range spells {
		edges = append(edges, edge{s[0], 1}, edge{s[1], -1})
	}
	slices.SortFunc(edges, func(a, b edge) int { return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.by, b.by)) })
	n := 0
	for _, e := range edges {
		n += e.by
		most = max(most, n)
	}
	return most
}

func TestSemaphoreNeverHasMoreHoldersThanItsSize(t *testing.T) {
	t.Parallel()
	for _, size := range []int{1, 5} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
				c := &semCheck{t: t, rdb: rdb, name: redistest.Namespace(t), size: size}
				var lockers []*lock.Locker
				for range 4 {
					lockers = append(lockers, semaphore(t, rdb, c.name, size, &semPatient))
				}
				c.run(8, 3, func(who int) *lock.Locker { return lockers[who%4] })
			})
		})
	}
}

func TestSemaphoreOfManyRoundsNeverHasMoreHoldersThanItsSize(t *testing.T) {
	t.Parallel()
	rounds := 200
	if testing.Short() {
		rounds = 10
	}
	s := redistest.Shared(t)
	c := &semCheck{t: t, rdb: s.Client(t), name: redistest.Namespace(t), size: 5}
	var lockers []*lock.Locker
	for range 10 {
		lockers = append(lockers, semaphore(t, s.Client(t), c.name, c.size, &semPatient))
	}
	c.run(50, rounds, func(who int) *lock.Locker { return lockers[who%10] })
}

// Every fifth reply of whatever kind is lost, and the connection with it. Nobody gets a place more by that, and
// no place is lost.
//
//fault:lost-reply
func TestSemaphoreKeepsItsSizeWhenRepliesAreLost(t *testing.T) {
	t.Parallel()
	for _, retries := range []int{3, -1} {
		t.Run(fmt.Sprint("retries ", retries), func(t *testing.T) {
			t.Parallel()
			s := redistest.Shared(t)
			proxy := redistest.NewProxy(t, s.Addr)
			var seen atomic.Int64
			lost := proxy.On(func(cmd []string) bool {
				return redistest.Command("evalsha")(cmd) && seen.Add(1)%5 == 0
			}, redistest.DropReply)
			c := &semCheck{t: t, rdb: s.Client(t), name: redistest.Namespace(t), size: 3}
			through := semaphore(t, proxy.Client(t, func(o *redis.Options) { o.MaxRetries = retries }), c.name, c.size, &semPatient)
			c.run(12, 10, func(int) *lock.Locker { return through })
			if lost.Fired() < 40 {
				t.Errorf("%d replies were lost", lost.Fired())
			}
		})
	}
}

//fault:no-reply
func TestAPlaceWhoseGrantWasNeverAnsweredIsGivenBack(t *testing.T) {
	t.Parallel()
	s := redistest.Shared(t)
	proxy := redistest.NewProxy(t, s.Addr)
	name := redistest.Namespace(t)
	direct := semaphore(t, s.Client(t), name, 1, &semPatient)
	fairRelease(t, fairTake(t, direct)) // the server knows the script
	mute := proxy.On(func(cmd []string) bool {
		return redistest.Command("evalsha")(cmd) && cmd[2] == "5" && // holders, fence, ended attempts, reservation, details
			s.Admin().Exists(context.Background(), "{"+name+"}:lock").Val() == 0
	}, redistest.MuteReply)
	ctx, cancel := context.WithCancel(t.Context())
	got := make(chan error, 1)
	go func() {
		_, err := semaphore(t, proxy.Client(t), name, 1, &semPatient).TryAcquire(ctx)
		got <- err
	}()
	<-mute.Hit()
	if s.Admin().Exists(t.Context(), "{"+name+"}:lock").Val() != 1 {
		t.Error("the place was not granted")
	}
	cancel()
	if err := <-got; !errors.Is(err, lock.ErrAmbiguous) || !errors.Is(err, context.Canceled) {
		t.Errorf("TryAcquire: %v", err)
	}
	lease, err := direct.Acquire(t.Context()) // long before the other's TTL, or the test times out
	if err != nil {
		t.Fatal(err)
	}
	fairRelease(t, lease)
}

func TestSemaphoreOfAnotherSizeIsAnErrorThatNamesBoth(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		name := redistest.Namespace(t)
		two, three := semaphore(t, rdb, name, 2, &semPatient), semaphore(t, rdb, name, 33, &semPatient)
		refused := func(l *lock.Locker, here, there string) {
			t.Helper()
			for what, ask := range map[string]func(context.Context) (*lock.Lease, error){"Acquire": l.Acquire, "TryAcquire": l.TryAcquire} {
				_, err := ask(t.Context())
				if err == nil || errors.Is(err, lock.ErrBusy) || errors.Is(err, lock.ErrUnavailable) || errors.Is(err, lock.ErrAmbiguous) ||
					!strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), here+" here") || !strings.Contains(err.Error(), there+" with") {
					t.Errorf("%s: %v", what, err)
				}
			}
		}
		a, b := fairTake(t, two), fairTake(t, two)
		refused(three, "33", "2")
		fairRelease(t, a)
		refused(three, "33", "2")
		fairRelease(t, b)
		c := fairTake(t, three)
		refused(two, "2", "33")
		fairRelease(t, c)
		fairRelease(t, fairTake(t, two))
	})
}

// semDead lets n holders of one semaphore die, step apart, and returns when their leases end.
func semDead(t *testing.T, m *miniredis.Miniredis, n int, step time.Duration, opts *lock.Options) (ends []time.Time) {
	for range n {
		rdb := redistest.NewMiniClient(t, m)
		fairTake(t, semaphore(t, rdb, "n", n, opts))
		ends = append(ends, time.Now().Add(opts.TTL))
		_ = rdb.Close()
		time.Sleep(step)
	}
	return ends
}

// The wait is guided by the next end of a lease: no pause of a waiter passes it by. What has ended is found out
// by each attempt anew.
//
//fault:killed-holder
func TestDeadHoldersOfASemaphoreAreReplacedRightAfterTheirTTL(t *testing.T) {
	t.Parallel()
	for _, step := range []time.Duration{0, 70 * time.Millisecond} {
		t.Run(fmt.Sprint(step, " apart"), func(t *testing.T) {
			fairBubble(t, func(t *testing.T, m *miniredis.Miniredis) {
				const n = 4
				ends := semDead(t, m, n, step, &lock.Options{TTL: time.Second, RedisTimeout: 100 * time.Millisecond})
				l := semaphore(t, redistest.NewMiniClient(t, m), "n", n, nil)
				if _, err := l.TryAcquire(t.Context()); err != lock.ErrBusy {
					t.Errorf("TryAcquire: %v", err)
				}
				var mu sync.Mutex
				var got []time.Time
				var leases []*lock.Lease
				var wg sync.WaitGroup
				for range n {
					wg.Go(func() {
						ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
						defer cancel()
						lease, err := l.Acquire(ctx)
						mu.Lock()
						defer mu.Unlock()
						if err != nil {
							t.Error(err)
						}
						got, leases = append(got, time.Now()), append(leases, lease)
					})
				}
				wg.Wait()
				for i, at := range got {
					if late := at.Sub(ends[i]); late < 0 || late > 6*time.Millisecond {
						t.Errorf("place %d was granted %v after its end", i, late)
					}
				}
				if _, err := l.TryAcquire(t.Context()); err != lock.ErrBusy {
					t.Errorf("TryAcquire: %v", err)
				}
				for _, lease := range leases {
					fairRelease(t, lease)
				}
			})
		})
	}
}

func TestAPlaceInASemaphoreIsHeldForAsLongAsItsHolderLives(t *testing.T) {
	t.Parallel()
	fairBubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		l := semaphore(t, redistest.NewMiniClient(t, m), "n", 2, nil)
		other := semaphore(t, redistest.NewMiniClient(t, m), "n", 2, nil)
		a, b := fairTake(t, l), fairTake(t, l)
		if a.Fence() >= b.Fence() {
			t.Errorf("fence %d, then %d", a.Fence(), b.Fence())
		}
		for range 40 { // four times the TTL
			time.Sleep(time.Second)
			if _, err := other.TryAcquire(t.Context()); err != lock.ErrBusy {
				t.Fatalf("TryAcquire: %v", err)
			}
		}
		fairRelease(t, a)
		c := fairTake(t, other)
		if c.Fence() <= b.Fence() {
			t.Errorf("fence %d, then %d", b.Fence(), c.Fence())
		}
		fairRelease(t, b)
		fairRelease(t, c)
		if keys := fairKeys(m); len(keys) != 0 {
			t.Errorf("%v are left", keys)
		}
	})
}

// A holder with a short TTL neither keeps a dead one with a long TTL alive nor cuts it short, and the other way
// round. The keys live as long as the longest, and not much longer.
func TestEachHolderOfASemaphoreEndsByItsOwnTTL(t *testing.T) {
	t.Parallel()
	const long, short = time.Minute, 2 * time.Second
	for _, dies := range []time.Duration{long, short} {
		t.Run(fmt.Sprint("the one of ", dies, " dies"), func(t *testing.T) {
			fairBubble(t, func(t *testing.T, m *miniredis.Miniredis) {
				var dead *redis.Client
				var alive *lock.Lease
				for _, ttl := range []time.Duration{long, short} {
					rdb := redistest.NewMiniClient(t, m)
					lease := fairTake(t, semaphore(t, rdb, "n", 2, &lock.Options{TTL: ttl}))
					if ttl == dies {
						dead = rdb
					} else {
						alive = lease
					}
				}
				time.Sleep(time.Millisecond)
				end := time.Now().Add(dies - time.Millisecond)
				_ = dead.Close()
				l := semaphore(t, redistest.NewMiniClient(t, m), "n", 2, &lock.Options{TTL: short})
				for time.Now().Before(end) {
					if _, err := l.TryAcquire(t.Context()); err != lock.ErrBusy {
						t.Fatalf("TryAcquire %v before its end: %v", time.Until(end), err)
					}
					for _, key := range fairKeys(m) {
						if ttl := m.TTL(key); ttl < time.Until(end) || ttl > long+time.Second {
							t.Fatalf("%s lives for %v", key, ttl)
						}
					}
					time.Sleep(min(900*time.Millisecond, time.Until(end)))
				}
				lease := fairTake(t, l)
				if err := alive.Context().Err(); err != nil {
					t.Errorf("the other one has ended: %v", err)
				}
				fairRelease(t, lease)
				fairRelease(t, alive)
			})
		})
	}
}

func TestTheKeysOfASemaphoreAreGoneWhenAllHoldersHaveDied(t *testing.T) {
	t.Parallel()
	fairBubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		ends := semDead(t, m, 5, 300*time.Millisecond, &lock.Options{TTL: 10 * time.Second})
		last := ends[len(ends)-1]
		time.Sleep(time.Until(last) - time.Millisecond)
		if keys := fairKeys(m); len(keys) != 2 {
			t.Errorf("before the last has ended there are %v", keys)
		}
		time.Sleep(time.Millisecond + time.Second)
		if keys := fairKeys(m); len(keys) != 0 {
			t.Errorf("%v are left", keys)
		}
		time.Sleep(24 * time.Hour)
		if keys := m.Keys(); len(keys) != 0 {
			t.Errorf("%v are left after a day", keys)
		}
	})
}

func TestALostPlaceInASemaphoreIsNotTakenAgainByRenewing(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"removed", "all keys are lost"} {
		t.Run(how, func(t *testing.T) {
			fairBubble(t, func(t *testing.T, m *miniredis.Miniredis) {
				l := semaphore(t, redistest.NewMiniClient(t, m), "n", 1, nil)
				lease := fairTake(t, l)
				time.Sleep(time.Second)
				if how == "removed" {
					holders, err := m.ZMembers(fairLockKey)
					if err != nil || len(holders) != 1 {
						t.Fatal(holders, err)
					}
					if _, err := m.ZRem(fairLockKey, holders[0]); err != nil {
						t.Fatal(err)
					}
				} else {
					m.FlushAll()
				}
				second := fairTake(t, l)
				if second.Fence() <= lease.Fence() {
					t.Errorf("fence %d, then %d", lease.Fence(), second.Fence())
				}
				<-lease.Context().Done()
				if err := context.Cause(lease.Context()); !errors.Is(err, lock.ErrLost) {
					t.Errorf("the first was told %v", err)
				}
				if err := lease.Release(t.Context()); !errors.Is(err, lock.ErrLost) {
					t.Errorf("Release: %v", err)
				}
				time.Sleep(time.Minute)
				if holders, _ := m.ZMembers(fairLockKey); len(holders) != 1 || second.Context().Err() != nil {
					t.Errorf("there are %d holders; the second: %v", len(holders), second.Context().Err())
				}
				fairRelease(t, second)
			})
		})
	}
}

func TestTryAcquireOfASemaphoreIsOneCommand(t *testing.T) {
	t.Parallel()
	fairBubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		l := semaphore(t, redistest.NewMiniClient(t, m), "n", 1, nil)
		lease := fairTake(t, l)
		asked := 0
		fairWatch(m, func(*server.Peer, string, string, []string) bool { asked++; return false })
		begun := time.Now()
		if _, err := l.TryAcquire(t.Context()); err != lock.ErrBusy {
			t.Errorf("TryAcquire: %v", err)
		}
		if asked != 1 || time.Since(begun) != 0 {
			t.Errorf("%d commands, %v", asked, time.Since(begun))
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		for what, ask := range map[string]func(context.Context) (*lock.Lease, error){"Acquire": l.Acquire, "TryAcquire": l.TryAcquire} {
			if _, err := ask(ended); err != context.Canceled || asked != 1 {
				t.Errorf("%s with a context that has ended: %v, %d commands", what, err, asked-1)
			}
		}
		fairRelease(t, lease)
	})
}

func TestWaitersOfASemaphoreAskRedisModeratelyAndGiveUpOnTime(t *testing.T) {
	t.Parallel()
	fairBubble(t, func(t *testing.T, m *miniredis.Miniredis) {
		const n, patience = 20, 7 * time.Second
		l := semaphore(t, redistest.NewMiniClient(t, m), "n", 1, nil)
		lease := fairTake(t, l)
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		begun := time.Now()
		var wg sync.WaitGroup
		for range n {
			wg.Go(func() {
				if _, err := l.Acquire(ctx); !errors.Is(err, lock.ErrBusy) || !errors.Is(err, context.DeadlineExceeded) {
					t.Error(err)
				}
				if d := time.Since(begun); d != patience {
					t.Errorf("gave up after %v", d)
				}
			})
		}
		time.Sleep(2 * time.Second) // at first they ask more often
		var asked atomic.Int64
		fairWatch(m, func(*server.Peer, string, string, []string) bool { asked.Add(1); return false })
		time.Sleep(4 * time.Second)
		if perSecond := asked.Load() / 4; perSecond > 12*n {
			t.Errorf("%d commands in a second by %d waiters", perSecond, n)
		}
		wg.Wait()
		fairRelease(t, lease)
	})
}

// The bubble's clock is that of the clients, and an hour off: all that counts is the server's.
//
//fault:process-clock
func TestAClientsClockChangesNothingForASemaphore(t *testing.T) {
	t.Parallel()
	for _, skew := range []time.Duration{-time.Hour, time.Hour} {
		t.Run(skew.String(), func(t *testing.T) {
			fairBubble(t, func(t *testing.T, m *miniredis.Miniredis) {
				now := time.Now().Add(skew)
				pass := func(d, step time.Duration) {
					for ; d > 0; d -= step {
						time.Sleep(step)
						now = now.Add(step)
						m.SetTime(now)
						synctest.Wait()
					}
				}
				m.SetTime(now)
				rdb := redistest.NewMiniClient(t, m)
				l := semaphore(t, rdb, "n", 2, nil)
				other := semaphore(t, redistest.NewMiniClient(t, m), "n", 2, nil)
				a := fairTake(t, l)
				if d := time.UnixMicro(a.Fence()).Sub(now); d != 0 {
					t.Errorf("the fence is %v off the server's clock", d)
				}
				fairTake(t, l)
				for range 4 {
					pass(5*time.Second, time.Second)
					if _, err := other.TryAcquire(t.Context()); err != lock.ErrBusy {
						t.Fatalf("TryAcquire while two hold it: %v", err)
					}
				}
				fairRelease(t, a)
				b := fairTake(t, other)
				_ = rdb.Close()
				got := make(chan time.Time, 1)
				go func() {
					c, err := other.Acquire(t.Context())
					if err != nil {
						t.Error(err)
					}
					got <- time.Now()
					fairRelease(t, c)
				}()
				died := time.Now()
				pass(11*time.Second, 100*time.Millisecond)
				// Its last renewal was up to a third of its TTL ago.
				if d := (<-got).Sub(died); d < 6*time.Second || d > 10*time.Second+200*time.Millisecond {
					t.Errorf("a dead holder was replaced after %v", d)
				}
				fairRelease(t, b)
			})
		})
	}
}

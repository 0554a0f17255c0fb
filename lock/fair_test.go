package lock_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"
)

// The keys of the name n, and times of a fair mutex by default.
const (
	lockKey  = "{n}:lock"
	queueKey = "{n}:lock:queue"
	aliveKey = "{n}:lock:alive"
	fenceKey = "{n}:lock:fence"

	waiterTTL    = 5 * time.Second
	longestPause = 150 * time.Millisecond
)

// A waiterGroup notes which of its waiters gets a lease, in the order of the grants.
type waiterGroup struct {
	t  testing.TB
	wg sync.WaitGroup

	mu      sync.Mutex
	granted []int // protected by mu
	fence   int64 // protected by mu
}

// join adds a waiter that acquires a lease and releases it.
func (g *waiterGroup) join(ctx context.Context, l *lock.Locker, who int) {
	g.wg.Go(func() {
		lease, err := l.Acquire(ctx)
		g.mu.Lock()
		defer g.mu.Unlock()
		if err != nil {
			return
		}
		if lease.Fence() <= g.fence {
			g.t.Errorf("%d has got fence %d, after %d", who, lease.Fence(), g.fence)
		}
		g.fence = lease.Fence()
		g.granted = append(g.granted, who)
		mustRelease(g.t, lease)
	})
}

// want checks which waiters got a lease, in order.
func (g *waiterGroup) want(who ...int) {
	g.t.Helper()
	g.mu.Lock()
	defer g.mu.Unlock()
	if !slices.Equal(g.granted, who) {
		g.t.Errorf("granted to %v, want %v", g.granted, who)
	}
}

// A fair mutex is granted in the order of arrival also to the waiters of one process, some of which
// leave.
func TestNewFairMutex_OrderInOneProcess(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		opts := &lock.Options{TTL: time.Minute}
		holder := mustAcquire(t, newLocker(t, "fair", rdb, "n", opts))
		lockers := []*lock.Locker{newLocker(t, "fair", rdb, "n", opts), newLocker(t, "fair", redistest.NewMiniClient(t, m), "n", opts)}
		waiters := &waiterGroup{t: t}
		var want []int
		for who := range 60 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // so that a wrong order fails
			defer cancel()
			waiters.join(ctx, lockers[who%2], who)
			synctest.Wait()
			if who%5 == 0 {
				time.AfterFunc(time.Duration(who)*100*time.Millisecond, cancel)
			} else {
				want = append(want, who)
			}
		}
		time.Sleep(4 * waiterTTL)
		mustRelease(t, holder)
		waiters.wg.Wait()
		waiters.want(want...)
	})
}

// A process with waiters is heard of at least three times in its WaiterTTL.
func TestNewFairMutex_WaitersAskInTime(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		waiters int
		opts    lock.Options
	}{
		{1, lock.Options{}},
		{12, lock.Options{}}, // without the bound the last one would sleep for 2 s
		{3, lock.Options{WaiterTTL: 40 * time.Millisecond, RedisTimeout: 10 * time.Millisecond}},
		{12, lock.Options{WaiterTTL: 400 * time.Millisecond, RedisTimeout: 10 * time.Millisecond}},
		{12, lock.Options{WaiterTTL: time.Hour}},
	} {
		what := fmt.Sprintf("%d waiters, %v", test.waiters, test.opts.WaiterTTL)
		runInBubble(t, what, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
			l := newLocker(t, "fair", redistest.NewMiniClient(t, m), "n", &test.opts)
			ttl := test.opts.WaiterTTL
			if ttl == 0 {
				ttl = waiterTTL
			}
			lease := mustTry(t, l)
			c := record(m)
			waiters := &waiterGroup{t: t}
			var want []int
			for who := range test.waiters {
				want = append(want, who)
				waiters.join(t.Context(), l, who)
				synctest.Wait()
			}
			time.Sleep(min(6*ttl, 10*time.Second))
			var last time.Time
			asked := 0
			for _, c := range c.all() {
				if len(c.args) < 5 { // token and TTL, of a renewal
					continue
				}
				if d := c.at.Sub(last); asked > 0 && d > ttl/3 {
					t.Errorf("heard of again after %v", d)
				}
				last = c.at
				asked++
			}
			if asked < 4 {
				t.Errorf("it has asked %d times", asked)
			}
			mustRelease(t, lease)
			waiters.wg.Wait()
			waiters.want(want...)
		})
	}
}

// A mutex does not overtake the queue of a fair mutex of its name.
//
//fault:disagreement
func TestNewMutex_FairMutexOfThatName(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		fair, plain := newLocker(t, "fair", rdb, "n", nil), newLocker(t, "mutex", rdb, "n", nil)
		holder := mustAcquire(t, fair)
		got := make(chan *lock.Lease)
		waiter := newLocker(t, "fair", redistest.NewMiniClient(t, m), "n", nil) // which the release does not wake
		go func() { got <- mustAcquire(t, waiter) }()
		synctest.Wait()
		_, err := plain.TryAcquire(t.Context())
		wantIs(t, "while it is held", err, lock.ErrConflict)
		mustRelease(t, holder)
		_, err = plain.TryAcquire(t.Context())
		wantIs(t, "while it is free", err, lock.ErrConflict)
		mustRelease(t, <-got)
	})
}

// Dead waiters are skipped together, within one WaiterTTL.
//
//fault:killed-waiters
func TestNewFairMutex_DeadWaiters(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 10, 200} {
		for _, late := range []bool{false, true} {
			what := fmt.Sprintf("%d, long dead %v", n, late)
			runInBubble(t, what, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				holder, mortal, live := redistest.NewMiniClient(t, m), redistest.NewMiniClient(t, m), redistest.NewMiniClient(t, m)
				lease := mustTry(t, newLocker(t, "fair", holder, "n", nil))
				doomed, waiters := &waiterGroup{t: t}, &waiterGroup{t: t}
				l := newLocker(t, "fair", mortal, "n", nil)
				for who := range n {
					doomed.join(t.Context(), l, who)
					synctest.Wait()
				}
				waiters.join(t.Context(), newLocker(t, "fair", live, "n", nil), n)
				synctest.Wait()
				time.Sleep(time.Second)
				_ = mortal.Close()
				died := time.Now()
				if late {
					time.Sleep(2 * waiterTTL)
				}
				released := time.Now()
				mustRelease(t, lease)
				c := record(m)
				waiters.wg.Wait()
				waiters.want(n)
				if asked := len(c.all()); asked > 60 {
					t.Errorf("the living waiter asked %d times", asked)
				}
				// The living waiter may be asleep when the dead are skipped, for a third of
				// WaiterTTL.
				if d := time.Since(died); !late && d > waiterTTL+waiterTTL/3 {
					t.Errorf("waited %v for dead waiters", d)
				}
				if d := time.Since(released); late && d > longestPause {
					t.Errorf("waited %v for waiters that were long dead", d)
				}
				doomed.wg.Wait()
				synctest.Wait()
				wantKeys(t, rdb, "n", ":fence")
			})
		}
	}
}

// A waiter leaves the queue also after an outage that is longer than a lease: a place may live
// longer.
//
//fault:refused-writes
func TestNewFairMutex_LongOutage(t *testing.T) {
	for what, fails := range map[string]fault{
		"no connection": noConnection, "writes are refused": refusal("NOREPLICAS Not enough good replicas to write."),
	} {
		runInBubble(t, what, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
			rdb := redistest.NewMiniClient(t, m)
			lease := mustTry(t, newLocker(t, "fair", rdb, "n", nil))
			cut, f := withFaults(t, m)
			l := newLocker(t, "fair", cut, "n", &lock.Options{TTL: 2 * time.Second, WaiterTTL: time.Minute})
			ended := make(chan error, 1)
			go func() { _, err := l.Acquire(t.Context()); ended <- err }()
			time.Sleep(time.Second)
			f.set(fails)
			if err := <-ended; !errors.Is(err, lock.ErrUnavailable) {
				t.Errorf("Acquire: %v, want ErrUnavailable", err)
			}
			time.Sleep(10 * time.Second)
			if !m.Exists(queueKey) {
				t.Error("it is not in the queue, so this proves nothing")
			}
			f.set(nil)
			time.Sleep(time.Second)
			if m.Exists(queueKey) {
				t.Error("it is still in the queue")
			}
			mustRelease(t, lease)
		})
	}
}

// If a waiter leaves while its command is unanswered, which would keep the places of its process, the next waiter asks
// at once: Redis may have been away for nearly WaiterTTL.
//
//fault:stalled-waiters
func TestNewFairMutex_LeavesDuringAStall(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		learn(t, rdb)
		holder := mustAcquire(t, newLocker(t, "fair", rdb, "n", nil))
		client, f := withFaults(t, m)
		l := newLocker(t, "fair", client, "n", nil)
		first, leave := context.WithCancel(t.Context())
		var waiters waiterGroup
		for i := range 3 {
			ctx := t.Context()
			if i == 0 {
				ctx = first
			}
			waiters.wg.Go(func() {
				if lease, err := l.Acquire(ctx); err == nil {
					mustRelease(t, lease)
				} else if i > 0 || !errors.Is(err, context.Canceled) {
					t.Errorf("waiter %d: %v", i, err)
				}
			})
			time.Sleep(listening)
		}
		f.set(silence, "acquire")
		time.Sleep(waiterTTL * 3 / 4)
		f.set(nil)
		leave()
		synctest.Wait()
		alive, err := m.SortedSet(aliveKey)
		if err != nil || len(alive) != 1 {
			t.Errorf("alive are %v, want one process: %v", alive, err)
		}
		for _, until := range alive {
			if d := time.Until(time.UnixMilli(int64(until))); d < waiterTTL {
				t.Errorf("the places are kept for %v, want %v", d, waiterTTL)
			}
		}
		mustRelease(t, holder)
		waiters.wg.Wait()
	})
}

// A thousand callers of a process that arrive together send few commands, each of which carries a bounded number of
// tokens. If they give up together, each has given back its place when it returns.
//
//fault:many-waiters
func TestNewFairMutex_ManyWaiters(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		const waiters = 1000
		learn(t, rdb)
		c := record(m)
		holder := mustAcquire(t, newLocker(t, "fair", rdb, "n", nil))
		l := newLocker(t, "fair", redistest.NewMiniClient(t, m), "n", nil)
		ctx, leave := context.WithCancel(t.Context())
		var all sync.WaitGroup
		for range waiters {
			all.Go(func() {
				_, err := l.Acquire(ctx)
				wantIs(t, "Acquire", err, lock.ErrBusy, context.Canceled)
			})
		}
		synctest.Wait()
		queue, err := m.ZMembers(queueKey)
		if err != nil || len(queue) != waiters {
			t.Errorf("%d have a place: %v", len(queue), err)
		}
		if alive, err := m.ZMembers(aliveKey); err != nil || len(alive) != 1 {
			t.Errorf("%d processes are alive: %v", len(alive), err)
		}
		time.Sleep(waiterTTL)
		longest := 0
		for _, c := range c.all() {
			longest = max(longest, len(c.args))
		}
		if n := len(c.all()); n > 50 || longest > 110 {
			t.Errorf("%d commands, with %d arguments at most", n, longest)
		}
		leave()
		all.Wait()
		mustRelease(t, holder)
		wantKeys(t, rdb, "n", ":fence")
	})
}

// If the server has lost places in the queue, their waiters queue again, and the others keep their order.
//
//fault:lost-places
func TestNewFairMutex_LostPlaces(t *testing.T) {
	t.Parallel()
	for what, lose := range map[string]func(m *miniredis.Miniredis, queue []string) (last []int){
		"one of the first": func(m *miniredis.Miniredis, queue []string) []int {
			_, _ = m.ZRem(queueKey, queue[3])
			return []int{3}
		},
		"many": func(m *miniredis.Miniredis, queue []string) (last []int) {
			for who := range queue {
				if who < 50 || who > 150 {
					_, _ = m.ZRem(queueKey, queue[who])
					last = append(last, who)
				}
			}
			return last
		},
		"all": func(m *miniredis.Miniredis, queue []string) []int { m.Del(queueKey); m.Del(aliveKey); return nil },
	} {
		runInBubble(t, what, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
			holder := mustAcquire(t, newLocker(t, "fair", rdb, "n", nil))
			l := newLocker(t, "fair", redistest.NewMiniClient(t, m), "n", nil)
			waiters := &waiterGroup{t: t}
			var order []int
			for who := range 250 {
				waiters.join(t.Context(), l, who)
				synctest.Wait()
				order = append(order, who)
			}
			queue, err := m.ZMembers(queueKey)
			redistest.Must(t, err)
			last := lose(m, queue)
			time.Sleep(waiterTTL)
			if queue, err := m.ZMembers(queueKey); err != nil || len(queue) != 250 {
				t.Errorf("%d have a place again: %v", len(queue), err)
			}
			mustRelease(t, holder)
			waiters.wg.Wait()
			waiters.want(append(slices.DeleteFunc(order, func(who int) bool { return slices.Contains(last, who) }), last...)...)
		})
	}
}

// A place that no waiter has any more does not keep the lock, although its process is alive: a failover may bring it
// back.
//
//fault:lost-places
func TestNewFairMutex_StrayPlace(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		l := newLocker(t, "fair", rdb, "n", nil)
		holder := mustAcquire(t, l)
		token, err := m.Get(lockKey)
		redistest.Must(t, err)
		waiters := &waiterGroup{t: t}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		waiters.join(ctx, l, 1)
		synctest.Wait()
		for i := range 20 {
			_, _ = m.ZAdd(queueKey, float64(-i), token[:20]+fmt.Sprintf("%06d", i))
		}
		mustRelease(t, holder)
		released := time.Now()
		waiters.wg.Wait()
		waiters.want(1)
		if d := time.Since(released); d > waiterTTL {
			t.Errorf("it waited for %v", d)
		}
		wantKeys(t, rdb, "n", ":fence")
	})
}

// Processes that die while others wait leave few places behind, however many they had: each waiter that queues makes
// the server look at some others.
//
//fault:killed-waiters
func TestNewFairMutex_DeadWaitersBehindALivingOne(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		const processes, each = 40, 100
		holder := mustAcquire(t, newLocker(t, "fair", rdb, "n", nil))
		living, doomed := &waiterGroup{t: t}, &waiterGroup{t: t}
		living.join(t.Context(), newLocker(t, "fair", redistest.NewMiniClient(t, m), "n", nil), 0)
		synctest.Wait()
		for range processes {
			mortal := redistest.NewMiniClient(t, m)
			l := newLocker(t, "fair", mortal, "n", nil)
			for who := range each {
				doomed.join(t.Context(), l, who)
			}
			synctest.Wait()
			_ = mortal.Close()
			time.Sleep(2 * waiterTTL)
		}
		if queue, _ := m.ZMembers(queueKey); len(queue) > 5*each {
			t.Errorf("%d places are left", len(queue))
		}
		if alive, _ := m.ZMembers(aliveKey); len(alive) > 2 {
			t.Errorf("%d processes count as alive", len(alive))
		}
		mustRelease(t, holder)
		living.wg.Wait()
		living.want(0)
		doomed.wg.Wait()
		time.Sleep(2 * waiterTTL) // the keys expire
		wantKeys(t, rdb, "n", ":fence")
	})
}

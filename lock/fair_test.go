package lock_test

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
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
	t    testing.TB
	wg   sync.WaitGroup
	hold time.Duration

	mu      sync.Mutex
	granted []int         // protected by mu
	at      []time.Time   // protected by mu
	ends    []time.Time   // protected by mu: when the releases began
	fence   int64         // protected by mu
	errs    map[int]error // protected by mu
}

// join adds a waiter that acquires a lease, holds and releases it.
func (g *waiterGroup) join(ctx context.Context, l *lock.Locker, who int) {
	g.wg.Go(func() {
		lease, err := l.Acquire(ctx)
		g.mu.Lock()
		defer g.mu.Unlock()
		if err != nil {
			if g.errs == nil {
				g.errs = make(map[int]error)
			}
			g.errs[who] = err
			return
		}
		if lease.Fence() <= g.fence {
			g.t.Errorf("%d has got fence %d, after %d", who, lease.Fence(), g.fence)
		}
		g.fence = lease.Fence()
		g.granted, g.at = append(g.granted, who), append(g.at, time.Now())
		time.Sleep(g.hold)
		g.ends = append(g.ends, time.Now())
		mustRelease(g.t, lease)
	})
}

// want checks which waiters got a lease, in order.
func (g *waiterGroup) want(who ...int) {
	g.t.Helper()
	g.mu.Lock()
	defer g.mu.Unlock()
	if !slices.Equal(g.granted, who) {
		g.t.Errorf("granted to %v, want %v; %v", g.granted, who, g.errs)
	}
}

func upTo(n int) (who []int) {
	for i := range n {
		who = append(who, i)
	}
	return who
}

// leftKeys returns all keys but the last fence and the marks of ended attempts.
func leftKeys(m *miniredis.Miniredis) []string {
	return slices.DeleteFunc(m.Keys(), func(k string) bool { return k == fenceKey || strings.Contains(k, ":ended") })
}

// watchScripts calls tell before each script, with its keys and arguments. If tell answers, the
// script does not run.
func watchScripts(m *miniredis.Miniredis, tell func(p *server.Peer, op, token string, args []string) bool) {
	m.Server().SetPreHook(func(p *server.Peer, cmd string, args ...string) bool {
		if cmd != "EVALSHA" && cmd != "EVAL" {
			return false
		}
		n, _ := strconv.Atoi(args[1])
		rest := args[2+n:] // token, TTL, life of the fence ... of acquire; token, TTL of renew
		op := "other"
		if len(rest) > 4 {
			op = "acquire"
		} else if len(rest) == 2 {
			op = "renew"
		}
		return tell(p, op, rest[0], args[1:])
	})
}

// A fair mutex is granted in the order of arrival, on every kind of client.
func TestNewFairMutex_Order(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		const n = 12
		name := redistest.Namespace(t)
		var lockers []*lock.Locker
		for i := range 3 { // with different options their waiters ask separately
			ttl := time.Minute + time.Duration(i)*time.Second
			lockers = append(lockers, newLocker(t, "fair", rdb, name, patient(lock.Options{TTL: ttl})))
		}
		lease := mustTry(t, lockers[0])
		waiters := &waiterGroup{t: t}
		for who := range n {
			waiters.join(t.Context(), lockers[who%3], who)
			redistest.Await(t, "the waiter has a place", func() bool {
				// By a script, since one kind of client caches what it reads.
				return rdb.Eval(t.Context(), `return redis.call('ZCARD', KEYS[1])`, []string{"{" + name + "}:lock:queue"}).Val() == int64(who+1)
			})
		}
		if _, err := lockers[1].TryAcquire(t.Context()); err != lock.ErrBusy {
			t.Errorf("TryAcquire: %v", err)
		}
		mustRelease(t, lease)
		waiters.wg.Wait()
		waiters.want(upTo(n)...)
		for _, key := range []string{"lock", "lock:queue", "lock:alive"} {
			if n := rdb.Exists(t.Context(), "{"+name+"}:"+key).Val(); n != 0 {
				t.Errorf("%s is left", key)
			}
		}
	})
}

// Waiters that arrive in one instant keep their order, however long and often they ask: a place is
// a number, not a time. At no time is there a key that would live for ever.
func TestNewFairMutex_OrderOfOneInstant(t *testing.T) {
	t.Parallel()
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
		const n = 25
		var lockers []*lock.Locker
		for range 4 {
			lockers = append(lockers, newLocker(t, "fair", redistest.NewMiniClient(t, m), "n", nil))
		}
		lease := mustTry(t, lockers[0])
		waiters := &waiterGroup{t: t, hold: time.Millisecond}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // so that a wrong order fails
		defer cancel()
		begun := time.Now()
		for who := range n {
			waiters.join(ctx, lockers[who%4], who)
			synctest.Wait()
		}
		if time.Since(begun) != 0 {
			t.Fatal("they did not arrive in one instant")
		}
		for range 30 {
			time.Sleep(time.Second)
			for _, key := range m.Keys() {
				if ttl := m.TTL(key); ttl <= 0 || key != fenceKey && ttl > 2*waiterTTL {
					t.Fatalf("%s lives for %v", key, ttl)
				}
			}
		}
		mustRelease(t, lease)
		waiters.wg.Wait()
		waiters.want(upTo(n)...)
		synctest.Wait()
		if keys := leftKeys(m); len(keys) != 0 {
			t.Errorf("%v are left", keys)
		}
	})
}

// A fair mutex is granted in the order of arrival also to the waiters of one process, some of which
// leave.
func TestNewFairMutex_OrderInOneProcess(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		opts := &lock.Options{TTL: time.Minute}
		holder := mustAcquire(t, newLocker(t, "fair", rdb, "n", opts))
		lockers := []*lock.Locker{newLocker(t, "fair", rdb, "n", opts), newLocker(t, "fair", redistest.NewMiniClient(t, m), "n", opts)}
		var mu sync.Mutex
		var order, want []int
		var wg sync.WaitGroup
		for i := range 60 {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			wg.Go(func() {
				lease, err := lockers[i%2].Acquire(ctx)
				if i%5 == 0 {
					wantIs(t, "Acquire", err, lock.ErrBusy, context.Canceled)
					return
				}
				mu.Lock()
				order = append(order, i)
				mu.Unlock()
				mustRelease(t, lease)
			})
			synctest.Wait()
			if i%5 == 0 {
				time.AfterFunc(time.Duration(i)*100*time.Millisecond, cancel)
			} else {
				want = append(want, i)
			}
		}
		time.Sleep(4 * waiterTTL)
		mustRelease(t, holder)
		wg.Wait()
		if !slices.Equal(order, want) {
			t.Errorf("granted to %v", order)
		}
	})
}

// Each waiter is heard of at least three times in its WaiterTTL.
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
		t.Run(fmt.Sprintf("%d waiters, %v", test.waiters, test.opts.WaiterTTL), func(t *testing.T) {
			inBubble(t, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
				l := newLocker(t, "fair", redistest.NewMiniClient(t, m), "n", &test.opts)
				ttl := test.opts.WaiterTTL
				if ttl == 0 {
					ttl = waiterTTL
				}
				lease := mustTry(t, l)
				var mu sync.Mutex
				last := make(map[string]time.Time)
				asked := 0
				watchScripts(m, func(_ *server.Peer, op, token string, args []string) bool {
					mu.Lock()
					defer mu.Unlock()
					if op != "acquire" {
						return false
					}
					asked++
					// The tokens of other waiters come after five keys and five arguments.
					for _, token := range append(args[11:], token) {
						if at, again := last[token]; again && time.Since(at) > ttl/3 {
							t.Errorf("heard of again after %v", time.Since(at))
						}
						last[token] = time.Now()
					}
					return false
				})
				waiters := &waiterGroup{t: t}
				for who := range test.waiters {
					waiters.join(t.Context(), l, who)
					synctest.Wait()
				}
				time.Sleep(min(6*ttl, 10*time.Second))
				mu.Lock()
				if len(last) != test.waiters || asked < 4 {
					t.Errorf("%d have asked %d times", len(last), asked)
				}
				mu.Unlock()
				mustRelease(t, lease)
				waiters.wg.Wait()
				waiters.want(upTo(test.waiters)...)
			})
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

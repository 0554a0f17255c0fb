package lock_test

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

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"
)

// Dead waiters are skipped together, within one WaiterTTL.
//
//fault:killed-waiters
func TestNewFairMutex_DeadWaiters(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 10, 200} {
		for _, late := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d, long dead %v", n, late), func(t *testing.T) {
				inBubble(t, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
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
					var asked atomic.Int64
					watchScripts(m, func(*server.Peer, string, string, []string) bool { asked.Add(1); return false })
					waiters.wg.Wait()
					waiters.want(n)
					if asked.Load() > 60 {
						t.Errorf("the living waiter asked %d times", asked.Load())
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
					if keys := leftKeys(m); len(keys) != 0 {
						t.Errorf("%v are left", keys)
					}
				})
			})
		}
	}
}

// A waiter that gives up leaves the queue at once.
//
//fault:cancelled
func TestNewFairMutex_WaiterGivesUp(t *testing.T) {
	t.Parallel()
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
		l := newLocker(t, "fair", redistest.NewMiniClient(t, m), "n", nil)
		lease := mustTry(t, l)
		waiters := &waiterGroup{t: t}
		leaving, cancel := context.WithCancel(t.Context())
		waiters.join(leaving, l, 0)
		synctest.Wait()
		ending, stop := context.WithTimeout(t.Context(), time.Minute)
		defer stop()
		waiters.join(ending, l, 1)
		synctest.Wait()
		waiters.join(t.Context(), l, 2)
		synctest.Wait()
		for left, leave := range []func(){cancel, func() { time.Sleep(time.Minute) }} {
			leave()
			synctest.Wait()
			queue, _ := m.ZMembers(queueKey)
			alive, _ := m.ZMembers(aliveKey)
			if want := 2 - left; len(queue) != want || len(alive) != want {
				t.Errorf("%d are in the queue, %d alive, want %d", len(queue), len(alive), want)
			}
		}
		waiters.mu.Lock()
		for who, why := range []error{context.Canceled, context.DeadlineExceeded} {
			if err := waiters.errs[who]; !errors.Is(err, lock.ErrBusy) || !errors.Is(err, why) {
				t.Errorf("%d gave up with %v", who, err)
			}
		}
		waiters.mu.Unlock()
		time.Sleep(time.Second) // by then the last waiter knows that it is the first
		released := time.Now()
		mustRelease(t, lease)
		waiters.wg.Wait()
		waiters.want(2)
		if d := time.Since(released); d > longestPause {
			t.Errorf("the next got it after %v", d)
		}
	})
}

// A waiter leaves the queue when the server answers with an error.
func TestNewFairMutex_ServerError(t *testing.T) {
	t.Parallel()
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
		l := newLocker(t, "fair", redistest.NewMiniClient(t, m), "n", nil)
		lease := mustTry(t, l)
		waiters := &waiterGroup{t: t}
		waiters.join(t.Context(), l, 0)
		synctest.Wait()
		watchScripts(m, func(p *server.Peer, op, _ string, _ []string) bool {
			if op == "acquire" {
				p.WriteError("ERR something has gone wrong in the script")
			}
			return op == "acquire"
		})
		waiters.wg.Wait()
		synctest.Wait()
		if err := waiters.errs[0]; !errors.Is(err, lock.ErrUnavailable) {
			t.Errorf("Acquire: %v", err)
		}
		if m.Exists(queueKey) || m.Exists(aliveKey) {
			t.Error("the waiter is still in the queue")
		}
		mustRelease(t, lease)
	})
}

// A waiter leaves the queue also after an outage that is longer than a lease: a place may live
// longer.
func TestNewFairMutex_LongOutage(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
		rdb := redistest.NewMiniClient(t, m)
		lease := mustTry(t, newLocker(t, "fair", rdb, "n", nil))
		cut, f := withFaults(t, m)
		l := newLocker(t, "fair", cut, "n", &lock.Options{TTL: 2 * time.Second, WaiterTTL: time.Minute})
		ended := make(chan error, 1)
		go func() { _, err := l.Acquire(t.Context()); ended <- err }()
		time.Sleep(time.Second)
		f.set(noConnection)
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

// Whatever keys are lost, to an eviction or by hand, no waiter waits for ever, and a holder that
// another one has joined learns it.
//
//fault:foreign-key
func TestNewFairMutex_LostKeys(t *testing.T) {
	t.Parallel()
	for _, keys := range [][]string{
		{queueKey}, {aliveKey}, {lockKey}, {fenceKey}, {queueKey, aliveKey},
		{lockKey, aliveKey}, {lockKey, queueKey}, {lockKey, queueKey, aliveKey, fenceKey},
	} {
		t.Run(strings.Join(keys, " "), func(t *testing.T) {
			inBubble(t, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
				const n = 12
				l := newLocker(t, "fair", redistest.NewMiniClient(t, m), "n", nil)
				var inside, lostLeases atomic.Int32
				var wg sync.WaitGroup
				for who := range n {
					wg.Go(func() {
						lease, err := l.Acquire(t.Context())
						if err != nil {
							t.Error(who, err)
							return
						}
						if n := inside.Add(1); n > 1 && !slices.Contains(keys, lockKey) {
							t.Errorf("%d hold it", n)
						}
						select {
						case <-lease.Context().Done():
						case <-time.After(300 * time.Millisecond):
						}
						inside.Add(-1)
						if err := lease.Release(t.Context()); errors.Is(err, lock.ErrLost) {
							lostLeases.Add(1)
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
							if m.Del(key) && key == lockKey {
								lost++
							}
						}
					}
				}
				// A holder whose lock was lost during its release may not have known.
				if n := int(lostLeases.Load()); n > lost || n < lost/2 {
					t.Errorf("%d leases were lost, %d holders know it", lost, n)
				}
				synctest.Wait()
				if keys := leftKeys(m); len(keys) != 0 {
					t.Errorf("%v are left", keys)
				}
			})
		})
	}
}

// The keys of a lock are gone when its holder and all waiters have died.
func TestAcquire_AllDie(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, _ *redis.Client) {
		rdb := redistest.NewMiniClient(t, m)
		l := newLocker(t, kind, rdb, "n", nil)
		lease := mustTry(t, l)
		waiters := &waiterGroup{t: t}
		for who := range 10 {
			waiters.join(t.Context(), l, who)
		}
		time.Sleep(5 * time.Second)
		_ = rdb.Close()
		// A waiter that was to be woken is known for longer.
		time.Sleep(max(leaseTTL, 2*waiterTTL, 12*time.Second))
		waiters.wg.Wait()
		if keys := leftKeys(m); len(keys) != 0 {
			t.Errorf("%v are left", keys)
		}
		if err := context.Cause(lease.Context()); !errors.Is(err, lock.ErrLost) {
			t.Errorf("the holder learnt %v", err)
		}
		time.Sleep(24 * time.Hour)
		if keys := m.Keys(); len(keys) != 0 {
			t.Errorf("%v are left after a day", keys)
		}
	})
}

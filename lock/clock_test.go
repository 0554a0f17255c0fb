package lock_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/locktest"
	"github.com/singlefill/singlefill/lock"
)

// A serverClock is the clock of a miniredis, which stands still once it is set.
type serverClock struct {
	m   *miniredis.Miniredis
	mu  sync.Mutex
	off time.Duration // protected by mu
}

// runClock makes the clock of the server follow the bubble's clock, until stop is called.
func runClock(m *miniredis.Miniredis) (c *serverClock, stop func()) {
	c = &serverClock{m: m}
	stopped := make(chan struct{})
	go func() {
		for {
			select {
			case <-stopped:
				return
			case <-time.After(10 * time.Millisecond):
				c.put(0)
			}
		}
	}()
	return c, func() { close(stopped) }
}

// put puts the clock forward or back.
func (c *serverClock) put(by time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.off += by
	c.m.SetTime(time.Now().Add(c.off))
}

// If the server's clock is put forward, leases are lost; if it is put back, they are not. The clock
// of a real server cannot be moved by a test; miniredis' can.
//
//fault:server-clock
func TestLease_ServerClockJumps(t *testing.T) {
	const ttl, timeout = 3 * time.Second, 500 * time.Millisecond
	for _, k := range locktest.Kinds {
		for _, jump := range []time.Duration{time.Hour, -time.Hour} {
			t.Run(k.Name+" "+jump.String(), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					m, rdb := redistest.StartMini(t)
					clock, stop := runClock(m)
					defer stop()
					holder := k.Locker(t, rdb, "name", timeout, ttl)
					leases := k.Fill(t, holder)
					other := k.Locker(t, redistest.NewMiniClient(t, m), "name", timeout, ttl)
					time.Sleep(ttl / 2)
					before, err := rdb.Time(t.Context()).Result()
					redistest.Must(t, err)
					clock.put(jump)
					if moved := rdb.Time(t.Context()).Val().Sub(before); (moved - jump).Abs() > time.Second {
						t.Fatalf("the clock has moved by %v", moved)
					}
					begun := time.Now()
					if jump > 0 {
						next := locktest.Take(t, other)
						if took := time.Since(begun); took > 200*time.Millisecond {
							t.Errorf("another had it after %v", took)
						}
						for _, l := range leases {
							<-l.Context().Done()
							if next.Fence() <= l.Fence() {
								t.Errorf("fence %d after %d", next.Fence(), l.Fence())
							}
						}
						if took := time.Since(begun); took > ttl/3+timeout {
							t.Errorf("the holders learnt it after %v, want a renewal's time", took)
						}
						for _, l := range leases {
							holder.WantLost(t, l, "gone from Redis")
						}
						time.Sleep(3 * ttl) // the clock is off, and stays so
						locktest.Release(t, next)
						return
					}
					for range 20 {
						if _, err := other.TryAcquire(t.Context()); !errors.Is(err, lock.ErrBusy) {
							t.Fatalf("TryAcquire of another = %v, want ErrBusy", err)
						}
						time.Sleep(ttl / 3)
					}
					for _, l := range leases {
						if err := context.Cause(l.Context()); err != nil {
							t.Errorf("a lease was lost: %v", err)
						}
						locktest.Release(t, l)
					}
					if next := locktest.Take(t, other); next.Fence() <= leases[0].Fence() {
						t.Errorf("fence %d after %d", next.Fence(), leases[0].Fence())
					}
				})
			})
		}
	}
}

// Only the server's clock counts. The clients use the bubble's clock, which is an hour off.
//
//fault:process-clock
func TestNewSemaphore_ClientClock(t *testing.T) {
	t.Parallel()
	for _, skew := range []time.Duration{-time.Hour, time.Hour} {
		runInBubble(t, skew.String(), func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
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
			a := mustTry(t, l)
			if d := time.UnixMicro(a.Fence()).Sub(now); d != 0 {
				t.Errorf("the fence is %v off the server's clock", d)
			}
			mustTry(t, l)
			for range 4 {
				pass(5*time.Second, time.Second)
				wantBusy(t, other)
			}
			mustRelease(t, a)
			b := mustTry(t, other)
			_ = rdb.Close()
			got := make(chan time.Time, 1)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // so that a wrong clock fails
			defer cancel()
			go func() {
				c, err := other.Acquire(ctx)
				if err != nil {
					t.Error(err)
				}
				got <- time.Now()
				mustRelease(t, c)
			}()
			died := time.Now()
			pass(11*time.Second, 100*time.Millisecond)
			// The last renewal was up to a third of TTL before.
			if d := (<-got).Sub(died); d < 6*time.Second || d > 10*time.Second+200*time.Millisecond {
				t.Errorf("a dead holder was replaced after %v", d)
			}
			mustRelease(t, b)
		})
	}
}

// A dead waiter does not live longer when the server's clock is put back.
//
//fault:clock-dead-waiter
func TestNewFairMutex_DeadWaiterAndClockPutBack(t *testing.T) {
	for _, before := range []bool{true, false} {
		what := fmt.Sprint("waiter arrived before ", before)
		runInBubble(t, what, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
			opts := &lock.Options{WaiterTTL: 2 * time.Second}
			holder := mustAcquire(t, newLocker(t, "fair", rdb, "n", opts))
			mortal := redistest.NewMiniClient(t, m)
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				_, _ = newLocker(t, "fair", mortal, "n", opts).Acquire(t.Context())
			}()
			synctest.Wait()
			got := make(chan *lock.Lease, 1)
			wait := func() {
				go func() { got <- mustAcquire(t, newLocker(t, "fair", redistest.NewMiniClient(t, m), "n", opts)) }()
				synctest.Wait()
			}
			if before {
				wait()
			}
			_ = mortal.Close()
			<-ended
			clock, stop := runClock(m)
			defer stop()
			clock.put(-time.Hour)
			if !before {
				wait()
			}
			mustRelease(t, holder)
			select {
			case lease := <-got:
				mustRelease(t, lease)
			case <-time.After(2 * opts.WaiterTTL):
				t.Error("the dead waiter keeps the others waiting")
			}
		})
	}
}

package lock_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
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
	for _, jump := range []time.Duration{time.Hour, -time.Hour} {
		runEachKind(t, jump.String(), func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
			clock, stop := runClock(m)
			defer stop()
			lease := mustAcquire(t, newLocker(t, kind, rdb, "n", nil))
			other := newLocker(t, kind, redistest.NewMiniClient(t, m), "n", nil)
			time.Sleep(leaseTTL / 2)
			clock.put(jump)
			begun := time.Now()
			if moved := rdb.Time(t.Context()).Val().Sub(begun); (moved - jump).Abs() > time.Second {
				t.Fatalf("the clock has moved by %v", moved)
			}
			if jump < 0 {
				for range 20 {
					wantBusy(t, other)
					time.Sleep(leaseTTL / 3)
				}
				wantHeld(t, lease)
				mustRelease(t, lease)
			}
			next := mustAcquire(t, other)
			if next.Fence() <= lease.Fence() {
				t.Errorf("fence %d after %d", next.Fence(), lease.Fence())
			}
			if jump > 0 {
				if took := time.Since(begun); took > 200*time.Millisecond {
					t.Errorf("another had it after %v", took)
				}
				wantLost(t, lease)
				if took := time.Since(begun); took > leaseTTL/3+leaseWaits {
					t.Errorf("the holder learnt it after %v, want a renewal's time", took)
				}
				wantIs(t, "Release", lease.Release(t.Context()), lock.ErrLost)
				time.Sleep(3 * leaseTTL) // the clock is off, and stays so
			}
			mustRelease(t, next)
		})
	}
}

// Only the server's clock counts. The clients use the bubble's clock, which is an hour off.
//
//fault:process-clock
func TestNewSemaphore_ClientClock(t *testing.T) {
	t.Parallel()
	for _, skew := range []time.Duration{-time.Hour, time.Hour} {
		runInBubble(t, skew.String(), func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
			clock, stop := runClock(m)
			defer stop()
			clock.put(skew)
			rdb := redistest.NewMiniClient(t, m)
			l := semaphore(t, rdb, "n", 2, nil)
			other := semaphore(t, redistest.NewMiniClient(t, m), "n", 2, nil)
			a := mustTry(t, l)
			if d := time.Until(time.UnixMicro(a.Fence())) - skew; d.Abs() > 10*time.Millisecond {
				t.Errorf("the fence is %v off the server's clock", d)
			}
			mustTry(t, l)
			for range 4 {
				time.Sleep(5 * time.Second)
				wantBusy(t, other)
			}
			mustRelease(t, a)
			b := mustTry(t, other)
			_ = rdb.Close()
			died := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // so that a wrong clock fails
			defer cancel()
			c, err := other.Acquire(ctx)
			redistest.Must(t, err)
			// The last renewal was up to a third of TTL before.
			if d := time.Since(died); d < 6*time.Second || d > 10*time.Second+200*time.Millisecond {
				t.Errorf("a dead holder was replaced after %v", d)
			}
			mustRelease(t, c)
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

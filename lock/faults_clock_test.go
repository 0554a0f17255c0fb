package lock_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"
)

// The clock of a real server cannot be moved by a test. That of miniredis can; what the scripts do with a clock that
// is off, or stands still, is tested on real servers elsewhere.
//
//fault:server-clock
func TestAServersClockThatIsPutForwardLosesLeasesAndOneThatIsPutBackDoesNot(t *testing.T) {
	const ttl, timeout = 3 * time.Second, 500 * time.Millisecond
	for _, k := range faultKinds {
		for _, jump := range []time.Duration{time.Hour, -time.Hour} {
			t.Run(k.name+" "+jump.String(), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					m, rdb := redistest.StartMini(t)
					var mu sync.Mutex
					off := time.Duration(0)          // protected by mu
					tick := func(by time.Duration) { // miniredis' clock stands still once it is set
						mu.Lock()
						defer mu.Unlock()
						off += by
						m.SetTime(time.Now().Add(off))
					}
					stop := make(chan struct{})
					defer close(stop)
					go func() {
						for {
							select {
							case <-stop:
								return
							case <-time.After(10 * time.Millisecond):
								tick(0)
							}
						}
					}()
					holder := k.locker(t, rdb, "name", timeout, ttl)
					leases := k.fill(t, holder)
					other := k.locker(t, redistest.NewMiniClient(t, m), "name", timeout, ttl)
					time.Sleep(ttl / 2)
					before, err := rdb.Time(t.Context()).Result()
					if err != nil {
						t.Fatal(err)
					}
					tick(jump)
					if moved := rdb.Time(t.Context()).Val().Sub(before); (moved - jump).Abs() > time.Second {
						t.Fatalf("the clock has moved by %v", moved)
					}
					begun := time.Now()
					if jump > 0 {
						next := faultTake(t, other)
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
							t.Errorf("the holders were told after %v, want a renewal's time", took)
						}
						for _, l := range leases {
							holder.lost(t, l, faultGone)
						}
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
						faultRelease(t, l)
					}
					if next := faultTake(t, other); next.Fence() <= leases[0].Fence() {
						t.Errorf("fence %d after %d", next.Fence(), leases[0].Fence())
					}
				})
			})
		}
	}
}

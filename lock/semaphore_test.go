package lock_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"
)

func semaphore(t testing.TB, rdb redis.UniversalClient, name string, size int, opts *lock.Options) *lock.Locker {
	t.Helper()
	l, err := lock.NewSemaphore(rdb, name, size, opts)
	redistest.Must(t, err)
	return l
}

// The larger of two sizes counts while a process that has it holds a lease, and until TTL after its last
// renewal; then the smaller one.
//
//fault:disagreement
func TestNewSemaphore_LargerSizeWhileItIsUsed(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		opts := &lock.Options{TTL: 9 * time.Second}
		small := semaphore(t, rdb, "n", 3, opts)
		large := semaphore(t, redistest.NewMiniClient(t, m), "n", 5, opts)
		var leases []*lock.Lease
		defer func() {
			for _, lease := range leases { // of a test that has failed
				_ = lease.Release(context.Background())
			}
		}()
		take := func(n int) {
			t.Helper()
			for range n {
				leases = append(leases, mustTry(t, small))
			}
			wantBusy(t, small)
		}
		release := func(n int) {
			t.Helper()
			for _, lease := range leases[:n] {
				mustRelease(t, lease)
			}
			leases = leases[n:]
		}
		take(3)
		last := mustTry(t, large)
		defer last.Release(context.Background()) // if the test has failed
		take(1)
		time.Sleep(10 * opts.TTL) // the grant was long ago
		release(1)
		take(1)
		mustRelease(t, last)
		time.Sleep(opts.TTL / 2)
		take(1)
		time.Sleep(opts.TTL)
		release(2)
		wantBusy(t, small)
		release(2)
		take(2)
		release(3)
	})
}

// A waiter does not have to wait for a release when a process with a larger size has made place for it.
func TestNewSemaphore_LargerSizeWakesWaiter(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		small := semaphore(t, rdb, "n", 1, nil)
		large := semaphore(t, redistest.NewMiniClient(t, m), "n", 3, nil)
		defer mustRelease(t, mustTry(t, small))
		var wg sync.WaitGroup
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 1010*time.Millisecond)
			defer cancel()
			lease, err := small.Acquire(ctx)
			if err != nil {
				t.Errorf("a waiter of the smaller size: %v", err)
			}
			_ = lease.Release(ctx)
		})
		time.Sleep(time.Second) // it listens
		defer mustRelease(t, mustTry(t, large))
		wg.Wait()
	})
}

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

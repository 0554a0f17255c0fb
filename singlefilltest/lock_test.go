package singlefilltest_test

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"
	"github.com/singlefill/singlefill/singlefilltest"
)

// A bubble ends, whatever a lock or a cache has left to do in the background.
func TestRedis_BubbleEnds(t *testing.T) {
	for name, scene := range map[string]func(t *testing.T, rdb *redis.Client, acquired func() *lock.Lease, l *lock.Locker){
		"released without Redis": func(t *testing.T, rdb *redis.Client, acquired func() *lock.Lease, _ *lock.Locker) {
			lease := acquired()
			singlefilltest.Disconnect(t, rdb)
			if err := lease.Release(t.Context()); err == nil {
				t.Error("Release without Redis returned nil")
			}
		},
		"released in silence": func(t *testing.T, rdb *redis.Client, acquired func() *lock.Lease, _ *lock.Locker) {
			lease := acquired()
			singlefilltest.Silence(t, rdb)
			_ = lease.Release(t.Context())
		},
		"acquired in silence": func(t *testing.T, rdb *redis.Client, _ func() *lock.Lease, l *lock.Locker) {
			singlefilltest.Silence(t, rdb)
			_, _ = l.TryAcquire(t.Context())
		},
		"lost without Redis": func(t *testing.T, rdb *redis.Client, acquired func() *lock.Lease, _ *lock.Locker) {
			lease := acquired()
			singlefilltest.Disconnect(t, rdb)
			<-lease.Context().Done()
		},
		"waited for": func(t *testing.T, _ *redis.Client, acquired func() *lock.Lease, l *lock.Locker) {
			lease := acquired()
			var waiter sync.WaitGroup
			waiter.Go(func() {
				_ = l.Do(t.Context(), func(context.Context) error { return nil })
			})
			time.Sleep(time.Second)
			_ = lease.Release(t.Context())
			waiter.Wait()
		},
		"not released": func(_ *testing.T, _ *redis.Client, acquired func() *lock.Lease, _ *lock.Locker) { acquired() },
		"cache not closed": func(t *testing.T, rdb *redis.Client, _ func() *lock.Lease, _ *lock.Locker) {
			cache, err := singlefill.New(rdb, "cache", time.Hour, &singlefill.Options[string]{Near: &singlefill.Near{}})
			redistest.Must(t, err)
			check(t, cache, upper, "K")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				rdb := singlefilltest.Redis(t)
				l, err := lock.NewMutex(rdb, "n", nil)
				redistest.Must(t, err)
				scene(t, rdb, func() *lock.Lease {
					lease, err := l.Acquire(t.Context())
					redistest.Must(t, err)
					return lease
				}, l)
			})
		})
	}
}

// A Redis of another bubble is reported, with what to do.
func TestRedis_OtherBubble(t *testing.T) {
	t.Parallel()
	wantReport(t, "call it in the bubble in which the test uses it", func(f testing.TB) {
		rdb := singlefilltest.Redis(f)
		synctest.Test(t, func(*testing.T) { _ = rdb.Ping(context.Background()) })
	})
}

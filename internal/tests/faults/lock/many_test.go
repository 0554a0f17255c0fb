package lock_test

import (
	"sync"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/locktest"
)

// Five thousand goroutines of a process want one lock, through a client and a Locker with the defaults. Redis answers,
// so none of them fails.
//
//fault:many-waiters
func TestAcquire_ManyInOneProcess(t *testing.T) {
	for _, k := range locktest.Kinds {
		t.Run(k.Name, func(t *testing.T) { // one after the other, since RedisTimeout counts
			s := redistest.Start(t)
			rdb := redis.NewClient(&redis.Options{Addr: s.Addr})
			defer rdb.Close()
			l, err := k.Open(rdb, k.Name, nil)
			redistest.Must(t, err)
			var callers sync.WaitGroup
			for range 5000 {
				callers.Go(func() {
					lease, err := l.Acquire(t.Context())
					if err != nil {
						t.Errorf("Acquire: %v", err)
					}
					if err := lease.Release(t.Context()); err != nil {
						t.Errorf("Release: %v", err)
					}
				})
			}
			callers.Wait()
			k.WantFree(t, s, k.Name)
		})
	}
}

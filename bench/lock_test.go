package bench

import (
	"context"
	"testing"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"
)

// A locker makes locks of one kind.
type locker struct {
	name string
	lock func(name string) acquirer
}

// An acquirer waits for a lock, and returns the function that releases it.
type acquirer func(ctx context.Context) (release func(ctx context.Context) error, err error)

const lockTTL = 10 * time.Second

// lockers have the same TTL. Those that poll do so as documented: redislock every 100 ms, as in its
// example, redsync every 50 to 250 ms, which is its default. The semaphore has one place, so that
// it does the same work as the others.
func lockers(rdb *redis.Client) []locker {
	opts := &lock.Options{TTL: lockTTL}
	bsm := redislock.New(rdb)
	sync := redsync.New(goredis.NewPool(rdb))
	own := func(l *lock.Locker, err error) acquirer {
		must(l, err)
		return func(ctx context.Context) (func(context.Context) error, error) {
			lease, err := l.Acquire(ctx)
			if err != nil {
				return nil, err
			}
			return lease.Release, nil
		}
	}
	return []locker{
		{"Mutex", func(name string) acquirer { return own(lock.NewMutex(rdb, name, opts)) }},
		{"FairMutex", func(name string) acquirer { return own(lock.NewFairMutex(rdb, name, opts)) }},
		{"Semaphore of 1", func(name string) acquirer { return own(lock.NewSemaphore(rdb, name, 1, opts)) }},
		{"redislock", func(name string) acquirer {
			return func(ctx context.Context) (func(context.Context) error, error) {
				held, err := bsm.Obtain(ctx, name, lockTTL, &redislock.Options{
					RetryStrategy: redislock.LinearBackoff(100 * time.Millisecond)})
				if err != nil {
					return nil, err
				}
				return held.Release, nil
			}
		}},
		{"redsync", func(name string) acquirer {
			return func(ctx context.Context) (func(context.Context) error, error) {
				m := sync.NewMutex(name, redsync.WithExpiry(lockTTL), redsync.WithTries(1<<20))
				if err := m.LockContext(ctx); err != nil {
					return nil, err
				}
				return func(ctx context.Context) error { _, err := m.UnlockContext(ctx); return err }, nil
			}
		}},
	}
}

// BenchmarkLock measures locks in a single goroutine.
func BenchmarkLock(b *testing.B) {
	b.Run("acquire_and_release/free", freeLocks)
}

func freeLocks(b *testing.B) {
	rdb := open(b, redistest.Start(b).Addr)
	ctx := request(b)
	r := race{ops: 50, bases: []string{"redislock", "redsync"}}
	for _, l := range lockers(rdb) {
		r.contenders = append(r.contenders, contender{l.name, func(int) error {
			release, err := l.lock("free:" + l.name)(ctx)
			if err != nil {
				return err
			}
			return release(ctx)
		}})
	}
	r.run(b)
}

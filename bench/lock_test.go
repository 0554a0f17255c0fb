package bench

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"
)

// A locker waits for the lock of a name, and returns the function that releases it.
type locker struct {
	name    string
	acquire func(ctx context.Context, name string) (release func(ctx context.Context) error, err error)
}

const lockTTL = 10 * time.Second

// lockers have the same TTL. Those that poll do so as documented: redislock every 100 ms, as in its
// example, redsync every 50 to 250 ms, which is its default.
func lockers(rdb *redis.Client) []locker {
	opts := &lock.Options{TTL: lockTTL}
	bsm := redislock.New(rdb)
	sync := redsync.New(goredis.NewPool(rdb))
	own := func(ctx context.Context, l *lock.Locker, err error) (func(context.Context) error, error) {
		if err != nil {
			return nil, err
		}
		lease, err := l.Acquire(ctx)
		if err != nil {
			return nil, err
		}
		return lease.Release, nil
	}
	return []locker{
		{"Mutex", func(ctx context.Context, name string) (func(context.Context) error, error) {
			l, err := lock.NewMutex(rdb, name, opts)
			return own(ctx, l, err)
		}},
		{"FairMutex", func(ctx context.Context, name string) (func(context.Context) error, error) {
			l, err := lock.NewFairMutex(rdb, name, opts)
			return own(ctx, l, err)
		}},
		{"redislock", func(ctx context.Context, name string) (func(context.Context) error, error) {
			held, err := bsm.Obtain(ctx, name, lockTTL, &redislock.Options{
				RetryStrategy: redislock.LinearBackoff(100 * time.Millisecond)})
			if err != nil {
				return nil, err
			}
			return held.Release, nil
		}},
		{"redsync", func(ctx context.Context, name string) (func(context.Context) error, error) {
			m := sync.NewMutex(name, redsync.WithExpiry(lockTTL), redsync.WithTries(1<<20))
			if err := m.LockContext(ctx); err != nil {
				return nil, err
			}
			return func(ctx context.Context) error { _, err := m.UnlockContext(ctx); return err }, nil
		}},
	}
}

func BenchmarkLock(b *testing.B) {
	b.Run("acquire_and_release/free", freeLocks)
	for _, n := range []int{2, 8, 50} {
		b.Run(fmt.Sprintf("hand-over/%d_contenders", n), func(b *testing.B) { handOvers(b, n, 40) })
	}
}

func freeLocks(b *testing.B) {
	rdb := open(b, redistest.Start(b).Addr)
	ctx := request(b)
	r := race{ops: 50, bases: []string{"redislock", "redsync"}}
	for _, l := range lockers(rdb) {
		r.contenders = append(r.contenders, contender{l.name, func(int) error {
			release, err := l.acquire(ctx, "free:"+l.name)
			if err != nil {
				return err
			}
			return release(ctx)
		}})
	}
	r.run(b)
}

// handOvers measures how long a contended lock is idle: from the call that releases it until the
// next waiter has it. Each holder holds it for 2 ms.
func handOvers(b *testing.B, contenders, times int) {
	var sent commands
	rdb := open(b, redistest.Start(b).Addr, sent.count, func(o *redis.Options) { o.PoolSize = contenders })
	ctx := request(b)
	all := lockers(rdb)
	idle, asked := make([][]float64, len(all)), make([]float64, len(all))
	for round := range rounds(b) {
		for i := range all {
			i = (i + round) % len(all)
			begun := sent.n.Load()
			gaps, err := handOver(ctx, all[i], contenders, times)
			if err != nil {
				b.Fatalf("%s: %v", all[i].name, err)
			}
			idle[i] = append(idle[i], gaps...)
			asked[i] += float64(sent.n.Load()-begun) / float64(len(gaps))
		}
	}
	for i, l := range all {
		report(b, l.name, func(b *testing.B) {
			b.ReportMetric(Median(idle[i]), "p50-ms")
			b.ReportMetric(Quantile(idle[i], 0.99), "p99-ms")
			b.ReportMetric(asked[i]*float64(times)/float64(len(idle[i])), "commands/hand-over")
		})
	}
}

// handOver makes contenders compete until the lock has been handed over the given number of times,
// and returns the gaps in ms. A contender that released the lock competes again only when another
// one holds it.
func handOver(ctx context.Context, l locker, contenders, times int) (gaps []float64, err error) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var all sync.WaitGroup
	var mu sync.Mutex
	var released time.Time      // when the last holder began to release
	next := make(chan struct{}) // closed when another contender holds it
	hold := func() (over chan struct{}, done bool) {
		mu.Lock()
		defer mu.Unlock()
		if !released.IsZero() {
			gaps = append(gaps, time.Since(released).Seconds()*1e3)
		}
		close(next)
		next = make(chan struct{})
		return next, len(gaps) == times
	}
	compete := func() error {
		for {
			release, err := l.acquire(ctx, "handed over:"+l.name)
			if err != nil {
				return err
			}
			another, done := hold()
			time.Sleep(2 * time.Millisecond)
			mu.Lock()
			released = time.Now()
			mu.Unlock()
			if err := release(context.WithoutCancel(ctx)); err != nil || done {
				stop()
				return err
			}
			select {
			case <-another:
			case <-ctx.Done():
				return nil
			}
		}
	}
	for range contenders {
		all.Go(func() {
			if failed := compete(); failed != nil && ctx.Err() == nil {
				mu.Lock()
				err = failed
				mu.Unlock()
				stop()
			}
		})
	}
	all.Wait()
	return gaps[:min(len(gaps), times)], err
}

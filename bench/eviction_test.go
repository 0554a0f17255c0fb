package bench

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"
)

// BenchmarkEviction shows what a server that is out of memory does to locks and to a cache, under each
// maxmemory-policy. A server of 30 MB is full, and for fifteen seconds a thousand values of 2 KB a second
// are stored that are not read. At the same time mutexes are held and asked for by others, loads of a second hold
// their fill locks, and keys are deleted from a cache with Near. Run it with -benchtime 1x.
func BenchmarkEviction(b *testing.B) {
	for _, policy := range []string{"noeviction", "allkeys-lru", "allkeys-lfu", "volatile-lru", "volatile-ttl"} {
		b.Run(policy, func(b *testing.B) {
			for range b.N {
				s := redistest.Start(b, "--maxmemory", "30mb", "--maxmemory-policy", policy)
				newEviction(b, s).run(b)
			}
		})
	}
}

// An eviction is what happened under one policy.
type eviction struct {
	rdb                            *redis.Client
	filling, loading, near         *singlefill.Cache[string]
	full                           atomic.Bool
	refused                        atomic.Int64 // stores of values
	leases, leasesLost, twoHolders atomic.Int64
	background, measured           sync.WaitGroup
	ctx                            context.Context
	end                            context.CancelFunc
}

func newEviction(b *testing.B, s *redistest.Server) *eviction {
	e := &eviction{rdb: s.Client(b)}
	e.ctx, e.end = context.WithCancel(context.Background())
	cache := func(namespace string, near *singlefill.Near) *singlefill.Cache[string] {
		c := must(singlefill.New(e.rdb, namespace, time.Hour, &singlefill.Options[string]{Near: near}))
		b.Cleanup(func() { _ = c.Close() })
		return c
	}
	e.filling, e.loading, e.near = cache("filling", nil), cache("loading", nil), cache("near", &singlefill.Near{})
	return e
}

func (e *eviction) run(b *testing.B) {
	value := strings.Repeat("v", 2000)
	for g := range 4 {
		e.loop(&e.background, 0, func(n int) {
			if e.full.Load() {
				time.Sleep(4 * time.Millisecond)
			}
			if e.filling.Set(e.ctx, fmt.Sprint(g, " ", n), value) != nil && e.ctx.Err() == nil {
				e.refused.Add(1)
			}
		})
	}
	full := func() bool {
		stats := e.rdb.Info(e.ctx, "stats").Val()
		return e.refused.Load() > 0 || !strings.Contains(stats, "evicted_keys:0\r")
	}
	for !full() {
		time.Sleep(10 * time.Millisecond)
	}
	e.full.Store(true)
	e.refused.Store(0)
	for i := range 70 {
		e.hold(b, fmt.Sprint("mutex ", i))
	}
	for g := range 20 {
		e.loop(&e.measured, 0, func(n int) {
			_, _ = e.loading.GetOrLoad(e.ctx, fmt.Sprint(g, " ", n), func(context.Context, string) (string, error) {
				time.Sleep(time.Second)
				return "v", nil
			})
		})
	}
	e.loop(&e.measured, 20*time.Millisecond, func(n int) {
		key := fmt.Sprint(n % 100)
		_, _ = e.near.GetOrLoad(e.ctx, key, func(context.Context, string) (string, error) { return "v", nil })
		_ = e.near.Delete(e.ctx, fmt.Sprint((n+50)%100))
	})
	time.Sleep(15 * time.Second)
	e.end()
	e.measured.Wait()
	e.background.Wait()
	loading := e.loading.Stats()
	b.ReportMetric(0, "ns/op") // it says nothing here
	b.ReportMetric(float64(e.refused.Load()), "refused-stores")
	b.ReportMetric(float64(loading.LocksLost+loading.Fenced), fmt.Sprintf("fill-locks-lost/%d", loading.Loads))
	b.ReportMetric(float64(e.leasesLost.Load()), fmt.Sprintf("leases-lost/%d", e.leases.Load()))
	b.ReportMetric(float64(e.twoHolders.Load()), "two-holders")
	b.ReportMetric(float64(e.near.Stats().NearDrops), "near-drops")
}

// loop repeats run until the end.
func (e *eviction) loop(wg *sync.WaitGroup, every time.Duration, run func(n int)) {
	wg.Go(func() {
		for n := 0; e.ctx.Err() == nil; n++ {
			run(n)
			time.Sleep(every)
		}
	})
}

// hold holds a mutex, again and again, while another process asks for it.
func (e *eviction) hold(b *testing.B, name string) {
	holder := must(lock.NewMutex(e.rdb, name, nil))
	other := must(lock.NewMutex(e.rdb, name, nil))
	var held atomic.Pointer[lock.Lease]
	var counted *lock.Lease
	e.loop(&e.measured, 0, func(int) {
		lease, err := holder.TryAcquire(e.ctx)
		if err != nil {
			time.Sleep(100 * time.Millisecond)
			return
		}
		e.leases.Add(1)
		held.Store(lease)
		select {
		case <-lease.Context().Done():
			e.leasesLost.Add(1)
		case <-e.ctx.Done():
		}
		held.Store(nil)
		_ = lease.Release(context.Background())
	})
	e.loop(&e.measured, 200*time.Millisecond, func(int) {
		mine := held.Load()
		if mine == nil {
			return
		}
		if lease, err := other.TryAcquire(e.ctx); err == nil {
			if held.Load() == mine && mine.Context().Err() == nil && counted != mine {
				e.twoHolders.Add(1)
				counted = mine
			}
			_ = lease.Release(context.Background())
		}
	})
}

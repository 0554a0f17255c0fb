package bench

import (
	"context"
	"fmt"
	"runtime"
	"runtime/metrics"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

// BenchmarkMemory measures the heap and the stacks of caches that are not used, and of calls that wait for one load of
// their process, run their own loads, or wait for a slot of MaxLoads. The collector has run before. Each call has a
// goroutine.
func BenchmarkMemory(b *testing.B) { memory(b, 10_000) }

func memory(b *testing.B, n int) {
	rdb := open(b, redistest.Start(b).Addr, func(o *redis.Options) {
		o.DialTimeout, o.MaxRetries, o.DialerRetries = 500*time.Millisecond, 1, 1
	})
	for name, near := range map[string]*singlefill.Near{"unused": nil, "unused, Near": {Size: 1_000_000}} {
		b.Run(name, func(b *testing.B) {
			caches, opts := make([]*singlefill.Cache[order], n/10), &singlefill.Options[order]{Near: near}
			reportBytes(b, len(caches), func() {
				for i := range caches {
					caches[i] = must(singlefill.New(rdb, fmt.Sprint("unused", i), time.Hour, opts))
				}
			})
			for _, c := range caches {
				_ = c.Close()
			}
		})
	}
	for _, of := range []struct {
		name            string
		calls, maxLoads int
		keys            int // of the calls, and of one that loads before
		arrived         func(singlefill.Stats) int64
	}{
		{"waiting", n, 1, 1, func(s singlefill.Stats) int64 {
			if pool := rdb.PoolStats(); s.Loading == 0 || pool.IdleConns < pool.TotalConns {
				return 0 // it reads
			}
			waiting := []metrics.Sample{{Name: "/sched/goroutines/waiting:goroutines"}}
			metrics.Read(waiting)
			return int64(waiting[0].Value.Uint64())
		}},
		{"loading", n / 10, -1, n/10 + 1, func(s singlefill.Stats) int64 { return s.Loading }},
		{"queued", n, 1, n + 1, func(s singlefill.Stats) int64 { return s.Queued }},
	} {
		b.Run(of.name, func(b *testing.B) {
			c := newCache(b, rdb, singlefill.Options[order]{
				MaxLoads: of.maxLoads, RedisTimeout: 5 * time.Second, LockTTL: 20 * time.Second,
			})
			ctx, cancel := context.WithCancel(context.Background())
			goOn := make(chan struct{})
			load := func(context.Context, string) (order, error) { <-goOn; return order{}, nil }
			var all sync.WaitGroup
			get := func(i int) { all.Go(func() { _, _ = c.GetOrLoad(ctx, fmt.Sprint(i%of.keys), load) }) }
			get(0)
			for c.Stats().Loading == 0 {
				time.Sleep(time.Millisecond)
			}
			reportBytes(b, of.calls, func() {
				for i := range of.calls {
					get(i + 1)
				}
				for of.arrived(c.Stats()) < int64(of.calls) {
					time.Sleep(time.Millisecond)
				}
			})
			cancel()
			close(goOn)
			all.Wait()
		})
	}
}

// reportBytes reports how much memory each of n objects has that make creates.
func reportBytes(b *testing.B, n int, make func()) {
	before := inUse()
	make()
	b.ReportMetric(float64(inUse()-before)/float64(n), "B/each")
	b.ReportMetric(0, "ns/op")
}

// inUse returns how much memory the heap and the stacks have in use. Each collection halves stacks of which less than a
// quarter is used.
func inUse() uint64 {
	var m runtime.MemStats
	for range 4 {
		runtime.GC()
	}
	runtime.ReadMemStats(&m)
	return m.HeapAlloc + m.StackInuse
}

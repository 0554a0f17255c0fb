package bench

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

// BenchmarkQueued measures the memory of a call that waits for a slot of MaxLoads, after the collector has run. Each
// call has another key and runs in another goroutine.
func BenchmarkQueued(b *testing.B) { queued(b, 10_000) }

func queued(b *testing.B, calls int) {
	rdb := open(b, redistest.Start(b).Addr, func(o *redis.Options) {
		o.DialTimeout, o.MaxRetries, o.DialerRetries = 500*time.Millisecond, 1, 1
	})
	var bytes float64
	for range b.N {
		c := newCache(b, rdb, singlefill.Options[order]{MaxLoads: 1})
		ctx, cancel := context.WithCancel(context.Background())
		goOn := make(chan struct{})
		load := func(context.Context, string) (order, error) { <-goOn; return order{}, nil }
		var all sync.WaitGroup
		get := func(i int) {
			all.Go(func() { _, _ = c.GetOrLoad(ctx, fmt.Sprint(i), load) })
		}
		get(calls)
		for c.Stats().Loading == 0 {
			time.Sleep(time.Millisecond)
		}
		before := inUse()
		for i := range calls {
			get(i)
		}
		for c.Stats().Queued < int64(calls) {
			time.Sleep(time.Millisecond)
		}
		bytes += float64(inUse()-before) / float64(calls)
		cancel()
		close(goOn)
		all.Wait()
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(bytes/float64(b.N), "B/call")
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

package bench

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"golang.org/x/sync/singleflight"
)

// BenchmarkMemory measures heap and stacks of many idle objects, divided by their number.
func BenchmarkMemory(b *testing.B) {
	b.Run("a_cache/idle", func(b *testing.B) { idleCaches(b, 1000) })
	b.Run("a_waiting_goroutine/one_load", func(b *testing.B) { waitingGoroutines(b, 10_000) })
	b.Run("a_load_in_flight/one_goroutine_each", func(b *testing.B) { runningLoads(b, 1000) })
	b.Run("a_queued_key/one_place", func(b *testing.B) { queuedKeys(b, 20_000) })
	b.Run("a_held_lock/held", func(b *testing.B) { heldLocks(b, 1000) })
}

func inUse() float64 {
	var m runtime.MemStats
	for range 3 { // the second collection frees what pools keep
		runtime.GC()
	}
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc + m.StackInuse)
}

// reportBytes reports the memory of n objects that make creates.
func reportBytes(b *testing.B, name string, n int, make func()) {
	before := inUse()
	make()
	bytes := (inUse() - before) / float64(n)
	report(b, name, func(b *testing.B) { b.ReportMetric(bytes, "bytes") })
}

func idleCaches(b *testing.B, n int) {
	rdb := open(b, redistest.Start(b).Addr)
	caches := make([]*singlefill.Cache[order], n)
	reportBytes(b, "singlefill", n, func() {
		for i := range caches {
			caches[i] = must(singlefill.New[order](rdb, fmt.Sprintf("orders-%d", i), time.Hour, nil))
		}
	})
	for _, c := range caches {
		_ = c.Close()
	}
}

// patient has timeouts that commands of a large crowd do not exceed on a busy machine.
var patient = singlefill.Options[order]{RedisTimeout: 5 * time.Second, LockTTL: 20 * time.Second, MaxLoads: -1}

// crowd runs n goroutines, and returns when all of them wait in the function in.
func crowd(b *testing.B, n int, in string, all *sync.WaitGroup, wait func(i int)) {
	for i := range n {
		all.Go(func() { wait(i) })
	}
	redistest.Await(b, "all goroutines wait", func() bool { return waitingIn(in) >= n })
}

// reportCrowd reports the memory of n goroutines that wait in the function in, until end is closed.
func reportCrowd(b *testing.B, name string, n int, in string, end chan struct{}, wait func(i int)) {
	var all sync.WaitGroup
	reportBytes(b, name, n, func() { crowd(b, n, in, &all, wait) })
	close(end)
	all.Wait()
}

func waitingIn(function string) int {
	n := 0
	stacks := make([]runtime.StackRecord, runtime.NumGoroutine()+100)
	count, ok := runtime.GoroutineProfile(stacks)
	if !ok { // more goroutines have started
		return 0
	}
	for i := range stacks[:count] {
		frames := runtime.CallersFrames(stacks[i].Stack())
		for more := true; more; {
			var f runtime.Frame
			f, more = frames.Next()
			if strings.HasSuffix(f.Function, function) {
				n++
				break
			}
		}
	}
	return n
}

func waitingGoroutines(b *testing.B, n int) {
	rdb := open(b, redistest.Start(b).Addr)
	ctx := request(b)

	end := make(chan struct{})
	reportCrowd(b, "a goroutine and a channel", n, "receive", end, func(int) { receive(end) })

	end = make(chan struct{})
	var group singleflight.Group
	reportCrowd(b, "singleflight", n, "singleflight.(*Group).Do", end, func(int) {
		_, _, _ = group.Do("k", func() (any, error) { <-end; return nil, nil })
	})

	end = make(chan struct{})
	c := newCache(b, rdb, patient)
	load := func(context.Context, string) (order, error) { <-end; return order{}, nil }
	reportCrowd(b, "singlefill", n, "Fills[...]).Wait", end, func(int) { _, _ = c.GetOrLoad(ctx, "k", load) })

	end = make(chan struct{})
	holder, waiter := twoOf(b, rdb, "elsewhere")
	var holding sync.WaitGroup
	holding.Go(func() { _, _ = holder.GetOrLoad(ctx, "k", load) })
	redistest.Await(b, "the load has begun", func() bool { return holder.Stats().Loading == 1 })
	none := func(context.Context, string) (order, error) { return order{}, errMiss }
	reportCrowd(b, "singlefill, load elsewhere", n, "Fills[...]).Wait", end, func(int) {
		_, _ = waiter.GetOrLoad(ctx, "k", none)
	})
	holding.Wait()
}

// receive has a name that can be found in a stack.
//
//go:noinline
func receive(from <-chan struct{}) { <-from }

// twoOf returns two caches of one namespace that do not know each other, as if in two processes.
func twoOf(b *testing.B, rdb redis.UniversalClient, namespace string) (_, _ *singlefill.Cache[order]) {
	var two [2]*singlefill.Cache[order]
	for i := range two {
		two[i] = must(singlefill.New(rdb, namespace, time.Hour, &patient))
		b.Cleanup(func() { _ = two[i].Close() })
	}
	return two[0], two[1]
}

func runningLoads(b *testing.B, n int) {
	rdb := open(b, redistest.Start(b).Addr)
	ctx := request(b)

	end := make(chan struct{})
	var group singleflight.Group
	reportCrowd(b, "singleflight", n, "receive", end, func(i int) {
		_, _, _ = group.Do(fmt.Sprint(i), func() (any, error) { receive(end); return nil, nil })
	})

	end = make(chan struct{})
	c := newCache(b, rdb, patient)
	load := func(context.Context, string) (order, error) { receive(end); return order{}, nil }
	reportCrowd(b, "singlefill", n, "receive", end, func(i int) { _, _ = c.GetOrLoad(ctx, fmt.Sprint(i), load) })
}

// queuedKeys are cold keys that wait for a slot, and beside them keys that are loaded without a limit. They
// come in waves, so that the number of commands in flight does not matter.
func queuedKeys(b *testing.B, n int) {
	rdb := open(b, redistest.Start(b).Addr)
	ctx := request(b)
	var all sync.WaitGroup

	end := make(chan struct{})
	var group singleflight.Group
	reportBytes(b, "singleflight", n, func() {
		crowd(b, n, "receive", &all, func(i int) {
			_, _, _ = group.Do(fmt.Sprint(i), func() (any, error) { receive(end); return nil, nil })
		})
	})
	close(end)
	all.Wait()

	opts := patient
	opts.MaxLoads = 1
	c := newCache(b, rdb, opts)
	load := func(context.Context, string) (order, error) { return order{}, nil }

	end = make(chan struct{})
	crowd(b, 1, "receive", &all, func(int) {
		_, _ = c.GetOrLoad(ctx, "busy", func(context.Context, string) (order, error) { receive(end); return order{}, nil })
	})
	const wave = 500
	reportBytes(b, "singlefill", n, func() {
		for begun := 0; begun < n; begun += wave {
			for i := range wave {
				all.Go(func() { _, _ = c.GetOrLoad(ctx, fmt.Sprint(begun+i), load) })
			}
			redistest.Await(b, "all keys queue", func() bool { return c.Stats().Queued >= int64(begun+wave) })
		}
	})
	close(end)
	all.Wait()
}

func heldLocks(b *testing.B, n int) {
	rdb := open(b, redistest.Start(b).Addr)
	ctx := request(b)
	for _, l := range lockers(rdb) {
		releases := make([]func(context.Context) error, n)
		reportBytes(b, l.name, n, func() {
			for i := range releases {
				releases[i] = must(l.lock(fmt.Sprintf("held:%s:%d", l.name, i))(ctx))
			}
		})
		for _, release := range releases {
			_ = release(ctx)
		}
	}
}

package lock_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/lock"
)

// embeddedRedis lets the examples run anywhere. A service makes a client of its Redis instead.
func embeddedRedis() (rdb *redis.Client, stop func()) {
	mini, err := miniredis.Run()
	if err != nil {
		panic(err)
	}
	mini.ClockTTL(true) // or nothing would ever expire
	rdb = redis.NewClient(&redis.Options{Addr: mini.Addr()})
	return rdb, func() { rdb.Close(); mini.Close() }
}

// A job that every machine starts at the same hour, and that one of them is to do. The lease keeps two from doing
// it at once, and lets the next one do it if the first has died; that it is done already the job itself knows.
func Example_cronJob() {
	rdb, stop := embeddedRedis()
	defer stop()

	var made atomic.Int64
	night := "2030-01-01"
	reports := make(map[string]bool) // stands for a table in a database

	var wg sync.WaitGroup
	for range 5 { // machines
		wg.Go(func() {
			job, err := lock.NewMutex(rdb, "nightly report", nil)
			if err != nil {
				fmt.Println(err)
				return
			}
			err = job.Do(context.Background(), func(ctx context.Context) error {
				if reports[night] {
					return nil
				}
				time.Sleep(10 * time.Millisecond) // the work, which has to stop when ctx ends
				if ctx.Err() != nil {
					return context.Cause(ctx)
				}
				made.Add(1)
				reports[night] = true
				return nil
			})
			if err != nil {
				fmt.Println(err)
			}
		})
	}
	wg.Wait()
	fmt.Println("reports made:", made.Load())
	// Output: reports made: 1
}

// A service that bears five connections at a time, from all machines together.
func ExampleNewSemaphore() {
	rdb, stop := embeddedRedis()
	defer stop()

	var connections, most atomic.Int64
	callSlowService := func(ctx context.Context) error {
		n := connections.Add(1)
		defer connections.Add(-1)
		for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
		}
		time.Sleep(5 * time.Millisecond)
		return nil
	}

	slow, err := lock.NewSemaphore(rdb, "connections to the slow service", 5, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if err := slow.Do(context.Background(), callSlowService); err != nil {
				fmt.Println(err)
			}
		})
	}
	wg.Wait()
	fmt.Println("more than five at a time:", most.Load() > 5)
	// Output: more than five at a time: false
}

// A ledger takes entries in the order of the writers' coming, and none of a writer whose lease has ended without
// its knowing: each brings its fence, and the ledger refuses one that is smaller than the largest it has seen.
func ExampleNewFairMutex() {
	rdb, stop := embeddedRedis()
	defer stop()
	ctx := context.Background()

	var ledger fencedLedger
	write := func(entry string) {
		turn, err := lock.NewFairMutex(rdb, "ledger", nil)
		if err != nil {
			fmt.Println(err)
			return
		}
		lease, err := turn.Acquire(ctx)
		if err != nil {
			fmt.Println(err)
			return
		}
		defer lease.Release(ctx)
		fmt.Println(ledger.append(lease.Fence(), entry))
	}
	write("first")
	write("second")
	fmt.Println(ledger.append(1, "late")) // a writer that was frozen for an hour
	// Output:
	// first is written
	// second is written
	// late is refused
}

// A fencedLedger stands for a database that compares the fence in the statement that writes.
type fencedLedger struct {
	mu      sync.Mutex
	fence   int64
	entries []string
}

func (l *fencedLedger) append(fence int64, entry string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if fence < l.fence {
		return entry + " is refused"
	}
	l.fence, l.entries = fence, append(l.entries, entry)
	return entry + " is written"
}

package lock_test

import (
	"context"
	"errors"
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

// embeddedMutex returns a mutex on a Redis in memory.
func embeddedMutex(name string, opts *lock.Options) (l *lock.Locker, rdb *redis.Client, stop func()) {
	rdb, stop = embeddedRedis()
	l, err := lock.NewMutex(rdb, name, opts)
	if err != nil {
		panic(err)
	}
	return l, rdb, stop
}

// Every machine starts a job at the same hour, and one of them has to do it. The lease keeps two
// machines from doing it at once, and lets the next one do it if the first has died. The job itself
// knows when it is done.
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

// A service accepts five connections at a time, from all machines together.
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

// One process of the fleet at a time writes the index. The other processes wait.
func ExampleNewMutex() {
	rdb, stop := embeddedRedis()
	defer stop()
	index, err := lock.NewMutex(rdb, "search index", nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	err = index.Do(context.Background(), func(ctx context.Context) error {
		fmt.Println("writing the index") // and stopping when ctx ends
		return nil
	})
	fmt.Println(err)
	// Output:
	// writing the index
	// <nil>
}

// The orders of one customer are processed one after the other, in the order of their arrival.
func ExampleNewFairMutex() {
	rdb, stop := embeddedRedis()
	defer stop()
	turn, err := lock.NewFairMutex(rdb, "orders of customer 42", nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, order := range []string{"tea", "coffee"} {
		err := turn.Do(context.Background(), func(ctx context.Context) error {
			fmt.Println(order, "is ordered")
			return nil
		})
		if err != nil {
			fmt.Println(err)
		}
	}
	// Output:
	// tea is ordered
	// coffee is ordered
}

// The context bounds the wait. The lease outlives it, until it is released.
func ExampleLocker_Acquire() {
	index, _, stop := embeddedMutex("search index", nil)
	defer stop()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	lease, err := index.Acquire(ctx)
	cancel()
	switch {
	case errors.Is(err, lock.ErrBusy):
		fmt.Println("other callers have held it for a minute")
	case err != nil:
		fmt.Println("Redis cannot say who holds it, or a setting is wrong:", err)
	default:
		fmt.Println("held:", lease.Context().Err() == nil)
		fmt.Println(lease.Release(ctx)) // though ctx has ended
		fmt.Println("held:", lease.Context().Err() == nil)
	}
	// Output:
	// held: true
	// <nil>
	// held: false
}

// A process skips the clean-up while another process does it.
func ExampleLocker_TryAcquire() {
	cleaning, _, stop := embeddedMutex("cleaning", nil)
	defer stop()
	ctx := context.Background()
	cleanUp := func(alone func()) {
		lease, err := cleaning.TryAcquire(ctx)
		switch {
		case errors.Is(err, lock.ErrBusy):
			fmt.Println("another process does it")
			return
		case err != nil:
			fmt.Println("Redis cannot say whether another process does it:", err)
			return
		}
		defer lease.Release(ctx)
		alone()
	}
	cleanUp(func() {
		fmt.Println("cleaning up")
		cleanUp(nil) // by another process
	})
	// Output:
	// cleaning up
	// another process does it
}

// The context of the work ends when the lease is lost, here because Redis loses all its data.
func ExampleLocker_Do() {
	index, rdb, stop := embeddedMutex("search index", &lock.Options{TTL: 2 * time.Second})
	defer stop()
	err := index.Do(context.Background(), func(ctx context.Context) error {
		if err := rdb.FlushAll(ctx).Err(); err != nil {
			return err
		}
		<-ctx.Done() // at the next renewal, after a third of TTL
		return fmt.Errorf("half of the index is written: %w", context.Cause(ctx))
	})
	fmt.Println(errors.Is(err, lock.ErrLost), err)
	// Output: true half of the index is written: lock: lost: "search index": it is gone from Redis
}

// A local is a mutex without Redis, for the goroutines of one process: made with room for n, it is a semaphore.
type local chan struct{}

func (l local) Do(ctx context.Context, fn func(ctx context.Context) error) error {
	select {
	case l <- struct{}{}:
		defer func() { <-l }()
		return fn(ctx)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// A program for which Redis is optional has an interface for its locks.
func ExampleLocker_Do_withoutRedis() {
	var index interface {
		Do(ctx context.Context, fn func(ctx context.Context) error) error
	} = make(local, 1)
	if url := ""; url != "" { // with a Redis: the whole fleet
		options, err := redis.ParseURL(url)
		if err != nil {
			fmt.Println(err)
			return
		}
		if index, err = lock.NewMutex(redis.NewClient(options), "search index", nil); err != nil {
			fmt.Println(err)
			return
		}
	}
	fmt.Println(index.Do(context.Background(), func(ctx context.Context) error {
		fmt.Println("writing alone")
		return nil
	}))
	// Output:
	// writing alone
	// <nil>
}

// A holder that was frozen does not know that its lease has ended. The resource rejects its writes
// by the fence.
func ExampleLease_Fence() {
	turn, rdb, stop := embeddedMutex("ledger", nil)
	defer stop()
	ctx := context.Background()
	frozen, err := turn.Acquire(ctx)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer frozen.Release(ctx)
	rdb.FlushAll(ctx) // as if it had been frozen for longer than TTL
	next, err := turn.Acquire(ctx)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer next.Release(ctx)

	var l ledger
	fmt.Println(l.write(next.Fence(), "first"))
	fmt.Println(l.write(frozen.Fence(), "late"))
	fmt.Println(l.write(next.Fence(), "second"))
	// Output:
	// first is written
	// late is refused
	// second is written
}

// A ledger stands for a table: UPDATE ledger SET entry = $2, fence = $1 WHERE fence <= $1.
type ledger struct {
	fence int64
	entry string
}

func (l *ledger) write(fence int64, entry string) string {
	if fence < l.fence {
		return entry + " is refused"
	}
	l.fence, l.entry = fence, entry
	return entry + " is written"
}

// A caller that finds the lock busy learns who holds it. The next holder learns that the holder before it was
// killed, or that its lease was deleted.
func ExampleOptions_holder() {
	index, rdb, stop := embeddedMutex("search index", &lock.Options{
		Holder: "web-7", // default: host and process
		Trace: &lock.Trace{Expired: func(ctx context.Context, info lock.LeaseInfo) {
			fmt.Printf("%s: the lease of %s has ended without a release\n", info.Name, info.Holder)
		}},
	})
	defer stop()
	ctx := context.Background()
	hangs, err := index.Acquire(ctx)
	if err != nil {
		fmt.Println(err)
		return
	}
	_, err = index.TryAcquire(ctx)
	fmt.Println(errors.Is(err, lock.ErrBusy), err)

	rdb.Del(ctx, "{search index}:lock") // by hand
	err = index.Do(ctx, func(ctx context.Context) error { return nil })
	fmt.Println(err)
	fmt.Println(hangs.Release(ctx))
	// Output:
	// true lock: busy: "search index" is held by "web-7"
	// search index: the lease of web-7 has ended without a release
	// <nil>
	// lock: lost: "search index": it is gone from Redis
}

// A lost lease is worth a line in a log, and a long wait a point in a chart.
func ExampleTrace() {
	index, _, stop := embeddedMutex("search index", &lock.Options{Trace: &lock.Trace{
		Acquired: func(ctx context.Context, info lock.LeaseInfo) { fmt.Println("acquired:", info.Name) },
		Released: func(ctx context.Context, info lock.LeaseInfo) { fmt.Println("released:", info.Name) },
		Lost:     func(ctx context.Context, info lock.LeaseInfo) { fmt.Println("lost:", info.Name, info.Err) },
	}})
	defer stop()
	err := index.Do(context.Background(), func(ctx context.Context) error { return nil })
	fmt.Println(err)
	// Output:
	// acquired: search index
	// released: search index
	// <nil>
}

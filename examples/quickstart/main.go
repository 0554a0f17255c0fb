// Command quickstart asks at once, in several processes, for reports that take long to make: with the usual GET,
// load, SET, and with singlefill. It prints the cost of each way. It embeds a Redis.
//
//	go run ./examples/quickstart
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
	"github.com/singlefill/singlefill"
)

const (
	processes  = 4
	goroutines = 50 // in each process
	rounds     = 2  // how often each goroutine asks for every report
	makers     = 20 // in each process: reports that it can make at a time
)

var loadTime = 300 * time.Millisecond // to make one report

var months = []string{"january", "february", "march"}

func report(month string) string { return "the report on " + month }

func main() {
	log.SetFlags(0)
	err := compare
	if len(os.Args) == 3 { // started by fleet
		err = work
	}
	if err := err(); err != nil {
		log.Fatalf("quickstart: %v", err)
	}
}

func compare() error {
	mini, err := miniredis.Run()
	if err != nil {
		return err
	}
	defer mini.Close()
	mini.ClockTTL(true) // otherwise values would never expire

	fmt.Printf("%d processes of %d goroutines ask for %d reports, %d times over.\n", processes, goroutines, len(months), rounds)
	fmt.Printf("A report takes %v to make; one process can make %d at a time.\n\n", loadTime, makers)
	fmt.Printf("%-15s %6s %6s %15s %8s\n", "", "calls", "loads", "Redis commands", "time")
	for _, way := range []string{"GET, load, SET", "singlefill"} {
		begun := time.Now()
		t, err := fleet(way, mini.Addr())
		if err != nil {
			return err
		}
		calls := processes * goroutines * rounds * len(months)
		fmt.Printf("%-15s %6d %6d %15d %6.1f s\n", way, calls, t.Loads, t.Commands, time.Since(begun).Seconds())
	}
	fmt.Println("\nAll answers were right.")
	return nil
}

// A tally counts what one process or the whole fleet did.
type tally struct{ Loads, Commands int64 }

// fleet runs work in several processes of this program and returns the sum of their tallies.
func fleet(way, addr string) (sum tally, err error) {
	self, err := os.Executable()
	if err != nil {
		return sum, err
	}
	var mu sync.Mutex // protects sum
	err = atOnce(processes, func() error {
		cmd := exec.Command(self, way, addr)
		cmd.Stderr = os.Stderr
		out, err := cmd.Output()
		if err != nil {
			return err
		}
		var t tally
		err = json.Unmarshal(out, &t)
		mu.Lock()
		defer mu.Unlock()
		sum = tally{sum.Loads + t.Loads, sum.Commands + t.Commands}
		return err
	})
	return sum, err
}

// atOnce runs f in n goroutines, and returns their errors.
func atOnce(n int, f func() error) error {
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() { errs[i] = f() })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// work is one process: its goroutines ask for the reports, and it prints its tally.
func work() error {
	way, addr := os.Args[1], os.Args[2]
	var commands counter
	rdb := redis.NewClient(&redis.Options{
		Addr: addr, Limiter: &commands, DisableIdentity: true,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
		// Do not count HELLO.
		OnConnect: func(context.Context, *redis.Conn) error { commands.Add(-1); return nil },
	})
	defer rdb.Close()
	reports, err := singlefill.New[string](rdb, "reports", time.Minute, nil)
	if err != nil {
		return err
	}
	defer reports.Close()

	var loads atomic.Int64
	room := make(chan struct{}, makers)
	load := func(_ context.Context, month string) (string, error) {
		room <- struct{}{}
		defer func() { <-room }()
		loads.Add(1)
		time.Sleep(loadTime)
		return report(month), nil
	}
	ask := func(ctx context.Context, month string) (string, error) { return reports.GetOrLoad(ctx, month, load) }
	if way != "singlefill" {
		ask = func(ctx context.Context, month string) (string, error) {
			key := "by hand:" + month
			v, err := rdb.Get(ctx, key).Result()
			if !errors.Is(err, redis.Nil) {
				return v, err
			}
			if v, err = load(ctx, month); err != nil {
				return "", err
			}
			return v, rdb.Set(ctx, key, v, time.Minute).Err()
		}
	}

	err = atOnce(goroutines, func() error {
		for i := range rounds * len(months) {
			month := months[i%len(months)]
			if v, err := ask(context.Background(), month); err != nil || v != report(month) {
				return fmt.Errorf("asked for %s, got %q, %v", month, v, err)
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(tally{loads.Load(), commands.Load()})
}

// A counter is a limiter that only counts: the client calls it before each command.
type counter struct{ atomic.Int64 }

func (c *counter) Allow() error       { c.Add(1); return nil }
func (c *counter) ReportResult(error) {}

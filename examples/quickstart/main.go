// Command quickstart asks at once for reports that take long to make: first in one process, with a
// cache that needs no Redis, then in several, with the usual GET, load, SET and with singlefill. It prints the
// cost of each way.
//
//	go run ./examples/quickstart
//
// It embeds a Redis, unless REDIS_URL names one.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
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

const usage = `Usage: quickstart

Shows what a cache stampede costs. One process asks at once for reports that are slow to make, with a
cache that needs no Redis. Then several do: with the usual GET, load, SET, and with singlefill. It prints
the loads, the Redis commands and the time of each way. It takes a few seconds and has no flags.
It embeds a Redis, unless the environment variable REDIS_URL names one.
`

func main() {
	log.SetFlags(0)
	flag.Usage = func() { fmt.Print(usage) }
	flag.Parse()
	var err error
	if flag.NArg() == 2 { // started by fleet
		err = work(flag.Arg(0), flag.Arg(1))
	} else if err = alone(); err == nil {
		err = compare()
	}
	if err != nil {
		log.Fatalf("quickstart: %v", err)
	}
}

// alone asks for the reports in this process, without Redis.
func alone() error {
	reports, err := singlefill.NewLocal[string]("reports", time.Minute, nil)
	if err != nil {
		return err
	}
	defer reports.Close()
	load := func(_ context.Context, month string) (string, error) {
		time.Sleep(loadTime)
		return report(month), nil
	}
	err = askAll(func(ctx context.Context, month string) (string, error) { return reports.GetOrLoad(ctx, month, load) })
	if err != nil {
		return err
	}
	fmt.Printf("One process of %d goroutines asks for %d reports, %d times over, without Redis:\n", goroutines, len(months), rounds)
	fmt.Printf("%d calls, %d loads.\n\n", goroutines*rounds*len(months), reports.Stats().Loads)
	return nil
}

func compare() error {
	if os.Getenv("REDIS_URL") == "" {
		mini, err := miniredis.Run()
		if err != nil {
			return err
		}
		defer mini.Close()
		mini.ClockTTL(true) // otherwise values would never expire
		os.Setenv("REDIS_URL", "redis://"+mini.Addr())
	}
	// Each run starts with a cold cache.
	namespace := fmt.Sprintf("quickstart-%d", time.Now().UnixNano())

	fmt.Printf("%d processes of %d goroutines ask for %d reports, %d times over.\n", processes, goroutines, len(months), rounds)
	fmt.Printf("A report takes %v to make; one process can make %d at a time.\n\n", loadTime, makers)
	fmt.Printf("%-15s %6s %6s %6s %7s %15s %8s\n", "", "calls", "loads", "waits", "hits", "Redis commands", "time")
	for _, way := range []string{"GET, load, SET", "singlefill"} {
		begun := time.Now()
		t, err := fleet(way, namespace)
		if err != nil {
			return err
		}
		fmt.Printf("%-15s %6d %6d %6d %7d %15d %6.1f s\n", way, t.Calls, t.Loads, t.Calls-t.Loads-t.Hits, t.Hits, t.Commands, time.Since(begun).Seconds())
	}
	fmt.Println("\nA call loads (makes the report), waits for one in flight, or hits (finds the report in Redis).")
	fmt.Println("All answers were right.")
	return nil
}

// A tally counts what one process or the whole fleet did.
type tally struct{ Calls, Loads, Hits, Commands int64 }

// fleet runs work in several processes of this program and returns the sum of their tallies.
func fleet(way, namespace string) (sum tally, err error) {
	self, err := os.Executable()
	if err != nil {
		return sum, err
	}
	var mu sync.Mutex // protects sum
	err = atOnce(processes, func() error {
		cmd := exec.Command(self, way, namespace)
		cmd.Stderr = os.Stderr
		out, err := cmd.Output()
		if err != nil {
			return err
		}
		var t tally
		err = json.Unmarshal(out, &t)
		mu.Lock()
		defer mu.Unlock()
		sum = tally{sum.Calls + t.Calls, sum.Loads + t.Loads, sum.Hits + t.Hits, sum.Commands + t.Commands}
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
func work(way, namespace string) error {
	options, err := redis.ParseURL(os.Getenv("REDIS_URL"))
	if err != nil {
		return err
	}
	var commands counter
	options.Limiter = &commands
	options.DisableIdentity = true
	options.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	// Do not count HELLO.
	options.OnConnect = func(context.Context, *redis.Conn) error { commands.Add(-1); return nil }
	rdb := redis.NewClient(options)
	defer rdb.Close()
	reports, err := singlefill.New[string](rdb, namespace, time.Minute, nil)
	if err != nil {
		return err
	}
	defer reports.Close()

	var loads, hits atomic.Int64
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
			key := namespace + ":by hand:" + month
			v, err := rdb.Get(ctx, key).Result()
			if err == nil {
				hits.Add(1)
			}
			if !errors.Is(err, redis.Nil) {
				return v, err
			}
			if v, err = load(ctx, month); err != nil {
				return "", err
			}
			return v, rdb.Set(ctx, key, v, time.Minute).Err()
		}
	}

	if err := askAll(ask); err != nil {
		return err
	}
	t := tally{int64(goroutines * rounds * len(months)), loads.Load(), hits.Load() + reports.Stats().Hits, commands.Load()}
	return json.NewEncoder(os.Stdout).Encode(t)
}

// askAll asks for the reports from all goroutines, and checks the answers.
func askAll(ask func(ctx context.Context, month string) (string, error)) error {
	return atOnce(goroutines, func() error {
		for i := range rounds * len(months) {
			month := months[i%len(months)]
			if v, err := ask(context.Background(), month); err != nil || v != report(month) {
				return fmt.Errorf("asked for %s, got %q, %v", month, v, err)
			}
		}
		return nil
	})
}

// A counter is a limiter that only counts: the client calls it before each command.
type counter struct{ atomic.Int64 }

func (c *counter) Allow() error       { c.Add(1); return nil }
func (c *counter) ReportResult(error) {}

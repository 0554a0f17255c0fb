// Command stampede compares what a cold key and an expiring key cost with three protections:
// golang.org/x/sync/singleflight in each process, a lock made by hand with SET NX, and singlefill.
//
//	go -C bench run ./stampede       # with an embedded Redis, unless REDIS_URL names one
//	go -C bench run ./stampede -h    # how many processes and goroutines, and how long a load takes
//
// For each protection it starts several processes of many goroutines. First all goroutines ask at
// once for a cold key. Then they ask again and again, at a steady pace, while the value expires
// several times. A load only sleeps: a source that gets slower under many loads would make the first
// way look worse than it does here.
//
// When the value expires, the first two ways let callers wait for the load. With singlefill hardly
// any call waits, since a hit has refreshed the value shortly before. So singlefill may load more
// often than a value expires.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"
)

// A plan is the workload, the same for all contenders.
type plan struct {
	Processes, Goroutines int           // goroutines in each process
	Load                  time.Duration // how long one load takes
	Cold                  time.Duration // how long after the first phase the second one begins
	TTL                   time.Duration // the life of a value
	Expiring              time.Duration // how long the goroutines ask while values expire
}

// timed derives the other times from the time of a load: values expire three times.
func (p plan) timed() plan {
	p.Cold = 5 * p.Load
	p.TTL = 15 * p.Load
	p.Expiring = 3*(p.TTL+2*p.Load) + p.TTL/3
	return p
}

func (p plan) String() string {
	return fmt.Sprintf("%d processes of %d goroutines. A load takes %v, a value lives %v",
		p.Processes, p.Goroutines, p.Load, p.TTL)
}

func main() {
	log.SetFlags(0)
	log.SetPrefix("stampede: ")
	if described, isWorker := os.LookupEnv(workerEnv); isWorker {
		if err := work(described, os.Stdout); err != nil {
			log.Fatal(err)
		}
		return
	}
	var p plan
	flag.IntVar(&p.Processes, "processes", 8, "`number` of processes that ask")
	flag.IntVar(&p.Goroutines, "goroutines", 50, "`number` of goroutines in each process")
	flag.DurationVar(&p.Load, "load", 100*time.Millisecond,
		"`time` that one load takes; the whole run takes about 170 times as long")
	svg := flag.String("svg", "stampede.svg", "`file` to write the picture to")
	flag.Parse()
	if flag.NArg() > 0 || p.Processes < 1 || p.Goroutines < 1 || p.Load < 10*time.Millisecond {
		log.Fatal("only flags are allowed, numbers from 1 and loads from 10ms; -h explains them")
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, p.timed(), os.Getenv("REDIS_URL"), *svg, os.Stdout); err != nil {
		log.Fatal(err)
	}
}

// run measures the contenders one after the other, prints the table, and writes the picture.
func run(ctx context.Context, p plan, url, svg string, out io.Writer) error {
	where := "the Redis of REDIS_URL"
	if url == "" {
		mini, err := miniredis.Run()
		if err != nil {
			return err
		}
		defer mini.Close()
		mini.ClockTTL(true) // otherwise no key would expire
		url, where = "redis://"+mini.Addr(), "embedded miniredis"
	}
	if _, err := redis.ParseURL(url); err != nil {
		return fmt.Errorf("REDIS_URL: %w", err)
	}
	fmt.Fprintf(out, "%s.\n\n", p)
	namespace := fmt.Sprintf("stampede-%d", time.Now().UnixNano()) // its keys expire soon after the run
	var results []result
	for i, c := range contenders {
		r, err := measure(ctx, task{Plan: p, Contender: i, Namespace: fmt.Sprintf("%s-%d", namespace, i), URL: url})
		if err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		results = append(results, r)
	}
	writeTable(out, results)
	if err := os.WriteFile(svg, drawing(p, where, results), 0o644); err != nil {
		return err
	}
	fmt.Fprintf(out, "\nThe picture is in %s.\n", svg)
	return nil
}

// The phases of a run. Each begins in all processes at the same time.
const (
	cold = iota
	expiring
	phases
)

// startUp is how long the processes of a contender have until the first phase begins.
const startUp = 2 * time.Second

// A result is what the processes of one contender report about each phase.
type result [phases]report

// measure runs the processes of one contender.
func measure(ctx context.Context, t task) (r result, err error) {
	self, err := os.Executable()
	if err != nil {
		return r, err
	}
	t.Begin = time.Now().Add(startUp)
	var mu sync.Mutex // protects r
	fleet, ctx := errgroup.WithContext(ctx)
	for t.Process = range t.Plan.Processes {
		described, err := json.Marshal(t)
		if err != nil {
			return r, err
		}
		cmd := exec.CommandContext(ctx, self)
		cmd.Env = append(os.Environ(), workerEnv+"="+string(described))
		cmd.Stderr = os.Stderr
		fleet.Go(func() error {
			out, err := cmd.Output()
			var one result
			if err == nil {
				err = json.Unmarshal(out, &one)
			}
			mu.Lock()
			defer mu.Unlock()
			for phase := range phases {
				r[phase].Commands += one[phase].Commands
				r[phase].Calls = append(r[phase].Calls, one[phase].Calls...)
				r[phase].Loads = append(r[phase].Loads, one[phase].Loads...)
			}
			return err
		})
	}
	err = fleet.Wait()
	for phase := range phases {
		slices.Sort(r[phase].Calls)
	}
	return r, err
}

func writeTable(out io.Writer, results []result) {
	w := tabwriter.NewWriter(out, 0, 0, 3, ' ', tabwriter.AlignRight)
	for phase, name := range []string{"cold key", "expiring key"} {
		fmt.Fprintf(w, "%s\tcalls\tloads\tp50\tp99\tcommands per call\t\n", name)
		for i, c := range contenders {
			r := results[i][phase]
			fmt.Fprintf(w, "%s\t%d\t%d\t%v\t%v\t%.2f\t\n",
				c.name, len(r.Calls), len(r.Loads), r.percentile(50), r.percentile(99), r.perCall())
		}
	}
	w.Flush()
}

// percentile returns the time within which n % of the calls returned.
func (r report) percentile(n int) time.Duration {
	if len(r.Calls) == 0 {
		return 0
	}
	return r.Calls[(len(r.Calls)-1)*n/100].Round(10 * time.Microsecond)
}

func (r report) perCall() float64 { return float64(r.Commands) / float64(max(len(r.Calls), 1)) }

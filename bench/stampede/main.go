// Command stampede compares what a cold key and an expiring key cost with three protections:
// golang.org/x/sync/singleflight in each process, a lock made by hand with SET NX, and singlefill. It draws the picture
// of the README:
//
//	go -C bench run ./stampede -svg ../docs/stampede.svg
//
// For each protection it starts 8 processes of 50 goroutines, on a redis-server that it starts, too. First all
// goroutines ask at once for a cold key. Then they ask again and again, at a steady pace, while the value expires three
// times. A load only sleeps. When the value expires, the first two ways let callers wait for the load. With singlefill
// a hit has refreshed the value shortly before, so it may load more often than a value expires.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
)

// A plan is the workload, the same for all contenders.
type plan struct {
	Processes, Goroutines int           // goroutines in each process
	Load                  time.Duration // how long one load takes
}

func (p plan) ttl() time.Duration      { return 15 * p.Load }
func (p plan) pause() time.Duration    { return 5 * p.Load } // between the phases
func (p plan) expiring() time.Duration { return 3*(p.ttl()+2*p.Load) + p.ttl()/3 }

// A task is what a worker process has to do.
type task struct {
	plan
	Contender, Process int
	Addr               string
	Begin              time.Time // of the first phase, in all processes
}

// A report is what happened in one phase.
type report struct {
	Commands int             // that Redis got, alone or in a pipeline
	Calls    []time.Duration // how long each took
	Loads    []span
}

// A span is a load.
type span struct {
	Process      int
	Began, Ended time.Duration // since the first phase began
}

// A result is what happened while the key was cold, and then while its value expired.
type result [2]report

// workerEnv is the environment variable that makes this program a worker, and holds its task.
const workerEnv = "STAMPEDE_WORKER"

func main() {
	var err error
	if described := os.Getenv(workerEnv); described != "" {
		var t task
		if err = json.Unmarshal([]byte(described), &t); err == nil {
			err = json.NewEncoder(os.Stdout).Encode(work(t))
		}
	} else {
		svg := flag.String("svg", "stampede.svg", "`file` to write the picture to")
		flag.Parse()
		err = run(plan{8, 50, 100 * time.Millisecond}, *svg, os.Stdout)
	}
	if err != nil {
		log.Fatal(err)
	}
}

// run measures the contenders one after the other, prints what it finds, and writes the picture.
func run(p plan, svg string, out io.Writer) error {
	folder, err := os.MkdirTemp("", "stampede")
	if err != nil {
		return err
	}
	defer os.RemoveAll(folder)
	addr := filepath.Join(folder, "redis")
	server := exec.Command("redis-server", "--port", "0", "--unixsocket", addr, "--save", "")
	if err := server.Start(); err != nil {
		return err
	}
	defer func() { _ = server.Process.Kill(); _ = server.Wait() }()
	var results []result
	for i, c := range contenders {
		r, err := measure(task{plan: p, Contender: i, Addr: addr})
		if err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		for phase := range r {
			fmt.Fprintf(out, "%s, %s\n", c.name, r[phase].said(phase))
		}
		results = append(results, r)
	}
	return os.WriteFile(svg, drawing(p, results), 0o644)
}

// measure runs the processes of one contender, which have a few seconds to start.
func measure(t task) (r result, err error) {
	self, err := os.Executable()
	if err != nil {
		return r, err
	}
	t.Begin = time.Now().Add(3 * time.Second)
	each := make([]result, t.Processes)
	fleet, ctx := errgroup.WithContext(context.Background())
	for t.Process = range each {
		described, err := json.Marshal(t)
		if err != nil {
			return r, err
		}
		cmd, mine := exec.CommandContext(ctx, self), &each[t.Process]
		cmd.Env, cmd.Stderr = append(os.Environ(), workerEnv+"="+string(described)), os.Stderr
		fleet.Go(func() error {
			out, err := cmd.Output()
			return cmp.Or(err, json.Unmarshal(out, mine))
		})
	}
	err = fleet.Wait()
	for phase := range r {
		all := &r[phase]
		for _, one := range each {
			all.Commands += one[phase].Commands
			all.Calls = append(all.Calls, one[phase].Calls...)
			all.Loads = append(all.Loads, one[phase].Loads...)
		}
		slices.Sort(all.Calls)
	}
	return r, err
}

// said says what a phase has cost.
func (r report) said(phase int) string {
	return fmt.Sprintf("%s: %d loads, p99 %v, %.2f commands/call", []string{"cold", "expiring"}[phase], len(r.Loads),
		r.Calls[(len(r.Calls)-1)*99/100].Round(100*time.Microsecond), float64(r.Commands)/float64(len(r.Calls)))
}

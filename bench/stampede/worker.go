package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// workerEnv is the environment variable that makes this program a worker and holds its task.
const workerEnv = "STAMPEDE_WORKER"

type task struct {
	Plan               plan
	Contender, Process int
	Namespace, URL     string
}

// An order begins the next phase.
type order struct {
	Origin time.Time // when the first phase began
	At     time.Time
}

// A report is what happened in one phase.
type report struct {
	Commands int             // that Redis got, alone or in a pipeline
	Calls    []time.Duration // how long each took
	Loads    []load
}

type load struct {
	Process      int
	Began, Ended time.Duration // since the first phase began
}

type worker struct {
	task
	get getter

	mu     sync.Mutex
	origin time.Time // protected by mu
	failed error     // protected by mu
	report report    // protected by mu: of this phase
}

// work runs one worker process: it says that it is ready, and reports each phase that is ordered.
func work(described string, in io.Reader, out io.Writer) error {
	signal.Ignore(os.Interrupt) // the terminal sends it to the parent, too, which kills the workers
	w := new(worker)
	if err := json.Unmarshal([]byte(described), &w.task); err != nil {
		return err
	}
	options, err := redis.ParseURL(w.URL)
	if err != nil {
		return err
	}
	options.DisableIdentity = true // miniredis supports neither this nor the next one
	options.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	rdb := redis.NewClient(options)
	defer rdb.Close()
	if err := rdb.Ping(context.Background()).Err(); err != nil {
		return err
	}
	var warming sync.WaitGroup // no contender pays for the connections of the pool
	for range w.Plan.Goroutines {
		warming.Go(func() { rdb.Ping(context.Background()) })
	}
	warming.Wait()
	rdb.AddHook(counter{w})
	get, done, err := contenders[w.Contender].open(rdb, w.Namespace, w.Plan.TTL, w.load)
	if err != nil {
		return err
	}
	w.get = get
	orders := make(chan order)
	go func() {
		decoder := json.NewDecoder(in)
		for {
			var o order
			if decoder.Decode(&o) != nil {
				os.Exit(1) // the parent is gone
			}
			orders <- o
		}
	}()
	say := json.NewEncoder(out)
	if err := say.Encode(true); err != nil {
		return err
	}
	for phase := range phases {
		w.askAll(phase, <-orders)
		if phase == phases-1 {
			if err := done(); err != nil { // waits for loads without callers
				return err
			}
		}
		w.mu.Lock()
		told, failed := w.report, w.failed
		w.report = report{}
		w.mu.Unlock()
		if failed != nil {
			return failed
		}
		if err := say.Encode(told); err != nil {
			return err
		}
	}
	return nil
}

// askAll runs the goroutines in one phase.
func (w *worker) askAll(phase int, o order) {
	w.mu.Lock()
	w.origin = o.Origin
	w.mu.Unlock()
	var asking sync.WaitGroup
	for range w.Plan.Goroutines {
		asking.Go(func() {
			time.Sleep(time.Until(o.At))
			if phase == cold {
				w.call()
				return
			}
			pause := rand.N(w.Plan.Load) // so that not all ask at once
			for end := o.At.Add(w.Plan.Expiring); time.Until(end) > pause; pause = w.Plan.Load/2 + rand.N(w.Plan.Load) {
				time.Sleep(pause)
				w.call()
			}
		})
	}
	asking.Wait()
}

func (w *worker) call() {
	begun := time.Now()
	v, err := w.get(context.Background(), "key")
	took := time.Since(begun)
	if err == nil && v != "the value of key" {
		err = fmt.Errorf("got %q", v)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.report.Calls = append(w.report.Calls, took)
	if err != nil {
		w.failed = err
	}
}

// load simulates a slow source.
func (w *worker) load(_ context.Context, key string) (string, error) {
	begun := time.Now()
	time.Sleep(w.Plan.Load)
	w.mu.Lock()
	defer w.mu.Unlock()
	l := load{Process: w.Process, Began: begun.Sub(w.origin), Ended: time.Since(w.origin)}
	w.report.Loads = append(w.report.Loads, l)
	return "the value of " + key, nil
}

// A counter counts the commands that a contender sends.
type counter struct{ *worker }

func (c counter) count(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.report.Commands += n
}

func (c counter) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		c.count(1)
		return next(ctx, cmd)
	}
}

func (c counter) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		c.count(len(cmds))
		return next(ctx, cmds)
	}
}

func (c counter) DialHook(next redis.DialHook) redis.DialHook { return next }

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
	Begin              time.Time // of the first phase, in all processes
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
	failed error  // protected by mu
	report report // protected by mu: of this phase
}

// work runs one worker process, which prints its result.
func work(described string, out io.Writer) error {
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
	if time.Until(w.Begin) < 0 {
		return fmt.Errorf("a process was not ready within %v", startUp)
	}
	var r result
	w.askAll(w.Begin, w.call)
	r[cold] = w.reported()
	begin := w.Begin.Add(w.Plan.Cold)
	w.askAll(begin, func() { w.callUntil(begin.Add(w.Plan.Expiring)) })
	if err := done(); err != nil { // waits for loads without callers
		return err
	}
	r[expiring] = w.reported()
	if w.failed != nil {
		return w.failed
	}
	return json.NewEncoder(out).Encode(r)
}

// askAll runs ask in all goroutines.
func (w *worker) askAll(begin time.Time, ask func()) {
	var asking sync.WaitGroup
	for range w.Plan.Goroutines {
		asking.Go(func() {
			time.Sleep(time.Until(begin))
			ask()
		})
	}
	asking.Wait()
}

// callUntil calls again and again, with pauses so that not all ask at once.
func (w *worker) callUntil(end time.Time) {
	for pause := rand.N(w.Plan.Load); time.Until(end) > pause; pause = w.Plan.Load/2 + rand.N(w.Plan.Load) {
		time.Sleep(pause)
		w.call()
	}
}

// reported returns the report of the phase that is over.
func (w *worker) reported() report {
	w.mu.Lock()
	defer w.mu.Unlock()
	told := w.report
	w.report = report{}
	return told
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
	l := load{Process: w.Process, Began: begun.Sub(w.Begin), Ended: time.Since(w.Begin)}
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

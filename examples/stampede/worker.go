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
)

// work runs one worker process. It ends early if its orders end, since its parent wants that or is
// gone.
func work(description string, in io.Reader, out io.Writer) error {
	signal.Ignore(os.Interrupt) // the terminal sends it to the parent, too
	w := &worker{messages: json.NewEncoder(out)}
	if err := json.Unmarshal([]byte(description), &w.task); err != nil {
		return err
	}
	rdb, err := newClient(w.task.URL)
	if err != nil {
		return err
	}
	defer rdb.Close()
	rdb.AddHook(counter{w})
	get, done, err := contenders[w.task.Contender].open(rdb, w.task.Namespace, w.task.Plan.TTL, w.load)
	if err != nil {
		return err
	}
	w.get = get
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	orders := make(chan order, phases)
	go func() {
		defer cancel()
		decoder := json.NewDecoder(in)
		for {
			var o order
			if decoder.Decode(&o) != nil {
				return
			}
			orders <- o
		}
	}()

	if err := rdb.Ping(ctx).Err(); err != nil {
		return err
	}
	w.say(isReady)
	for range phases {
		select {
		case o := <-orders:
			w.askAll(ctx, o)
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		w.say(hasAsked)
	}
	if err := done(); err != nil { // waits for loads without callers
		return err
	}
	w.say(hasReported)
	return nil
}

type worker struct {
	task     task
	get      getter
	messages *json.Encoder

	mu     sync.Mutex
	phase  int       // protected by mu
	origin time.Time // protected by mu
	asked  int       // protected by mu: calls that have returned
	begun  int       // protected by mu: loads
	report report    // protected by mu
}

func (w *worker) say(s state) {
	w.mu.Lock()
	defer w.mu.Unlock()
	m := message{State: s, Calls: w.asked, Loads: w.begun}
	if s == hasReported {
		m.Report = &w.report
	}
	_ = w.messages.Encode(m) // if this fails, the parent is gone, and the orders end
}

// askAll carries out an order, and reports its progress.
func (w *worker) askAll(ctx context.Context, o order) {
	w.mu.Lock()
	w.phase, w.origin = o.Phase, o.Origin
	w.mu.Unlock()
	var asking sync.WaitGroup
	for g := range w.task.Plan.Goroutines {
		asking.Go(func() { w.ask(context.WithValue(ctx, asker{}, g), o, g) })
	}
	over := make(chan struct{})
	go func() { asking.Wait(); close(over) }()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			w.say(isAsking)
		case <-over:
			return
		}
	}
}

// asker is the context key of the number of the goroutine that asks.
type asker struct{}

// ask runs one goroutine in one phase. Neighbouring goroutines begin with different keys.
func (w *worker) ask(ctx context.Context, o order, g int) {
	keys := keyNames(w.task.Plan.Keys)
	if !sleep(ctx, time.Until(o.At)) {
		return
	}
	if o.Phase == cold {
		for i := range keys {
			w.call(ctx, o.Phase, keys[(g+i)%len(keys)])
		}
		return
	}
	end := o.At.Add(w.task.Plan.Expiring)
	pause := rand.N(w.task.Plan.Pause) // so that not all ask at once
	for i := g; time.Until(end) > pause && sleep(ctx, pause); i++ {
		w.call(ctx, o.Phase, keys[i%len(keys)])
		pause = w.task.Plan.Pause/2 + rand.N(w.task.Plan.Pause)
	}
}

// sleep returns false if ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

func (w *worker) call(ctx context.Context, phase int, key string) {
	begun := time.Now()
	v, err := w.get(ctx, key)
	took := time.Since(begun)
	if err == nil && v != valueOf(key) {
		err = fmt.Errorf("asked for %s, got %q", key, v)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.asked++
	w.report.call(phase, took, err)
}

func valueOf(key string) string { return "the value of " + key }

// load simulates a slow source. It records the goroutine that asked, which it finds in the context.
func (w *worker) load(ctx context.Context, key string) (string, error) {
	begun := time.Now()
	w.mu.Lock()
	w.begun++
	l := load{Goroutine: ctx.Value(asker{}).(int), Key: key, Phase: w.phase, Began: begun.Sub(w.origin)}
	w.mu.Unlock()
	if !sleep(ctx, w.task.Plan.Load) {
		return "", ctx.Err()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	l.Ended = l.Began + time.Since(begun)
	w.report.Loads = append(w.report.Loads, l)
	return valueOf(key), nil
}

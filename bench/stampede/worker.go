package main

import (
	"context"
	"errors"
	"log"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill"
	"golang.org/x/sync/singleflight"
)

// A getter returns the value of a key: a load is a getter, and so is a cache in front of it.
type getter = func(ctx context.Context, key string) (string, error)

// contenders are the ways to save loads. Each opens a cache, and returns what closes it.
var contenders = []struct {
	name  string
	open  func(rdb *redis.Client, ttl time.Duration, load getter) (get getter, done func() error)
	color string // class in the picture
}{
	{"singleflight alone", inEachProcess, "c3"},
	{"SET NX by hand", byHand, "c1"},
	{"singlefill", inTheFleet, "c0"},
}

// inEachProcess loads once in each process.
func inEachProcess(rdb *redis.Client, ttl time.Duration, load getter) (getter, func() error) {
	var flights singleflight.Group
	return func(ctx context.Context, key string) (string, error) {
		v, err, _ := flights.Do(key, func() (any, error) {
			v, err := rdb.Get(ctx, "a:"+key).Result()
			if errors.Is(err, redis.Nil) {
				if v, err = load(ctx, key); err == nil {
					err = rdb.Set(ctx, "a:"+key, v, ttl).Err()
				}
			}
			return v, err
		})
		return v.(string), err
	}, func() error { return nil }
}

// byHand is the lock that is often written: it loads once, unless a load takes longer than the lock lives. Then a
// caller deletes the lock of another.
func byHand(rdb *redis.Client, ttl time.Duration, load getter) (getter, func() error) {
	return func(ctx context.Context, key string) (string, error) {
		name, lock := "b:"+key, "b:lock:"+key
		for {
			v, err := rdb.Get(ctx, name).Result()
			if !errors.Is(err, redis.Nil) {
				return v, err
			}
			err = rdb.SetArgs(ctx, lock, "locked", redis.SetArgs{Mode: "NX", TTL: ttl}).Err()
			if errors.Is(err, redis.Nil) { // another process has it
				time.Sleep(20 * time.Millisecond)
				continue
			}
			if err != nil {
				return "", err
			}
			defer rdb.Del(ctx, lock)
			if v, err = rdb.Get(ctx, name).Result(); !errors.Is(err, redis.Nil) {
				return v, err // stored since the first GET
			}
			if v, err = load(ctx, key); err == nil {
				err = rdb.Set(ctx, name, v, ttl).Err()
			}
			return v, err
		}
	}, func() error { return nil }
}

// inTheFleet loads once in all processes.
func inTheFleet(rdb *redis.Client, ttl time.Duration, load getter) (getter, func() error) {
	cache, err := singlefill.New[string](rdb, "c", ttl, nil)
	if err != nil {
		log.Fatal(err)
	}
	return func(ctx context.Context, key string) (string, error) { return cache.GetOrLoad(ctx, key, load) }, cache.Close
}

// A worker is one of the processes that ask. It is a hook that counts the commands of its contender.
type worker struct {
	task
	get getter

	mu     sync.Mutex
	report report // protected by mu: of this phase
}

// work runs a worker, and returns what has happened.
func work(t task) (r result) {
	w := &worker{task: t}
	rdb := redis.NewClient(&redis.Options{Network: "unix", Addr: w.Addr})
	defer rdb.Close()
	for rdb.Ping(context.Background()).Err() != nil && time.Now().Before(w.Begin) { // the server is starting
		time.Sleep(10 * time.Millisecond)
	}
	// No contender pays for the connections of the pool.
	w.together(time.Now(), func() { rdb.Ping(context.Background()) })
	rdb.AddHook(w)
	var done func() error
	if w.get, done = contenders[w.Contender].open(rdb, w.ttl(), w.load); time.Until(w.Begin) < 0 {
		log.Fatal("a process was not ready in time")
	}
	w.together(w.Begin, w.call)
	r[0] = w.reported()
	begin := w.Begin.Add(w.pause())
	w.together(begin, func() { // with pauses, so that not all ask at once
		for pause := rand.N(w.Load); time.Until(begin.Add(w.expiring())) > pause; pause = w.Load/2 + rand.N(w.Load) {
			time.Sleep(pause)
			w.call()
		}
	})
	if err := done(); err != nil { // waits for loads without callers
		log.Fatal(err)
	}
	r[1] = w.reported()
	return r
}

// together runs ask in all goroutines.
func (w *worker) together(begin time.Time, ask func()) {
	var asking sync.WaitGroup
	for range w.Goroutines {
		asking.Go(func() {
			time.Sleep(time.Until(begin))
			ask()
		})
	}
	asking.Wait()
}

// reported returns the report of the phase that is over.
func (w *worker) reported() (r report) {
	w.mu.Lock()
	defer w.mu.Unlock()
	r, w.report = w.report, r
	return r
}

func (w *worker) call() {
	begun := time.Now()
	v, err := w.get(context.Background(), "key")
	took := time.Since(begun)
	if err != nil || v != "the value of key" {
		log.Fatalf("got %q, %v", v, err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.report.Calls = append(w.report.Calls, took)
}

// load simulates a slow source.
func (w *worker) load(_ context.Context, key string) (string, error) {
	began := time.Since(w.Begin)
	time.Sleep(w.Load)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.report.Loads = append(w.report.Loads, span{w.Process, began, time.Since(w.Begin)})
	return "the value of " + key, nil
}

func (w *worker) count(n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.report.Commands += n
}

func (w *worker) DialHook(next redis.DialHook) redis.DialHook { return next }

func (w *worker) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error { w.count(1); return next(ctx, cmd) }
}

func (w *worker) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error { w.count(len(cmds)); return next(ctx, cmds) }
}

package cache_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

// The test gives orders to its processes, and they answer with reports. Each is a line of JSON.

// A config describes a process and its cache.
type config struct {
	Name      string // of the process
	Addr      string // of the Redis
	Namespace string

	Mortal bool // the process is going to lose its lock
	Stale  bool // expired values are served while they are refreshed
}

// options returns the options of the cache. No stall of the machine makes a command or a lock time out.
// LockTTL of a process that is going to lose its lock is as long as a test can wait.
func (c config) options() *singlefill.Options[string] {
	opts := &singlefill.Options[string]{LockTTL: 30 * time.Second, RedisTimeout: 9 * time.Second, LoadTimeout: time.Minute}
	if c.Mortal {
		opts.LockTTL, opts.RedisTimeout = 2500*time.Millisecond, 800*time.Millisecond
	}
	if c.Stale {
		opts.StaleWhileRevalidate = time.Hour
	}
	return opts
}

// An order is what the test has a process do. Without N the loads of the calls with that Tag may return.
type order struct {
	Tag, Key string
	N        int // how many goroutines call GetOrLoad

	// What the Loader does before it returns its value.
	Sleep     time.Duration
	Block     bool // wait for the order to return, or for ctx
	IgnoreCtx bool // with Block: do not wait for ctx
}

// A report is what a process tells the test.
//
//	begun Tag    a Loader of Tag begins to load Value, At the server's time
//	done Tag     all calls of Tag have returned, with Outcomes
//	refused      the store of Value was refused
//	trouble      a command failed with the error Value, or a Loader ran without the fill lock
type report struct {
	Event, Tag string
	Value      string         `json:",omitempty"`
	At         time.Time      `json:",omitzero"`
	Outcomes   map[string]int `json:",omitempty"` // how many calls have each
}

// value and stale are the outcomes of calls that have returned a value. Other outcomes are texts of errors.
func value(v string) string { return "value " + v }
func stale(v string) string { return "stale " + v }

func outcomeOf(v string, info singlefill.ValueInfo, err error) string {
	switch {
	case err != nil:
		return err.Error()
	case info.Stale:
		return stale(v)
	}
	return value(v)
}

// loadsKey is the Redis key under which loads are counted, outside of every namespace.
func loadsKey(namespace, key string) string { return "loads:" + namespace + ":" + key }

// workerRole is the one role of child processes: a process that uses a cache.
const workerRole = "worker"

func init() { redistest.Role(workerRole, runWorker) }

// A worker is the state of a child process.
type worker struct {
	*redistest.Child
	config
	counters *redis.Client
	cache    *singlefill.Cache[string]
	loads    atomic.Int64
}

// runWorker starts what orders ask for, one after another, and does not wait for it.
func runWorker(p *redistest.Child) {
	w := &worker{Child: p}
	must(json.Unmarshal([]byte(p.Args[0]), &w.config))
	rdb := w.client()
	w.counters = w.client()
	must(rdb.Ping(context.Background()).Err()) // a first connection takes longer than a command
	opts := w.options()
	opts.Trace = &singlefill.Trace{
		RedisError: func(_ context.Context, op string, err error) {
			w.Report(report{Event: "trouble", Value: fmt.Sprintf("%s: %v", op, err)})
		},
		LoadDone: func(_ context.Context, l singlefill.LoadInfo) {
			if l.Fenced {
				w.Report(report{Event: "refused", Value: l.Key})
			}
			if l.Unlocked {
				w.Report(report{Event: "trouble", Value: l.Key + " was loaded without the lock"})
			}
		},
	}
	var err error
	w.cache, err = singlefill.New(rdb, w.Namespace, 10*time.Minute, opts)
	must(err)
	w.endWhenTold(rdb)
	w.Report(report{Event: "ready"})
	releases := make(map[string]chan struct{})
	for o := range redistest.Orders[order](p) {
		if o.N == 0 {
			close(releases[o.Tag])
			continue
		}
		releases[o.Tag] = make(chan struct{})
		go w.get(o, releases[o.Tag])
	}
}

func (w *worker) client() *redis.Client {
	return redis.NewClient(&redis.Options{
		Addr: w.Addr, PoolTimeout: time.Minute, ReadTimeout: time.Minute, WriteTimeout: time.Minute,
		DisableIdentity:          true,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

// get has N goroutines call GetOrLoadInfo once each.
func (w *worker) get(o order, released <-chan struct{}) {
	ended := make(chan string, o.N)
	for range o.N {
		go func() { ended <- outcomeOf(w.cache.GetOrLoadInfo(context.Background(), o.Key, w.loader(o, released))) }()
	}
	r := report{Event: "done", Tag: o.Tag, Outcomes: make(map[string]int)}
	for range o.N {
		r.Outcomes[<-ended]++
	}
	w.Report(r)
}

// loader returns the Loader of calls. Each load counts itself and reports its beginning.
func (w *worker) loader(o order, released <-chan struct{}) singlefill.Loader[string] {
	return func(ctx context.Context, key string) (string, error) {
		r := report{Event: "begun", Tag: o.Tag, Value: fmt.Sprintf("%s/%d", w.Name, w.loads.Add(1))}
		must(w.counters.Incr(context.Background(), loadsKey(w.Namespace, key)).Err())
		var err error
		r.At, err = w.counters.Time(context.Background()).Result()
		must(err)
		w.Report(r)
		time.Sleep(o.Sleep)
		if o.Block {
			cancelled := ctx.Done()
			if o.IgnoreCtx {
				cancelled = nil
			}
			select {
			case <-released:
			case <-cancelled:
			}
		}
		return r.Value, nil
	}
}

// endWhenTold makes the process end at SIGTERM as a service does: after its grace the cache is shut down, and then it
// closes its client.
func (w *worker) endWhenTold(rdb *redis.Client) {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	go func() {
		<-stop
		ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
		defer cancel()
		_ = w.cache.Shutdown(ctx)
		_ = rdb.Close()
		os.Exit(0)
	}()
}

package cache_test

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

// The test gives orders to its processes, and they answer with reports. Each is a line of JSON.

// A config describes the cache of a process.
type config struct {
	Name      string // of the process
	Addr      string // of the proxy
	Counters  string // address of the Redis in which loads count themselves
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

// An order is what the test has a process do. Tag names what the order starts.
type order struct {
	Op     string
	Tag    string `json:",omitempty"`
	Key    string `json:",omitempty"`
	N      int    `json:",omitempty"` // how many goroutines
	Config config `json:",omitzero"`

	// What the Loader does before it returns its value.
	Sleep     time.Duration `json:",omitempty"` // sleep so long; of serve, the grace
	Block     bool          `json:",omitempty"` // wait for the order release, or for ctx
	IgnoreCtx bool          `json:",omitempty"` // with Block: do not wait for ctx
}

// A report is what a process tells the test.
//
//	begun Tag    a Loader of Tag begins to load Value, At the server's time
//	joined Tag   all calls of Tag wait in GetOrLoad
//	done Tag     all calls of Tag have returned, with Outcomes
//	unlocked     a Loader of the key Value ran without the fill lock, for which no test here gives a reason
//	trouble      a command failed with the error Value
//	Op Tag       another order has been carried out
type report struct {
	Event, Tag string
	Value      string           `json:",omitempty"`
	At         time.Time        `json:",omitzero"`
	Outcomes   map[string]int   `json:",omitempty"` // how many calls have each
	Stats      singlefill.Stats `json:",omitzero"`
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
	rdb      *redis.Client // the cache's
	counters *redis.Client // neither behind the proxy nor used by the cache
	cache    *singlefill.Cache[string]
	loads    atomic.Int64
	calls    map[string]*calls // by tag
}

// runWorker starts what orders ask for, one after another, and does not wait for it.
func runWorker(p *redistest.Child) {
	w := &worker{Child: p, calls: make(map[string]*calls)}
	for o := range redistest.Orders[order](p) {
		switch o.Op {
		case "new":
			w.open(o)
		case "get":
			w.get(o)
		case "release":
			close(w.calls[o.Tag].release)
		case "joined":
			c := w.calls[o.Tag]
			go func() {
				c.joined.Wait()
				w.Report(report{Event: o.Op, Tag: o.Tag})
			}()
		case "serve":
			w.serve(o)
		default:
			go w.do(o)
		}
	}
}

// do carries out an order and reports that it is done.
func (w *worker) do(o order) {
	ctx := context.Background()
	r := report{Event: o.Op, Tag: o.Tag}
	switch o.Op {
	case "peek": // Get
		v, err := w.cache.Get(ctx, o.Key)
		r.Value = outcomeOf(v, singlefill.ValueInfo{}, err)
	case "expire":
		must(w.cache.Expire(ctx, o.Key))
	case "stats":
		r.Stats = w.cache.Stats()
	default:
		panic("unknown order " + o.Op)
	}
	w.Report(r)
}

func (w *worker) open(o order) {
	w.config = o.Config
	w.rdb, w.counters = quietClient(w.Addr), quietClient(w.Counters)
	must(w.rdb.Ping(context.Background()).Err()) // a first connection takes longer than a command
	opts := w.options()
	opts.Trace = &singlefill.Trace{
		RedisError: func(_ context.Context, op string, err error) {
			w.Report(report{Event: "trouble", Value: fmt.Sprintf("%s: %v", op, err)})
		},
		LoadDone: func(_ context.Context, l singlefill.LoadInfo) {
			if l.Unlocked {
				w.Report(report{Event: "unlocked", Value: l.Key})
			}
		},
	}
	var err error
	w.cache, err = singlefill.New(w.rdb, w.Namespace, 10*time.Minute, opts)
	must(err)
	w.Report(report{Event: o.Op, Tag: o.Tag})
}

func quietClient(addr string) *redis.Client {
	return redis.NewClient(&redis.Options{
		Addr: addr, PoolTimeout: time.Minute, ReadTimeout: time.Minute, WriteTimeout: time.Minute,
		DisableIdentity:          true,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

// calls are the goroutines of one order.
type calls struct {
	order
	release chan struct{}  // closed when their Loader may return
	joined  sync.WaitGroup // done when all of them wait in GetOrLoad
}

// get starts N goroutines that call GetOrLoadInfo once each.
func (w *worker) get(o order) {
	c := &calls{order: o, release: make(chan struct{})}
	w.calls[o.Tag] = c
	ended := make(chan string, o.N)
	for range o.N {
		c.joined.Add(1)
		go func() {
			ctx := redistest.OnDone(context.Background(), c.joined.Done)
			v, info, err := w.cache.GetOrLoadInfo(ctx, o.Key, w.loader(c))
			ctx.Done() // it may have returned without waiting
			ended <- outcomeOf(v, info, err)
		}()
	}
	go func() {
		r := report{Event: "done", Tag: o.Tag, Outcomes: make(map[string]int)}
		for range o.N {
			r.Outcomes[<-ended]++
		}
		w.Report(r)
	}()
}

// loader returns the Loader of calls. Each load counts itself and reports its beginning.
func (w *worker) loader(c *calls) singlefill.Loader[string] {
	return func(ctx context.Context, key string) (string, error) {
		r := report{Event: "begun", Tag: c.Tag, Value: fmt.Sprintf("%s/%d", w.Name, w.loads.Add(1))}
		p := w.counters.Pipeline()
		p.Incr(context.Background(), loadsKey(w.Namespace, key))
		now := p.Time(context.Background())
		_, err := p.Exec(context.Background())
		must(err)
		r.At = now.Val()
		w.Report(r)
		time.Sleep(c.Sleep)
		if c.Block {
			cancelled := ctx.Done()
			if c.IgnoreCtx {
				cancelled = nil
			}
			select {
			case <-c.release:
			case <-cancelled:
			}
		}
		return r.Value, nil
	}
}

// serve makes the process end at SIGTERM as a service does: after the grace at the latest its cache is shut down, and
// then it closes its client.
func (w *worker) serve(o order) {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	go func() {
		<-stop
		ctx, cancel := context.WithTimeout(context.Background(), o.Sleep)
		defer cancel()
		_ = w.cache.Shutdown(ctx)
		_ = w.rdb.Close()
		os.Exit(0)
	}()
	w.Report(report{Event: o.Op, Tag: o.Tag})
}

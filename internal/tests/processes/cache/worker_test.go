package cache_test

import (
	"context"
	"errors"
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

	mu     sync.Mutex
	calls  map[string]*calls // protected by mu: by tag
	errors map[string]error  // protected by mu: by text
}

func runWorker(p *redistest.Child) {
	w := &worker{Child: p, calls: make(map[string]*calls), errors: make(map[string]error)}
	for o := range redistest.Orders[order](p) {
		w.handle(o)
	}
}

// handle starts what an order asks for, and does not wait for it: orders are started one after
// another.
func (w *worker) handle(o order) {
	switch o.Op {
	case "new":
		w.open(o)
	case "get":
		w.get(o)
	case "start":
		close(w.tagged(o.Tag).start)
	case "release":
		close(w.tagged(o.Tag).release)
	case "pass":
		c := w.tagged(o.Tag)
		go func() { c.release <- struct{}{} }()
	case "replace":
		w.replace(o)
	case "refresh":
		w.refresh(o)
	case "serve":
		w.serve(o)
	case "read":
		w.read(o)
	case "stop":
		close(w.tagged(o.Tag).stop)
	case "tally":
		w.Report(w.tagged(o.Tag).tally())
	case "joined":
		c := w.tagged(o.Tag)
		go func() {
			c.joined.Wait()
			w.Report(report{Event: o.Op, Tag: o.Tag})
		}()
	default:
		go w.do(o)
	}
}

// do carries out an order and reports that it is done.
func (w *worker) do(o order) {
	ctx := context.Background()
	r := report{Event: o.Op, Tag: o.Tag, Key: o.Key}
	var err error
	switch o.Op {
	case "peek": // Get
		v, err := w.cache.Get(ctx, o.Key)
		r.Outcomes = []countedOutcome{{outcomeOf(o.Key, v, singlefill.ValueInfo{}, err, nil), 1}}
	case "expire":
		err = w.cache.Expire(ctx, o.Key)
	case "close":
		err = w.cache.Close()
	case "stats":
		r.Stats, r.Pool = w.cache.Stats(), *w.rdb.PoolStats()
	default:
		panic("unknown order " + o.Op)
	}
	if err != nil {
		r.Err = err.Error()
	}
	w.Report(r)
}

func (w *worker) open(o order) {
	w.config = o.Config
	w.rdb = quietClient(w.Addr, w.PoolSize)
	w.must(w.rdb.Ping(context.Background())) // a first connection takes longer than a command
	w.counters = quietClient(w.Counters, 0)
	var err error
	opts := w.options()
	opts.Trace = &singlefill.Trace{
		RedisError: func(_ context.Context, op string, err error) {
			w.Report(report{Event: "trouble", Err: fmt.Sprintf("%s: %v", op, err)})
		},
		LoadDone: func(_ context.Context, l singlefill.LoadInfo) {
			if l.Unlocked {
				w.Report(report{Event: "unlocked", Key: l.Key})
			}
		},
	}
	if w.cache, err = singlefill.New(w.rdb, w.Namespace, defaultTTL, opts); err != nil {
		panic(err)
	}
	w.Report(report{Event: o.Op, Tag: o.Tag})
}

func quietClient(addr string, poolSize int) *redis.Client {
	return redis.NewClient(&redis.Options{
		Addr: addr, PoolSize: poolSize, PoolTimeout: time.Minute,
		ReadTimeout: time.Minute, WriteTimeout: time.Minute,
		DisableIdentity:          true,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
}

// calls are the goroutines of one order.
type calls struct {
	order
	start   chan struct{}  // closed when they may start
	release chan struct{}  // closed when their Loader may return
	stop    chan struct{}  // closed when they are to stop
	err     error          // of their Loader
	joined  sync.WaitGroup // done when all of them wait in GetOrLoad
	ended   sync.WaitGroup

	counts []atomic.Int64 // see report

	mu       sync.Mutex
	outcomes map[outcome]int // protected by mu
}

func (w *worker) begin(o order) *calls {
	c := &calls{
		order: o, start: make(chan struct{}), release: make(chan struct{}), stop: make(chan struct{}),
		counts: make([]atomic.Int64, o.N), outcomes: make(map[outcome]int),
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if text := o.Plan.Fail; text != "" {
		if w.errors[text] == nil {
			w.errors[text] = errors.New(text)
		}
		c.err = w.errors[text]
	}
	w.calls[o.Tag] = c
	return c
}

func (w *worker) tagged(tag string) *calls {
	w.mu.Lock()
	defer w.mu.Unlock()
	if c := w.calls[tag]; c != nil {
		return c
	}
	panic("no calls are tagged " + tag)
}

func (c *calls) note(o outcome) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.outcomes[o]++
}

func (c *calls) tally() report {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := report{Event: "tally", Tag: c.Tag}
	for o, n := range c.outcomes {
		r.Outcomes = append(r.Outcomes, countedOutcome{o, n})
	}
	for i := range c.counts {
		r.Counts = append(r.Counts, c.counts[i].Load())
	}
	return r
}

func (w *worker) finish(c *calls) {
	c.ended.Wait()
	r := c.tally()
	r.Event = "done"
	w.Report(r)
}

// get starts N goroutines that call GetOrLoadInfo once each.
func (w *worker) get(o order) {
	c := w.begin(o)
	var ready sync.WaitGroup
	for range o.N {
		c.joined.Add(1)
		ready.Add(1)
		c.ended.Go(func() {
			ready.Done()
			<-c.start
			ctx := redistest.OnDone(context.Background(), c.joined.Done)
			v, info, err := w.cache.GetOrLoadInfo(ctx, o.Key, w.loader(c))
			ctx.Done() // it may have returned without waiting
			c.note(outcomeOf(o.Key, v, info, err, c.err))
		})
	}
	if o.Start {
		go func() {
			ready.Wait()
			w.Report(report{Event: "ready", Tag: o.Tag})
		}()
	} else {
		close(c.start)
	}
	go w.finish(c)
}

// refresh starts a goroutine that calls Refresh, and then looks at what the cache has.
func (w *worker) refresh(o order) {
	c := w.begin(o)
	c.ended.Go(func() {
		v, err := "", w.cache.Refresh(context.Background(), o.Key, w.loader(c))
		if err == nil {
			v, err = w.cache.Get(context.Background(), o.Key)
		}
		c.note(outcomeOf(o.Key, v, singlefill.ValueInfo{}, err, c.err))
	})
	go w.finish(c)
}

// serve makes the process end at SIGTERM as a service does: after Every at the latest its cache is shut down, and
// then it closes its client.
func (w *worker) serve(o order) {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	go func() {
		<-stop
		ctx, cancel := context.WithTimeout(context.Background(), o.Every)
		defer cancel()
		_ = w.cache.Shutdown(ctx)
		_ = w.rdb.Close()
		os.Exit(0)
	}()
	w.Report(report{Event: o.Op, Tag: o.Tag})
}

// replace starts N goroutines that get a value, find at the order start that it is refused, and ask for another
// one. Each counts whether it has deleted the value.
func (w *worker) replace(o order) {
	c := w.begin(o)
	var ready sync.WaitGroup
	for i := range o.N {
		ready.Add(1)
		c.ended.Go(func() {
			ctx := context.Background()
			refused, info, err := w.cache.GetOrLoadInfo(ctx, o.Key, w.loader(c))
			ready.Done()
			<-c.start
			time.Sleep(time.Duration(i) * o.Every) // they learn of it one after the other
			deleted := false
			if err == nil {
				deleted, err = w.cache.DeleteIf(ctx, o.Key, info)
			}
			if deleted {
				c.counts[i].Add(1)
			}
			v := ""
			if err == nil {
				v, info, err = w.cache.GetOrLoadInfo(ctx, o.Key, w.loader(c))
			}
			if err == nil && v == refused {
				err = errors.New("the refused value again")
			}
			c.note(outcomeOf(o.Key, v, info, err, nil))
		})
	}
	go func() {
		ready.Wait()
		w.Report(report{Event: "ready", Tag: o.Tag})
	}()
	go w.finish(c)
}

// read starts N goroutines that call GetOrLoadInfo again and again, with a pause before each call,
// until the order stop.
func (w *worker) read(o order) {
	c := w.begin(o)
	for i := range o.N {
		c.ended.Go(func() {
			for {
				select {
				case <-c.stop:
					return
				case <-time.After(o.Every):
				}
				v, info, err := w.cache.GetOrLoadInfo(context.Background(), o.Key, w.loader(c))
				c.note(outcomeOf(o.Key, v, info, err, c.err))
				c.counts[i].Add(1)
			}
		})
	}
	go w.finish(c)
}

// loader returns the Loader of calls. Each load counts and reports its beginning and its end.
func (w *worker) loader(c *calls) singlefill.Loader[string] {
	return func(ctx context.Context, key string) (string, error) {
		value := fmt.Sprintf("%s/%d", w.Name, w.loads.Add(1))
		at := w.loadBegins(key)
		w.Report(report{Event: "begun", Tag: c.Tag, Key: key, Value: value, At: at})
		if c.Plan.Sleep > 0 {
			time.Sleep(c.Plan.Sleep)
		}
		if c.Plan.Block {
			cancelled := ctx.Done()
			if c.Plan.IgnoreCtx {
				cancelled = nil
			}
			select {
			case <-c.release:
			case <-cancelled:
			}
		}
		w.must(w.counters.Decr(context.Background(), runningKey(w.Namespace, key)))
		switch {
		case c.err != nil:
			return "", c.err
		case c.Plan.Panic != "":
			panic(c.Plan.Panic)
		case c.Plan.NotFound:
			return "", singlefill.ErrNotFound
		}
		return value, nil
	}
}

func (w *worker) loadBegins(key string) (at time.Time) {
	ctx := context.Background()
	p := w.counters.Pipeline()
	p.Incr(ctx, loadsKey(w.Namespace, key))
	running := p.Incr(ctx, runningKey(w.Namespace, key))
	now := p.Time(ctx)
	if _, err := p.Exec(ctx); err != nil {
		panic(err)
	}
	if running.Val() > 1 {
		w.must(w.counters.Incr(ctx, overlapsKey(w.Namespace, key)))
	}
	return now.Val()
}

func (w *worker) must(cmd redis.Cmder) {
	if err := cmd.Err(); err != nil {
		panic(err)
	}
}

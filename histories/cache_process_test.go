package histories

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/singlefill/singlefill"
)

// The cache threads of a process.

// A profile is a cache's options.
type profile struct {
	ttl, swr, sie time.Duration
	maxLoads      int
	maxFleetLoads int
	failing       bool // the source sometimes fails
	near          bool // values are kept in memory
}

func (p profile) windows() bool { return p.swr > 0 || p.sie > 0 }

var profiles = map[string]profile{
	"plain":  {ttl: time.Minute},
	"short":  {ttl: 10 * time.Millisecond}, // expires, and is refreshed early, all the time
	"narrow": {ttl: 20 * time.Millisecond, maxLoads: 1, maxFleetLoads: 2},
	"stale":  {ttl: 8 * time.Millisecond, swr: 10 * time.Millisecond, sie: 40 * time.Millisecond, failing: true},

	"near":       {ttl: time.Minute, near: true},
	"near stale": {ttl: 30 * time.Millisecond, swr: 40 * time.Millisecond, sie: 100 * time.Millisecond, failing: true, near: true},
}

// nearProfiles are the profiles whose caches have a log.
var nearProfiles = []string{"near", "near stale"}

func (x *process) openCaches() {
	for name, p := range profiles {
		var near *singlefill.Near
		if p.near {
			near = &singlefill.Near{MaxLag: x.Timeouts.MaxLag}
		}
		cache, err := singlefill.New(x.rdb, name, p.ttl, &singlefill.Options[int64]{
			StaleWhileRevalidate: p.swr, StaleIfError: p.sie, RetryAfter: 4 * time.Millisecond,
			MaxLoads: p.maxLoads, MaxFleetLoads: p.maxFleetLoads, Near: near,
			RedisTimeout: x.Timeouts.RedisTimeout, LockTTL: x.Timeouts.LockTTL, LoadTimeout: x.Timeouts.LoadTimeout,
			Trace: &singlefill.Trace{RedisError: x.redisError, LoadStart: x.loadStart, LoadDone: x.loadDone},
		})
		must(err)
		x.caches[name] = cache
	}
}

func (x *process) redisError(ctx context.Context, op string, err error) {
	if first := callOf(ctx); first != nil && (op == "store" || op == "release") {
		first.doubted.Store(true)
	}
	if x.User != "" && strings.HasPrefix(err.Error(), "NOPERM") {
		return // the semaphore of MaxFleetLoads needs scripts
	}
	x.trouble(op, err)
}

// A load is a Loader's call until its result is stored or refused.
type load struct {
	*call
	first *call // the call that started the load
}

type loadKey struct{}

func (x *process) loadStart(ctx context.Context, _ string) context.Context {
	l := &load{first: callOf(ctx)}
	return context.WithValue(ctx, loadKey{}, l)
}

func (x *process) loadDone(ctx context.Context, info singlefill.LoadInfo) {
	first := callOf(ctx)
	at := now()
	x.mu.Lock()
	defer x.mu.Unlock()
	done := x.loads[first]
	delete(x.loads, first)
	what := markProved
	// It does not matter which of several.
	if info.Unlocked || first.doubted.Load() || len(done) != 1 {
		what = markUnproved
	}
	for _, l := range done {
		x.sendLocked(l.marked(what, at))
	}
}

// finish ends this process' part of a history, once the results of all reported loads are known:
// each value that was returned comes from one of them. A load that begins later, after the last
// call, is not part of the history. So the check and the end are one step: otherwise a load could
// be reported that never ends.
func (x *process) finish(history int) {
	for !x.finished(history) {
		time.Sleep(time.Millisecond)
	}
}

func (x *process) finished(history int) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	for first := range x.loads {
		if first.history == history {
			return false
		}
	}
	x.sendLocked(report{History: history, Event: "done", Counts: x.newCountsLocked()})
	return true
}

// newCountsLocked returns what the caches have counted since it was called last. The caller holds
// mu.
func (x *process) newCountsLocked() map[string]int64 {
	counts := make(map[string]int64)
	for _, c := range x.caches {
		s := c.Stats()
		counts[countNearHits] += s.NearHits
		counts[countNearDrops] += s.NearDrops
	}
	changes := make(map[string]int64)
	for what, n := range counts {
		changes[what] = n - x.counted[what]
	}
	x.counted = counts
	return changes
}

// version returns the source's version, which is the number of its changes.
func (x *process) version(name string) int64 {
	v, err := x.source.LLen(context.Background(), name).Result()
	must(err)
	return v
}

var errSource = errors.New("the source is down")

func (x *process) loader(p plan) singlefill.Loader[int64] {
	return func(ctx context.Context, _ string) (int64, error) {
		l := ctx.Value(loadKey{}).(*load)
		l.call = x.newCall(p, opLoad)
		x.mu.Lock()
		x.loads[l.first] = append(x.loads[l.first], l.call)
		x.sendLocked(l.begun(opLoad, l.first.id, 0))
		x.mu.Unlock()

		v := x.version(p.Name)
		time.Sleep(rand.N(p.LoadTime + 1)) // the value becomes older on its way
		switch {
		case profiles[p.Of].failing && rand.IntN(4) == 0:
			l.end(op{Result: resultFailed})
			return 0, errSource
		case isAbsent(v):
			l.end(op{Result: resultAbsent, Value: v})
			return 0, singlefill.ErrNotFound
		}
		l.end(op{Result: resultOK, Value: v})
		return v, nil
	}
}

func (x *process) cacheThread(p plan) func(rng *rand.Rand, writer bool) {
	cache, load := x.caches[p.Of], x.loader(p)
	return func(rng *rand.Rand, writer bool) {
		n := rng.IntN(10)
		switch {
		case n >= 7 && (writer || !p.Sole):
			x.write(p, rng, cache)
		case n == 6:
			c := x.begin(p, opGet, 0, 0)
			v, err := cache.Get(c.context(), p.Name)
			x.endRead(c, v, singlefill.ValueInfo{}, err)
		default:
			c := x.begin(p, opGetOrLoad, 0, 0)
			ctx, cancel := c.context(), context.CancelFunc(func() {})
			if rng.IntN(10) == 0 {
				ctx, cancel = context.WithTimeout(ctx, upTo(rng, 2*p.LoadTime))
			}
			v, info, err := cache.GetOrLoadInfo(ctx, p.Name, load)
			x.endRead(c, v, info, err)
			cancel()
		}
	}
}

func (x *process) endRead(c *call, v int64, info singlefill.ValueInfo, err error) {
	var remote *singlefill.RemoteError
	o := op{Value: v, Stale: info.Stale, Fallback: info.Err != nil, Result: resultOK}
	switch {
	case err == nil:
	case err == singlefill.ErrNotFound:
		o.Result = resultAbsent
	case err == singlefill.ErrMiss:
		o.Result = resultMiss
	case errors.Is(err, context.DeadlineExceeded):
		o.Result = resultLeft
	default:
		o.Result, o.Error = resultFailed, err.Error()
		if err != errSource && !errors.As(err, &remote) {
			x.trouble("read", err)
		}
	}
	c.end(o)
}

// write changes the source, and then the cache.
func (x *process) write(p plan, rng *rand.Rand, cache *singlefill.Cache[int64]) {
	c := x.begin(p, opChange, 0, 0)
	v, err := x.source.RPush(context.Background(), p.Name, fmt.Sprintf("%d %d", p.Process, c.id)).Result()
	must(err)
	c.end(op{Value: v, Result: resultOK})

	var what string
	act := func(ctx context.Context) error { return cache.Delete(ctx, p.Name) }
	switch n := rng.IntN(6); {
	case n == 0:
		what, act = opExpire, func(ctx context.Context) error { return cache.Expire(ctx, p.Name) }
	case n <= 2 && p.Sole && !isAbsent(v):
		what, act = opSet, func(ctx context.Context) error { return cache.Set(ctx, p.Name, v) }
	default:
		what = opDelete
	}
	b := x.begin(p, what, c.id, v)
	o := op{Result: resultOK}
	if err := act(b.context()); err != nil {
		o.Result, o.Error = resultFailed, err.Error()
		x.trouble(what, err)
	}
	b.end(o)
}

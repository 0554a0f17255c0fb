package histories

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
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
		x.caches[name] = x.openCache(name, p)
	}
}

func (x *process) openCache(namespace string, p profile) *singlefill.Cache[int64] {
	var near *singlefill.Near
	if p.near {
		near = &singlefill.Near{MaxLag: x.Timeouts.MaxLag}
	}
	cache, err := singlefill.New(x.rdb, namespace, p.ttl, &singlefill.Options[int64]{
		StaleWhileRevalidate: p.swr, StaleIfError: p.sie, RetryAfter: 4 * time.Millisecond,
		MaxLoads: p.maxLoads, MaxFleetLoads: p.maxFleetLoads, Near: near,
		RedisTimeout: x.Timeouts.RedisTimeout, LockTTL: x.Timeouts.LockTTL, LoadTimeout: x.Timeouts.LoadTimeout,
		Trace: &singlefill.Trace{RedisError: x.redisError, LoadDone: x.loadDone},
	})
	must(err)
	return cache
}

// cacheOf returns the cache of a history. What a Clear removes is of this history only.
func (x *process) cacheOf(p plan) (cache *singlefill.Cache[int64], closes func()) {
	if !p.Clears {
		return x.caches[p.Of], func() {}
	}
	cache = x.openCache(p.Of+" "+p.Name, profiles[p.Of])
	return cache, func() {
		if err := cache.Close(); err != nil {
			x.trouble("Close", err)
		}
	}
}

func (x *process) redisError(ctx context.Context, op string, err error) {
	if op == "store" || op == "release" {
		for _, first := range callsOf(ctx) {
			first.doubted.Store(true)
		}
	}
	if x.User != "" && strings.HasPrefix(err.Error(), "NOPERM") {
		return // the semaphore of MaxFleetLoads needs scripts
	}
	x.trouble(op, err)
}

// calls are the ops of one call of a method, by key: one of each key.
type calls map[string]*call

type callsKey struct{}

func (c calls) inside(ctx context.Context) context.Context {
	return context.WithValue(ctx, callsKey{}, c)
}

func callsOf(ctx context.Context) calls {
	c, _ := ctx.Value(callsKey{}).(calls)
	return c
}

func (x *process) loadDone(ctx context.Context, info singlefill.LoadInfo) {
	first := callsOf(ctx)[info.Key]
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
	done := report{History: history, Event: "done"}
	for _, c := range x.caches {
		done.NearHits += c.Stats().NearHits
	}
	x.sendLocked(done)
	return true
}

// version returns the source's version, which is the number of its changes.
func (x *process) version(name string) int64 {
	v, err := x.source.LLen(context.Background(), name).Result()
	must(err)
	return v
}

var errSource = errors.New("the source is down")

// loader is manyLoader for one key.
func (x *process) loader(p plan) singlefill.Loader[int64] {
	load := x.manyLoader(p)
	return func(ctx context.Context, name string) (int64, error) {
		versions, err := load(ctx, []string{name})
		v, ok := versions[name]
		if err == nil && !ok {
			err = singlefill.ErrNotFound
		}
		return v, err
	}
}

// beginLoad reports a load of one key, which the call first has started.
func (x *process) beginLoad(p plan, first *call) *call {
	p.Key = first.key
	l := x.newCall(p, opLoad)
	x.mu.Lock()
	defer x.mu.Unlock()
	x.loads[first] = append(x.loads[first], l)
	x.sendLocked(l.begun(opLoad, first.id, 0))
	return l
}

func (x *process) cacheThread(p plan) (act func(rng *rand.Rand, writer bool), closes func()) {
	cache, closes := x.cacheOf(p)
	act = func(rng *rand.Rand, writer bool) {
		keys := rng.Perm(p.Keys)[:1+rng.IntN(p.Keys)]
		many := len(keys) > 1 || rng.IntN(8) == 0
		n := rng.IntN(10)
		switch {
		case n >= 7 && (writer || !p.Sole):
			x.write(p, rng, cache, keys, many)
		case n == 6 && many:
			x.getMany(p, cache, keys)
		case n == 6:
			p := p.at(keys[0])
			c := x.begin(p, opGet, 0, 0)
			v, err := cache.Get(calls{p.Name: c}.inside(context.Background()), p.Name)
			x.endRead(c, v, singlefill.ValueInfo{}, err)
		case many:
			ctx, cancel := x.callerContext(p, rng)
			x.getOrLoadMany(ctx, p, cache, keys)
			cancel()
		default:
			p := p.at(keys[0])
			ctx, cancel := x.callerContext(p, rng)
			c := x.begin(p, opGetOrLoad, 0, 0)
			v, info, err := cache.GetOrLoadInfo(calls{p.Name: c}.inside(ctx), p.Name, x.loader(p))
			x.endRead(c, v, info, err)
			cancel()
		}
	}
	return act, closes
}

// callerContext returns the context of a read. Some callers leave early.
func (x *process) callerContext(p plan, rng *rand.Rand) (context.Context, context.CancelFunc) {
	if rng.IntN(10) == 0 {
		return context.WithTimeout(context.Background(), upTo(rng, 2*p.LoadTime))
	}
	return context.Background(), func() {}
}

// endRead reports the outcome of one key.
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

// write changes the source of each key, and then the cache, by one call. It may be a call for many
// keys.
func (x *process) write(p plan, rng *rand.Rand, cache *singlefill.Cache[int64], keys []int, many bool) {
	changes, values, absent := make(map[int]*call), make(map[string]int64), false
	for _, key := range keys {
		p := p.at(key)
		c := x.begin(p, opChange, 0, 0)
		v, err := x.source.RPush(context.Background(), p.Name, fmt.Sprintf("%d %d", p.Process, c.id)).Result()
		must(err)
		c.end(op{Value: v, Result: resultOK})
		changes[key], values[p.Name] = c, v
		absent = absent || isAbsent(v)
	}

	what, names := opDelete, slices.Collect(maps.Keys(values))
	act := func(ctx context.Context) error { return cache.Delete(ctx, names...) }
	switch n := rng.IntN(6); {
	case p.Clears && rng.IntN(2) == 0:
		what, act = opClear, cache.Clear
		keys = rng.Perm(p.Keys)
	case n == 0:
		what, act = opExpire, func(ctx context.Context) error { return cache.Expire(ctx, names...) }
	case n <= 4 && p.Sole && !absent && many:
		what, act = opSetMany, func(ctx context.Context) error { return cache.SetMany(ctx, values) }
	case n <= 2 && p.Sole && !absent:
		what, act = opSet, func(ctx context.Context) error { return cache.Set(ctx, names[0], values[names[0]]) }
	}
	begun := make(calls)
	for _, key := range keys {
		p, of := p.at(key), 0
		if changes[key] != nil {
			of = changes[key].id
		}
		begun[p.Name] = x.begin(p, what, of, values[p.Name])
	}
	err := act(begun.inside(context.Background()))
	if err != nil {
		x.trouble(what, err)
	}
	for name, c := range begun {
		o := op{Result: resultOK}
		if err := errorOf(err, name); err != nil {
			o.Result, o.Error = resultFailed, err.Error()
		}
		c.end(o)
	}
}

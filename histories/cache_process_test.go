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
		if info.Fenced {
			x.sendLocked(l.marked(markRefused, at))
		}
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

func (x *process) cacheThread(p plan) func(rng *rand.Rand, writer bool) {
	cache := x.caches[p.Of]
	return func(rng *rand.Rand, writer bool) {
		keys := rng.Perm(p.Keys)[:1+rng.IntN(p.Keys)]
		many := len(keys) > 1 || rng.IntN(8) == 0
		switch n := rng.IntN(10); {
		case n >= 7 && (writer || !p.Sole):
			x.write(p, rng, cache, keys, many)
		case n == 6:
			x.get(p, cache, keys, many)
		default:
			ctx, cancel := context.Background(), func() {}
			if rng.IntN(10) == 0 { // a caller that leaves early
				ctx, cancel = context.WithTimeout(ctx, upTo(rng, 2*p.LoadTime))
			}
			x.getOrLoad(ctx, p, cache, keys, many)
			cancel()
		}
	}
}

// get calls Get or GetMany.
func (x *process) get(p plan, cache *singlefill.Cache[int64], keys []int, many bool) {
	if !many {
		c, name := x.beginKey(p, opGet, keys[0])
		v, err := cache.Get(calls{name: c}.inside(context.Background()), name)
		x.endRead(c, v, singlefill.ValueInfo{}, err)
		return
	}
	ops, names := x.beginKeys(p, opGetMany, keys)
	values, err := cache.GetMany(ops.inside(context.Background()), names)
	x.endReads(ops, values, err, singlefill.ErrMiss)
}

// getOrLoad calls GetOrLoadInfo or GetOrLoadMany.
func (x *process) getOrLoad(ctx context.Context, p plan, cache *singlefill.Cache[int64], keys []int, many bool) {
	load := x.loader(p)
	if !many {
		c, name := x.beginKey(p, opGetOrLoad, keys[0])
		v, info, err := cache.GetOrLoadInfo(calls{name: c}.inside(ctx), name, func(ctx context.Context, name string) (int64, error) {
			versions, err := load(ctx, []string{name})
			v, ok := versions[name]
			if err == nil && !ok {
				err = singlefill.ErrNotFound
			}
			return v, err
		})
		x.endRead(c, v, info, err)
		return
	}
	ops, names := x.beginKeys(p, opGetOrLoadMany, keys)
	values, err := cache.GetOrLoadMany(ops.inside(ctx), names, load)
	x.endReads(ops, values, err, singlefill.ErrNotFound)
}

// beginKey reports the op of a call that is about one key.
func (x *process) beginKey(p plan, name string, key int) (*call, string) {
	p = p.at(key)
	return x.begin(p, name, 0, 0), p.Name
}

// beginKeys reports the ops of a call for many keys: one of each key, with the begin and the end of the call.
func (x *process) beginKeys(p plan, name string, keys []int) (ops calls, names []string) {
	ops = make(calls)
	for _, key := range keys {
		c, name := x.beginKey(p, name, key)
		ops[name] = c
		names = append(names, name)
	}
	return ops, names
}

// endReads reports the outcome of each key. none is the outcome of a key that has neither a value
// nor an error.
func (x *process) endReads(ops calls, values map[string]int64, err, none error) {
	for name, c := range ops {
		v, ok := values[name]
		err := errorOf(err, name)
		if err == nil && !ok {
			err = none
		}
		x.endRead(c, v, singlefill.ValueInfo{}, err)
	}
}

// errorOf returns what the error of a call says of one key.
func errorOf(err error, name string) error {
	var many *singlefill.ManyError
	if errors.As(err, &many) {
		return many.Errs[name]
	}
	return err
}

// loader returns the ManyLoader of a history: the versions of the source, after a while.
func (x *process) loader(p plan) singlefill.ManyLoader[int64] {
	return func(ctx context.Context, names []string) (map[string]int64, error) {
		loads, versions := make(map[string]*call), make(map[string]int64)
		for _, name := range names {
			loads[name] = x.beginLoad(p, callsOf(ctx)[name])
		}
		for _, name := range names {
			versions[name] = x.version(name)
		}
		time.Sleep(rand.N(p.LoadTime + 1)) // the values become older on their way
		failed := profiles[p.Of].failing && rand.IntN(4) == 0
		for name, l := range loads {
			v := versions[name]
			switch {
			case failed:
				l.end(op{Result: resultFailed})
			case isAbsent(v):
				l.end(op{Result: resultAbsent, Value: v})
				delete(versions, name)
			default:
				l.end(op{Result: resultOK, Value: v})
			}
		}
		if failed {
			return nil, errSource
		}
		return versions, nil
	}
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
		c, name := x.beginKey(p, opChange, key)
		v, err := x.source.RPush(context.Background(), name, fmt.Sprintf("%d %d", p.Process, c.id)).Result()
		must(err)
		c.end(op{Value: v, Result: resultOK})
		changes[key], values[name] = c, v
		absent = absent || isAbsent(v)
	}

	what, names := opDelete, slices.Collect(maps.Keys(values))
	act := func(ctx context.Context) error { return cache.Delete(ctx, names...) }
	switch n := rng.IntN(6); {
	case n == 0:
		what, act = opExpire, func(ctx context.Context) error { return cache.Expire(ctx, names...) }
	case n <= 4 && p.Sole && !absent && many:
		what, act = opSetMany, func(ctx context.Context) error { return cache.SetMany(ctx, values) }
	case n <= 2 && p.Sole && !absent:
		what, act = opSet, func(ctx context.Context) error { return cache.Set(ctx, names[0], values[names[0]]) }
	}
	begun := make(calls)
	for key, change := range changes {
		p := p.at(key)
		begun[p.Name] = x.begin(p, what, change.id, values[p.Name])
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

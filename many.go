package singlefill

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/singlefill/singlefill/internal/bulk"
	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/event"
	"github.com/singlefill/singlefill/internal/fill"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/value"
	"github.com/singlefill/singlefill/internal/wait"
)

// A ManyLoader asks the source for the values of keys, at most [Options.MaxBatch] of them. The
// rules of a [Loader] hold. A key that it leaves out does not exist; the cache remembers that. An
// error is the outcome of each of the keys. If the map has a key that is not among keys, such as
// another spelling of one, those that it leaves out fail. No two values may share memory.
type ManyLoader[T any] func(ctx context.Context, keys []string) (map[string]T, error)

// GetOrLoadMany returns the values under keys: from Redis those that are there, the others from
// load, which gets them together. What [Cache.GetOrLoad] promises holds for each key by itself: it
// is loaded once for all callers of both methods, in all processes, and a Delete refuses its own
// key only.
//
// load gets the keys that this call could lock at once; then the call waits for those that others
// load. It never holds a lock while it waits for another one, so calls cannot lock each other out.
// Keys on a master of a Cluster that is slow to answer, and keys that are deleted while others load
// them, are loaded by another call of load.
//
// The map has what exists. Other errors come as a [*ManyError], beside the values of the other
// keys; when ctx ends, beside those that were found by then.
func (c *Cache[T]) GetOrLoadMany(ctx context.Context, keys []string, load ManyLoader[T]) (map[string]T, error) {
	if load == nil {
		return nil, errors.New("singlefill: load is nil")
	}
	found := make(valueMap[T], len(keys))
	err := c.engine.getOrLoadMany(ctx, keys, loadMany[T](load), found)
	return found.result(err)
}

// A collector takes the values of a call for many keys.
type collector interface{ put(key string, value any) }

type valueMap[T any] map[string]T

func (m valueMap[T]) put(key string, value any) { m[key] = *value.(*T) }

// result returns the values of a call that has begun.
func (m valueMap[T]) result(err error) (map[string]T, error) {
	if _, begun := err.(*ManyError); err != nil && !begun {
		return nil, err
	}
	return m, err
}

// A loadMany is a ManyLoader as the rooms call it, which do not know T.
type loadMany[T any] ManyLoader[T]

func (l loadMany[T]) LoadMany(ctx context.Context, keys []string) (bulk.Outcome, error) {
	values, err := l(ctx, slices.Clone(keys)) // it may change them
	left := ErrNotFound
	if stray, ok := strayKey(values, keys); ok {
		left = fmt.Errorf("singlefill: the ManyLoader was not asked for the key %.100q that it returned", stray)
	}
	return func(key string) (any, error) {
		if v, ok := values[key]; ok {
			return &v, nil
		}
		return nil, left
	}, err
}

// one is a ManyLoader that loads single keys.
type one struct{ fill.ManyLoader }

func (l one) Load(ctx context.Context, key string) (any, error) {
	outcome, err := l.LoadMany(ctx, []string{key})
	if err != nil {
		return nil, err
	}
	return outcome(key)
}

// strayKey returns the first key, in alphabetical order, that is in values and not in keys.
func strayKey[T any](values map[string]T, keys []string) (stray string, ok bool) {
	asked := make(map[string]bool, len(keys))
	for _, key := range keys {
		asked[key] = true
	}
	for key := range values {
		if !asked[key] && (!ok || key < stray) {
			stray, ok = key, true
		}
	}
	return stray, ok
}

func (c *engine) getOrLoadMany(ctx context.Context, keys []string, load fill.ManyLoader, into collector) error {
	outer := flight.LoadOf(ctx)
	m, err := c.newMany(ctx, keys, c.fills.Inside(outer))
	if err != nil {
		return err
	}
	m.load, m.outer, m.into = load, outer, into
	for asks := m.nearHits(); len(asks) > 0; {
		asks = m.waitAll(m.readAndJoin(asks))
	}
	return m.result()
}

// GetMany returns the values under keys that the cache has, as [Cache.Get] does for one key. A key
// that it does not have is not in the map. Keys that Redis could not be asked for, or not before
// ctx ended, have errors in a [*ManyError], beside the values that were found.
func (c *Cache[T]) GetMany(ctx context.Context, keys []string) (map[string]T, error) {
	found := make(valueMap[T], len(keys))
	return found.result(c.engine.getMany(ctx, keys, found))
}

func (c *engine) getMany(ctx context.Context, keys []string, into collector) error {
	m, err := c.newMany(ctx, keys, false)
	if err != nil {
		return err
	}
	m.into = into
	for part := range m.read(m.nearHits(), false) {
		for _, a := range part {
			switch {
			case a.RedisErr != nil:
				m.put(a.Key, a.Value, value.Wrap(ctx, "get", a.RedisErr))
			case !a.Hit():
				c.events.Miss(ctx, a.Key, event.ValueInfo{})
			default:
				m.hit(a)
			}
		}
	}
	return m.result()
}

// SetMany stores values, as [Cache.Set] does for each of them, in few round trips. Keys that may
// not have been stored have errors in a [*ManyError].
func (c *Cache[T]) SetMany(ctx context.Context, values map[string]T) error {
	return c.engine.setMany(ctx, slices.Collect(maps.Keys(values)), func(key string) any {
		v := values[key]
		return &v
	})
}

func (c *engine) setMany(ctx context.Context, keys []string, valueOf func(key string) any) error {
	m, err := c.newMany(ctx, keys, false)
	if err != nil {
		return err
	}
	if errs := c.sets.SetMany(ctx, m.keys, valueOf); len(errs) > 0 {
		return &ManyError{errs}
	}
	return nil
}

// A many is a call for many keys.
type many struct {
	*engine
	ctx   context.Context
	load  fill.ManyLoader
	outer *flight.Load // the load that makes the call, or nil
	keys  []string     // without duplicates

	into collector
	errs map[string]error // nil: none
}

func (c *engine) newMany(ctx context.Context, keys []string, nested bool) (*many, error) {
	if err := c.checkOpen(); err != nil && !nested {
		return nil, err
	}
	m := &many{engine: c, ctx: ctx, keys: make([]string, 0, len(keys))}
	seen := make(map[string]bool, len(keys))
	for _, key := range keys {
		if key == "" {
			return nil, ErrEmptyKey
		}
		if !seen[key] {
			seen[key] = true
			m.keys = append(m.keys, key)
		}
	}
	return m, ctx.Err()
}

// An ask is a key of a call that has no result yet.
type ask struct {
	value.Lookup
	node   int            // keys with the same number are on one server
	call   *flight.Caller // nil in the first round
	turn   flight.Turn[value.Lookup]
	shared bool // other calls may have the same lookup
	theirs bool // another call has read it
	waiter waiter
	joined time.Time   // the fill
	memory *value.Copy // what memory has, if it is to be refreshed
}

// nearHits delivers what memory has, and returns the other keys.
func (m *many) nearHits() (asks []*ask) {
	var due []*ask
	all := make([]ask, len(m.keys)) // one allocation
	asks = make([]*ask, 0, len(m.keys))
	for i, key := range m.keys {
		a := &all[i]
		a.Key = key
		served, ok := m.store.FromMemory(m.ctx, key)
		if !ok {
			asks = append(asks, a)
			continue
		}
		m.put(key, served.Value, served.Err)
		switch {
		case m.load == nil: // GetMany
		case served.TakeRefresh():
			a.memory = served.Copy
			due = append(due, a)
		case m.audited(!served.Info.Stale):
			m.auditNear(m.ctx, key, one{m.load}, &served)
		}
	}
	if len(due) > 0 {
		m.refreshNearAll(due)
	}
	return asks
}

// readAndJoin reads keys and delivers what it finds. For the others it joins fills, or starts them.
// It returns those.
func (m *many) readAndJoin(asks []*ask) (joined []*ask) {
	var read, misses, due []*ask
	m.locate(asks)
	for _, a := range asks {
		if m.fills.Filling(a.Key) {
			misses = append(misses, a)
		} else {
			read = append(read, a)
		}
	}
	joined = m.joinAll(misses)
	misses = nil
	for part := range m.read(read, true) {
		for _, a := range part {
			switch {
			case a.RedisErr != nil && m.ctx.Err() != nil:
				m.fail(a.Key, m.ctx.Err())
			case a.Hit():
				m.hit(a)
				if !a.theirs && m.store.Due(&a.Lookup) {
					due = append(due, a)
				} else if m.audited(a.Freshness == value.Fresh) {
					m.auditHit(m.ctx, a.Key, one{m.load}, &a.Lookup)
				}
			default:
				misses = append(misses, a)
			}
		}
		if part == nil { // the next one is slow to come
			joined = append(joined, m.joinAll(misses)...)
			misses = nil
		}
	}
	joined = append(joined, m.joinAll(misses)...)
	m.refreshAll(due)
	return joined
}

// read reads keys, in a pipeline for each part of them: a few hundred on one server. It yields the
// parts as they come, and nil once if the next one is slow to come. With again, what Redis does not
// answer is read again, for RedisTimeout in all.
func (m *many) read(asks []*ask, again bool) func(yield func([]*ask) bool) {
	return func(yield func([]*ask) bool) {
		var parts [][]*ask
		for _, group := range m.locate(asks) {
			parts = slices.AppendSeq(parts, slices.Chunk(group, client.Batch))
		}
		if len(parts) == 1 {
			m.readPart(parts[0], again)
			yield(parts[0])
			return
		}
		done := make(chan []*ask, len(parts))
		for _, part := range parts {
			go func() {
				m.readPart(part, again)
				done <- part
			}()
		}
		var slow <-chan time.Time
		for n := len(parts); n > 0; {
			select {
			case part := <-done:
				n--
				yield(part)
				slow = time.After(bulk.Gather)
			case <-slow:
				yield(nil)
			}
		}
	}
}

// locate finds out which keys are on one server.
func (m *many) locate(asks []*ask) (groups [][]*ask) {
	groups = client.ByNode(m.client, asks, func(a *ask) string { return m.store.Key(a.Key) })
	for node, group := range groups {
		for _, a := range group {
			a.node = node
		}
	}
	return groups
}

// readPart reads the keys of one node. It shares their reads with other calls of this process: it
// reads at once what no other call is reading, and what is left when that is over, if no other call
// has read it by then.
func (m *many) readPart(part []*ask, again bool) {
	if !again { // GetMany, which like Get shares nothing
		m.getAll(part)
		return
	}
	var mine, others []*ask
	for _, a := range part {
		if a.turn = m.reads.Arrive(a.Key); a.turn.Arrived == 0 {
			mine = append(mine, a)
		} else {
			others = append(others, a)
		}
	}
	for {
		m.takeTurns(mine)
		if len(others) == 0 {
			return
		}
		mine, others = m.awaitTurns(others)
	}
}

// awaitTurns waits until the first of asks has its turn or has been read, and returns those that have
// their turns by then, and those that still wait.
func (m *many) awaitTurns(asks []*ask) (mine, others []*ask) {
	for i, a := range asks {
		var found *value.Lookup
		over := true
		if i == 0 {
			var err error
			if a.turn, found, err = a.turn.Wait(m.ctx); err != nil {
				a.RedisErr = err
				for _, a := range asks[1:] {
					a.turn.Leave()
					a.RedisErr = err
				}
				return nil, nil
			}
		} else {
			found, over = a.turn.Try()
		}
		switch {
		case !over:
			others = append(others, a)
		case found != nil:
			a.Lookup, a.shared, a.theirs = *found, true, true
		default:
			mine = append(mine, a)
		}
	}
	return mine, others
}

// takeTurns reads keys until Redis answers, for RedisTimeout in all. What has a fill by now is not
// read.
func (m *many) takeTurns(asks []*ask) {
	ended := false
	defer func() {
		for _, a := range asks {
			if !ended || m.ctx.Err() != nil && a.RedisErr != nil { // another call of the batch reads
				a.turn.End(nil)
			} else {
				a.shared = a.turn.End(&a.Lookup) && m.values.Clone != nil
			}
		}
	}()
	var left []*ask
	for _, a := range asks {
		if !m.fills.Filling(a.Key) {
			left = append(left, a)
		}
	}
	for pause := wait.MinPause; len(left) > 0; pause *= 2 {
		m.getAll(left)
		left = slices.DeleteFunc(left, func(a *ask) bool { return a.RedisErr == nil })
		if len(left) == 0 {
			break
		}
		if first := left[0]; !m.store.ReadAgain(m.ctx, &first.Lookup, pause) {
			for _, a := range left {
				a.Asked = first.Asked
				m.store.Recall(&a.Lookup)
			}
			break
		}
	}
	ended = true
}

// getAll reads keys in one pipeline.
func (m *many) getAll(asks []*ask) {
	all := make([]*value.Lookup, len(asks))
	for i, a := range asks {
		all[i] = &a.Lookup
	}
	m.store.GetMany(m.ctx, all)
}

// joinAll joins the fills of keys. The fills that it starts load in bulk.
func (m *many) joinAll(misses []*ask) (joined []*ask) {
	for chunk := range slices.Chunk(misses, m.opts.maxBatch) {
		b := m.filler.NewBulk(m.load, m.outer, len(chunk))
		for _, a := range chunk {
			var err error
			a.waiter, err = m.join(m.ctx, a.Key, nil, a.call, a.turn.Arrived, &a.Lookup, b.Seat(a.node))
			a.joined = time.Now()
			b.Taken(a.node, err == nil && a.waiter.First)
			if err != nil {
				m.fail(a.Key, err)
				continue
			}
			joined = append(joined, a)
		}
		b.Depart()
	}
	return joined
}

// waitAll waits for fills, delivers their results, and returns those whose results are older than the
// call.
func (m *many) waitAll(joined []*ask) (again []*ask) {
	for _, a := range joined {
		miss := &miss{a.waiter, &a.Lookup, a.from(), a.joined}
		patience, cancel := m.patience(m.ctx, miss)
		r, verdict := m.fills.Wait(patience, miss.waiter)
		cancel()
		v, _, err, over := m.settle(m.ctx, a.Key, miss, r, verdict, patience.Err())
		if over {
			m.put(a.Key, v, err)
		} else {
			again = append(again, &ask{Lookup: value.Lookup{Key: a.Key}, call: a.waiter.Caller})
		}
	}
	return again
}

// refreshAll refreshes entries in the background, in bulk.
func (m *many) refreshAll(due []*ask) {
	if len(due) == 0 || m.checkOpen() != nil {
		return
	}
	ctx := client.Detach(m.ctx)
	for chunk := range slices.Chunk(due, m.opts.maxBatch) {
		b := m.filler.NewBulk(m.load, nil, len(chunk))
		for _, a := range chunk {
			b.Taken(a.node, m.filler.Refresh(ctx, a.Key, a.Data, fill.Source{Seat: b.Seat(a.node)}))
		}
		b.Depart()
	}
}

// refreshNearAll refreshes entries that memory has, unless another process has refreshed them.
func (m *many) refreshNearAll(due []*ask) {
	background := &many{engine: m.engine, ctx: client.Detach(m.ctx), load: m.load}
	m.fills.Go(func() {
		var old []*ask
		for part := range background.read(due, true) {
			for _, a := range part {
				if !a.memory.Outlived(&a.Lookup) {
					old = append(old, a)
				}
			}
		}
		background.refreshAll(old)
	})
}

// from tells what the call may do with the value that a read has found.
func (a *ask) from() origin {
	return origin{own: !a.shared, shared: a.theirs}
}

// hit delivers what a read has found.
func (m *many) hit(a *ask) {
	from := a.from()
	from.hit = true
	v, _, err := m.deliver(m.ctx, a.Key, &a.Found, from)
	m.put(a.Key, v, err)
}

// put sets the result of a key.
func (m *many) put(key string, v any, err error) {
	switch {
	case err == nil:
		m.into.put(key, v)
	case isNotFound(err):
	default:
		m.fail(key, err)
	}
}

func (m *many) fail(key string, err error) {
	if m.errs == nil {
		m.errs = make(map[string]error)
	}
	m.errs[key] = err
}

func (m *many) result() error {
	if m.errs == nil {
		return nil
	}
	return &ManyError{m.errs}
}

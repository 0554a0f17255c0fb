package read

import (
	"context"
	"slices"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/event"
	"github.com/singlefill/singlefill/internal/fill"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/value"
)

// A Collector takes the values of a call for many keys.
type Collector interface{ Put(key string, value any) }

// A many is a call for many keys.
type many struct {
	*Reader
	ctx   context.Context
	load  fill.ManyLoader // nil: GetMany
	outer *flight.Load    // the load that makes the call, or nil
	keys  []string        // without duplicates

	into Collector
	errs map[string]error // nil: none
}

// GetOrLoadMany is GetOrLoad for keys, which have no duplicates. It returns the errors of keys that have one.
func (c *Reader) GetOrLoadMany(ctx context.Context, keys []string, load fill.ManyLoader, into Collector) map[string]error {
	m := &many{Reader: c, ctx: ctx, keys: keys, load: load, outer: flight.LoadOf(ctx), into: into}
	for asks := m.nearHits(); len(asks) > 0; {
		asks = m.waitAll(m.readAndJoin(asks))
	}
	return m.errs
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

// GetMany is Get for keys, which have no duplicates. It returns the errors of keys that have one.
func (c *Reader) GetMany(ctx context.Context, keys []string, into Collector) map[string]error {
	m := &many{Reader: c, ctx: ctx, keys: keys, into: into}
	for part := range m.read(m.nearHits(), false) {
		for _, a := range part {
			switch {
			case a.RedisErr != nil:
				m.fail(a.Key, value.Wrap(ctx, "get", a.RedisErr))
			case !a.Hit():
				c.Events.Miss(ctx, a.Key, event.ValueInfo{})
			default:
				m.hit(a)
			}
		}
	}
	return m.errs
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
		served, ok := m.Store.FromMemory(m.ctx, key)
		if !ok {
			asks = append(asks, a)
			continue
		}
		m.put(key, answer{value: served.Value, err: served.Err})
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
		if m.Fills.Filling(a.Key) {
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
				if !a.theirs && m.Store.Due(&a.Lookup) {
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

// joinAll joins the fills of keys. The fills that it starts load in bulk.
func (m *many) joinAll(misses []*ask) (joined []*ask) {
	for chunk := range slices.Chunk(misses, m.MaxBatch) {
		b := m.Filler.NewBulk(m.load, m.outer, len(chunk))
		for _, a := range chunk {
			var err error
			a.waiter, err = m.join(m.ctx, fill.Source{Seat: b.Seat(a.node)}, a.call, a.turn.Arrived, &a.Lookup)
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
		r, verdict := m.Fills.Wait(patience, miss.waiter)
		cancel()
		if answer, over := m.settle(m.ctx, miss, r, verdict, patience.Err()); over {
			m.put(a.Key, answer)
		} else {
			again = append(again, &ask{Lookup: value.Lookup{Key: a.Key}, call: a.waiter.Caller})
		}
	}
	return again
}

// refreshAll refreshes entries in the background, in bulk.
func (m *many) refreshAll(due []*ask) {
	if len(due) == 0 {
		return
	}
	ctx := client.Detach(m.ctx)
	for chunk := range slices.Chunk(due, m.MaxBatch) {
		b := m.Filler.NewBulk(m.load, nil, len(chunk))
		for _, a := range chunk {
			b.Taken(a.node, m.Filler.Refresh(ctx, a.Key, a.Data, fill.Source{Seat: b.Seat(a.node)}))
		}
		b.Depart()
	}
}

// refreshNearAll refreshes entries that memory has, unless another process has refreshed them.
func (m *many) refreshNearAll(due []*ask) {
	background := &many{Reader: m.Reader, ctx: client.Detach(m.ctx), load: m.load}
	m.Fills.Go(func() {
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
	m.put(a.Key, m.deliver(m.ctx, a.Key, &a.Found, from))
}

// put sets the result of a key.
func (m *many) put(key string, a answer) {
	switch {
	case a.err == nil:
		m.into.Put(key, a.value)
	case m.User.IsNotFound(a.err):
	default:
		m.fail(key, a.err)
	}
}

func (m *many) fail(key string, err error) {
	if m.errs == nil {
		m.errs = make(map[string]error)
	}
	m.errs[key] = err
}

// Package read is what a call does: it looks for values in memory and in Redis, joins the fills of the keys that have
// none, waits for them, and chooses between their results and old values. A call for one key is one for many whose
// list has one.
package read

import (
	"context"
	"errors"
	"sync"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/event"
	"github.com/singlefill/singlefill/internal/fill"
	"github.com/singlefill/singlefill/internal/value"
)

// ErrMiss is the public error of this name.
var ErrMiss = errors.New("singlefill: miss")

// GetOrLoad finds a value, or has it loaded. It describes the value in info, unless that is nil.
//
// The frames of a call that waits for a fill fit into a stack of 4 KB: what needs more is in functions that return
// before the call waits, and that are not inlined. BenchmarkQueued shows it.
func (c *Reader) GetOrLoad(ctx context.Context, key string, load fill.Loader, info *event.ValueInfo) (any, error) {
	if v, err, ok := c.answerFromMemory(ctx, key, load, info); ok {
		return v, err
	}
	m := c.newSingle(ctx, key, load, info)
	m.run(m.asks[:])
	return m.end()
}

// answerFromMemory returns false if memory does not answer. It refreshes or audits in the background what memory has.
//
//go:noinline
func (c *Reader) answerFromMemory(ctx context.Context, key string, load fill.Loader, info *event.ValueInfo) (any, error, bool) {
	v, served, ok := c.Store.FromMemory(ctx, key)
	if !ok {
		return nil, nil, false
	}
	if served.TakeRefresh() {
		a := &ask{memory: served.Copy}
		a.Key = key
		c.newCall(client.Detach(ctx), load).refreshMemory([]*ask{a})
	} else if c.audited(!served.Stale()) {
		c.auditNear(ctx, key, load, served)
	}
	if info != nil {
		*info = served.Info()
	}
	return v, served.Err(), true
}

// A single is a call for one key. It is used again unless it has joined a fill: until then only its goroutine knows it.
// With 64 goroutines that get one key, a new one for each hit takes a tenth of the time.
type single struct {
	call
	ask  ask
	asks [1]*ask
}

var singles = sync.Pool{New: func() any { return new(single) }}

//go:noinline
func (c *Reader) newSingle(ctx context.Context, key string, load fill.Loader, info *event.ValueInfo) *single {
	m := singles.Get().(*single)
	m.call = call{Reader: c, ctx: ctx, load: load, info: info}
	m.ask.reset(key)
	m.asks[0] = &m.ask
	return m
}

//go:noinline
func (m *single) end() (v any, err error) {
	v, err = m.ask.value, m.ask.err
	if !m.caller.Joined() {
		*m = single{}
		singles.Put(m)
	}
	return v, err
}

// GetOrLoadMany is GetOrLoad for keys, which have no duplicates. It returns the errors of keys that have one.
func (c *Reader) GetOrLoadMany(ctx context.Context, keys []string, load fill.Loader, into Collector) map[string]error {
	m := c.newCall(ctx, load)
	asks := newAsks(keys)
	misses, due := m.lookInMemory(asks)
	if len(due) > 0 {
		background := *m
		background.ctx = client.Detach(ctx)
		background.refreshMemory(due)
	}
	m.run(misses)
	return m.collect(asks, into)
}

// Refresh has a key loaded, also if it holds a fresh value.
func (c *Reader) Refresh(ctx context.Context, key string, load fill.Loader) error {
	return c.newCall(ctx, load).loadAnew([]string{key})[key]
}

// RefreshMany is Refresh for keys, which have no duplicates. It returns the errors of keys that have one.
func (c *Reader) RefreshMany(ctx context.Context, keys []string, load fill.Loader) map[string]error {
	return c.newCall(ctx, load).loadAnew(keys)
}

// loadAnew waits for loads of keys that end after it was called. What has been in flight before counts, so that
// calls at the same time share loads.
func (c *call) loadAnew(keys []string) map[string]error {
	c.anew = true
	asks := newAsks(keys)
	c.run(asks)
	var stored, unsure []string
	var why error
	errs := make(map[string]error)
	for _, a := range asks {
		if a.err == nil {
			stored = append(stored, a.Key)
			continue
		}
		errs[a.Key] = a.err
		if a.mayBeStored() {
			unsure, why = append(unsure, a.Key), a.err
		}
	}
	_ = c.Filler.Keys.Replaced(c.ctx, unsure, why)
	if err := c.Filler.Keys.Replaced(c.ctx, stored, nil); err != nil {
		for _, key := range stored {
			errs[key] = value.Wrap(c.ctx, "refresh", err)
		}
	}
	return errs
}

// Get looks for a value. It waits for no load, and begins none.
func (c *Reader) Get(ctx context.Context, key string) (any, error) {
	a := new(ask)
	a.Key = key
	c.get(ctx, []*ask{a})
	return a.value, a.err
}

// GetMany is Get for keys, which have no duplicates. It returns the errors of keys that have one.
func (c *Reader) GetMany(ctx context.Context, keys []string, into Collector) map[string]error {
	asks := newAsks(keys)
	c.get(ctx, asks)
	for _, a := range asks {
		if a.err == ErrMiss {
			a.err = value.ErrNotFound // for this call both are absent
		}
	}
	return c.newCall(ctx, nil).collect(asks, into)
}

func (c *Reader) get(ctx context.Context, asks []*ask) {
	m := c.newCall(ctx, nil)
	misses, _ := m.lookInMemory(asks)
	look(misses)
	m.inParts(misses, func(part []*ask) { c.Store.Get(ctx, lookups(part)) })
	for _, a := range misses {
		switch {
		case a.RedisErr != nil:
			a.err = value.Wrap(ctx, "get", a.RedisErr)
		case !a.Hit():
			c.Events.Miss(ctx, a.Key, event.ValueInfo{})
			a.err = ErrMiss
		default:
			a.by = self
			m.hit(a)
		}
	}
}

// A Collector takes the values of a call for many keys.
type Collector interface{ Put(key string, value any) }

// collect hands over the values of a call for many keys, and returns the errors. A value that does not exist is
// neither.
func (c *call) collect(asks []*ask, into Collector) (errs map[string]error) {
	for _, a := range asks {
		switch {
		case a.err == nil:
			into.Put(a.Key, a.value)
		case c.User.IsNotFound(a.err):
		default:
			if errs == nil {
				errs = make(map[string]error)
			}
			errs[a.Key] = a.err
		}
	}
	return errs
}

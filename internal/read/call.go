package read

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/event"
	"github.com/singlefill/singlefill/internal/fill"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/value"
)

// A call is a running call of GetOrLoad or GetOrLoadMany.
type call struct {
	*Reader
	ctx    context.Context
	load   fill.Loader      // of several keys, if the call is for several
	anew   bool             // load also what is fresh: see Refresh
	info   *event.ValueInfo // is to describe the value of a single key; nil: the caller does not ask
	caller flight.Caller
	asks   []*ask // that memory has not answered
}

func (c *Reader) newCall(ctx context.Context, load fill.Loader) *call {
	return &call{Reader: c, ctx: ctx, load: load}
}

// in returns the asks in a state.
func (c *call) in(s state) []*ask { return those(c.asks, func(a *ask) bool { return a.state == s }) }

// lookInMemory answers what memory has. It returns the other asks, and the asks of which memory wants a newer value.
func (c *call) lookInMemory(asks []*ask) (misses, due []*ask) {
	for _, a := range asks {
		v, served, ok := c.Store.FromMemory(c.ctx, a.Key)
		if !ok {
			misses = append(misses, a)
			continue
		}
		a.value, a.err = v, served.Err()
		switch {
		case c.load == nil: // Get
		case served.TakeRefresh():
			a.memory = served.Copy
			due = append(due, a)
		case c.audited(!served.Stale()):
			c.auditNear(c.ctx, a.Key, c.load, served)
		}
	}
	return misses, due
}

// run answers asks. A fill whose result is older than the call sends its ask back to the beginning.
func (c *call) run(asks []*ask) {
	if len(asks) == 0 {
		return
	}
	defer c.leave()
	c.asks = asks
	c.caller = flight.Caller{Outer: flight.LoadOf(c.ctx), Stamp: c.Fills.Now()}
	for again := true; again; again = c.wait() {
		if c.anew {
			c.joinAnew()
		} else {
			c.readAndJoin()
		}
		c.answerHits()
	}
}

// readAndJoin reads keys. For those that it does not find it joins fills, or starts them.
//
// It does not read a key whose fill found it empty: a cold herd would send GETs for as long as the load takes. If the
// key held an old value, it reads, since that is what it falls back to at its deadline. It joins before it gives its
// turns to others, who then meet the fills in place of reading again.
func (c *call) readAndJoin() {
	asks := c.in(missed)
	defer c.reads.End(asks) // which are left if a function of Trace panics
	unread := c.notFilling(asks)
	for _, a := range unread {
		a.state = reading
	}
	if len(unread) < len(asks) {
		c.join()
	}
	c.read(unread)
	c.join()
}

// joinAnew joins fills that replace what the keys hold. What is read tells them what that is. The reads may be old:
// see newSince in package fill.
func (c *call) joinAnew() {
	asks := c.in(missed)
	c.readAll(asks)
	for _, a := range asks {
		if a.RedisErr != nil {
			a.state, a.err = answered, cmp.Or(c.ctx.Err(), value.Wrap(c.ctx, "refresh", a.RedisErr))
		}
	}
	c.join()
}

// notFilling returns asks without those whose fills found their keys empty.
func (c *call) notFilling(asks []*ask) (others []*ask) {
	is := c.Fills.Filling(len(asks), func(i int) string { return asks[i].Key })
	if is == nil {
		return asks
	}
	for i, a := range asks {
		if !is[i] {
			others = append(others, a)
		}
	}
	return others
}

// take takes what has been read. It ends the turns of all but the misses, whose turns end when the call has joined.
// It reports whether there are misses.
func (c *call) take(read []*ask) (misses bool) {
	for _, a := range read {
		switch {
		case a.Hit():
			a.state = found
		case a.RedisErr != nil && c.ctx.Err() != nil:
			a.state, a.err = answered, c.ctx.Err()
		default:
			a.state = missed
		}
	}
	over := those(read, func(a *ask) bool { return a.state != missed })
	c.reads.End(over)
	return len(over) < len(read)
}

// join joins the fills of what the call has missed. Those that it starts load together.
func (c *call) join() {
	misses := c.in(missed)
	if len(misses) == 0 {
		return
	}
	for group := range slices.Chunk(misses, c.MaxBatch) {
		all := make([]flight.Waiter[fill.Result], len(group))
		for i, a := range group {
			a.wait = &all[i]
			a.wait.Key, a.wait.Empty = a.Key, a.RedisErr == nil && a.Freshness == value.Expired
			if w := a.wait; c.anew {
				w.Takes = func(r *fill.Result) bool {
					return r.Failed || r.Err == flight.ErrClosed || w.Before(r.NewSince)
				}
			} else if c.StaleAfter > 0 && c.Store.Servable(&a.Found, time.Now()) {
				a.wait.Patience = c.StaleAfter
			}
		}
		c.Filler.Join(c.ctx, &c.caller, waits(group), func(i int) *value.Lookup {
			if len(c.asks) == 1 {
				return group[i].Lookup
			}
			return new(*group[i].Lookup) // the fill must not keep what the call has read of other keys
		}, fill.Source{Loader: c.load, Anew: c.anew})
		for _, a := range group {
			if a.state, a.err = joined, a.wait.Err; a.err != nil {
				a.state = answered
			}
		}
	}
	c.reads.End(misses)
}

// answerHits answers with what has been read. The call holds no turns any more: Trace may call the cache.
func (c *call) answerHits() {
	var due []*ask
	for _, a := range c.in(found) {
		a.state = answered
		c.hit(a)
		if a.by == self && c.Store.Due(a.Lookup) {
			due = append(due, a)
		} else if c.audited(a.Freshness == value.Fresh) {
			c.auditHit(c.ctx, a.Key, c.load, a.Lookup)
		}
	}
	c.refresh(due)
}

// wait waits for fills and answers with their results. It returns true as soon as asks are to begin again, whose
// results are older than the call: each key has the time of the call, whatever the other keys take. Otherwise all are
// answered.
func (c *call) wait() (again bool) {
	for waiting := c.waits(); len(waiting) > 0 && !again; waiting = c.waits() {
		c.Fills.Wait(c.ctx, &c.caller, waiting)
		again = c.settleAll()
	}
	return again
}

// settleAll answers the asks whose waits are over, or sends them back to the beginning. It reports whether there are
// such.
func (c *call) settleAll() (again bool) {
	for _, a := range c.in(joined) {
		switch {
		case a.wait.Verdict == flight.Waiting:
		case c.settle(a):
			a.state = answered
		default:
			a.reset(a.Key)
			again = true
		}
	}
	return again
}

// waits returns the waits of the asks that have joined fills.
//
//go:noinline
func (c *call) waits() []*flight.Waiter[fill.Result] { return waits(c.in(joined)) }

// leave leaves the fills that the call has joined, if it has not waited for them since a function of Trace panicked.
func (c *call) leave() {
	left := those(c.asks, func(a *ask) bool { return a.state == joined && a.wait.Verdict == flight.Waiting })
	if len(left) > 0 {
		ended, cancel := context.WithCancel(context.Background())
		cancel()
		c.Fills.Wait(ended, &c.caller, waits(left))
	}
}

// refresh refreshes entries in the background.
func (c *call) refresh(due []*ask) {
	if len(due) > 0 {
		c.Filler.Refresh(client.Detach(c.ctx), lookups(due), fill.Source{Loader: c.load})
	}
}

// refreshMemory refreshes entries that memory has, unless another process has refreshed them: then it only reads
// the new ones.
func (c *call) refreshMemory(due []*ask) {
	c.Fills.Go(func() {
		c.readAll(due)
		c.refresh(slices.DeleteFunc(due, func(a *ask) bool { return a.Outlives(a.memory) }))
	})
}

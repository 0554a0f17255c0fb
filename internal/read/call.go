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
	"github.com/singlefill/singlefill/internal/near"
	"github.com/singlefill/singlefill/internal/value"
)

// A call is a running call of GetOrLoad or GetOrLoadMany.
type call struct {
	*Reader
	ctx    context.Context
	load   fill.Loader      // of several keys, if the call is for several
	anew   bool             // load also what is fresh: see Refresh
	info   *event.ValueInfo // is to describe the value of a single key; nil: nobody asks
	caller flight.Caller

	// In one round:
	hits   []*ask // to be answered
	misses []*ask // to be joined
	joined []*ask // to be waited for; those of earlier rounds, too
}

func (c *Reader) newCall(ctx context.Context, load fill.Loader) *call {
	return &call{Reader: c, ctx: ctx, load: load}
}

// An ask is a key of a call.
type ask struct {
	Key           string
	*value.Lookup // what a read has found under the key
	turn          flight.Turn[value.Lookup]
	mine          bool                        // the call has read the key
	theirs        bool                        // another call has
	delegated     bool                        // another goroutine has, for this call and others
	replied       bool                        // see replyRest
	wait          *flight.Waiter[fill.Result] // nil: the call has joined no fill
	memory        *near.Copy                  // what memory has, if it is to be refreshed

	value any // which the call returns, or err
	err   error
}

func newAsks(keys []string) []*ask {
	all, asks := make([]ask, len(keys)), make([]*ask, len(keys)) // two allocations
	for i, key := range keys {
		asks[i] = &all[i]
		asks[i].reset(key)
	}
	return asks
}

// nothing is what a call has found that has not looked.
var nothing value.Lookup

func (a *ask) reset(key string) {
	*a = ask{}
	a.Key, a.Lookup = key, &nothing
}

// look gives asks that are to be read something to read into.
func look(asks []*ask) {
	all := make([]value.Lookup, len(asks))
	for i, a := range asks {
		all[i].Key = a.Key
		a.Lookup = &all[i]
	}
}

func lookups(asks []*ask) []*value.Lookup {
	all := make([]*value.Lookup, len(asks))
	for i, a := range asks {
		all[i] = a.Lookup
	}
	return all
}

func waits(asks []*ask) []*flight.Waiter[fill.Result] {
	all := make([]*flight.Waiter[fill.Result], len(asks))
	for i, a := range asks {
		all[i] = a.wait
	}
	return all
}

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
	c.caller = flight.Caller{Outer: flight.LoadOf(c.ctx), Stamp: c.Fills.Now()}
	for len(asks) > 0 {
		if c.anew {
			c.joinAnew(asks)
		} else {
			c.readAndJoin(asks)
		}
		c.answerHits()
		asks = c.wait()
	}
}

// readAndJoin reads keys. For those that it does not find it joins fills, or starts them.
//
// It does not read a key whose fill found it empty: a cold herd would send GETs for as long as the load takes. If the
// key held an old value, it reads, since that is what it falls back to at its deadline. It joins before it gives its turns to others, who then meet the
// fills in place of reading again.
func (c *call) readAndJoin(asks []*ask) {
	defer c.Reads.End(len(asks), turns(asks)) // which are left if a function of Trace panics
	unread, filling := c.notFilling(asks)
	c.misses = filling
	c.join()
	c.read(unread)
	c.join()
}

// joinAnew joins fills that replace what the keys hold. What is read tells them what that is. The reads may be old:
// see newSince in package fill.
func (c *call) joinAnew(asks []*ask) {
	c.readAll(asks)
	for _, a := range asks {
		if a.RedisErr != nil {
			a.err = cmp.Or(c.ctx.Err(), value.Wrap(c.ctx, "refresh", a.RedisErr))
			continue
		}
		c.misses = append(c.misses, a)
	}
	c.join()
}

// notFilling returns asks without those whose fills found their keys empty.
func (c *call) notFilling(asks []*ask) (unread, filling []*ask) {
	is := c.Fills.Filling(len(asks), func(i int) string { return asks[i].Key })
	if is == nil {
		return asks, nil
	}
	for i, a := range asks {
		if is[i] {
			filling = append(filling, a)
		} else {
			unread = append(unread, a)
		}
	}
	return unread, filling
}

// take sorts what has been read. It ends the turns of all but the misses, whose turns end when the call has joined.
func (c *call) take(read []*ask) {
	hits, others := split(read, func(a *ask) bool { return a.Hit() })
	gone, misses := split(others, func(a *ask) bool { return a.RedisErr != nil && c.ctx.Err() != nil })
	c.Reads.End(len(hits), turns(hits))
	c.Reads.End(len(gone), turns(gone))
	for _, a := range gone {
		a.err = c.ctx.Err()
	}
	c.hits, c.misses = both(c.hits, hits), both(c.misses, misses)
}

// both returns asks and more, without an allocation if there are no asks.
func both(asks, more []*ask) []*ask {
	if len(asks) == 0 {
		return more
	}
	return append(slices.Clip(asks), more...)
}

// answerHits answers with what has been read. The call holds no turns any more: Trace may call the cache.
func (c *call) answerHits() {
	var due []*ask
	for _, a := range c.hits {
		c.hit(a)
		if a.mine && c.Store.Due(a.Lookup) {
			due = append(due, a)
		} else if c.audited(a.Freshness == value.Fresh) {
			c.auditHit(c.ctx, a.Key, c.load, a.Lookup)
		}
	}
	c.hits = nil
	c.refresh(due)
}

// split returns the asks for which is returns true, and the others.
func split(asks []*ask, is func(*ask) bool) (yes, no []*ask) {
	for i, a := range asks {
		if is(a) != is(asks[0]) {
			yes, no = slices.Clip(asks[:i]), nil
			if !is(asks[0]) {
				yes, no = no, yes
			}
			for _, a := range asks[i:] {
				if is(a) {
					yes = append(yes, a)
				} else {
					no = append(no, a)
				}
			}
			return yes, no
		}
	}
	if len(asks) > 0 && !is(asks[0]) {
		return nil, asks
	}
	return asks, nil // mostly all are equal
}

// join joins the fills of what the call has missed. Those that it starts load together.
func (c *call) join() {
	for group := range slices.Chunk(c.misses, c.MaxBatch) {
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
		c.Filler.Join(c.ctx, &c.caller, waits(group), lookups(group), fill.Source{Loader: c.load, Anew: c.anew})
		for _, a := range group {
			if a.err = a.wait.Err; a.err == nil {
				c.joined = append(c.joined, a)
			}
		}
	}
	c.Reads.End(len(c.misses), turns(c.misses))
	c.misses = nil
}

// wait waits for fills and answers with their results. It returns the asks whose results are older than the call, as
// soon as there is one: each key has the time of the call, whatever the other keys take. None: all are answered.
func (c *call) wait() (again []*ask) {
	for len(again) == 0 && len(c.joined) > 0 {
		c.Fills.Wait(c.ctx, &c.caller, waits(c.joined))
		var over []*ask
		c.joined, over = split(c.joined, func(a *ask) bool { return a.wait.Verdict == flight.Waiting })
		for _, a := range over {
			if !c.settle(a) {
				a.reset(a.Key)
				again = append(again, a)
			}
		}
	}
	return again
}

// leave leaves the fills that the call has joined, if it has not waited for them since a function of Trace panicked.
func (c *call) leave() {
	if len(c.joined) > 0 {
		ended, cancel := context.WithCancel(context.Background())
		cancel()
		c.Fills.Wait(ended, &c.caller, waits(c.joined))
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

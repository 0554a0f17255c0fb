// Package read is what a call does: it looks for a value in memory and in Redis, joins the fill of the key if there
// is none, waits for it, and chooses between its result and an old value.
package read

import (
	"context"
	"errors"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/event"
	"github.com/singlefill/singlefill/internal/fill"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/value"
)

// ErrMiss is the public error of this name.
var ErrMiss = errors.New("singlefill: miss")

// Parts are what a Reader is made of.
type Parts struct {
	Client  *client.Client
	Store   *value.Store
	Reads   *flight.Reads[value.Lookup]
	Fills   *flight.Fills[fill.Result]
	Filler  *fill.Filler
	Slots   *flight.Slots
	User    fill.User
	Events  *event.Sink
	Closing <-chan struct{}

	StaleAfter  time.Duration // 0: off
	LoadTimeout time.Duration
	MaxBatch    int
	Audit       float64
}

// A Reader carries out the calls of one cache that read.
type Reader struct {
	Parts
	audits audits
}

func New(p Parts) *Reader { return &Reader{Parts: p} }

// Get looks for a value. It waits for no load, and begins none.
func (c *Reader) Get(ctx context.Context, key string) (any, error) {
	if served, ok := c.Store.FromMemory(ctx, key); ok {
		return served.Value, served.Err
	}
	l := value.Lookup{Key: key}
	c.Store.Get(ctx, &l)
	switch {
	case l.RedisErr != nil:
		return nil, value.Wrap(ctx, "get", l.RedisErr)
	case !l.Hit():
		c.Events.Miss(ctx, key, event.ValueInfo{})
		return nil, ErrMiss
	}
	c.Events.Hit(ctx, key, false, event.ValueInfo{Stale: l.Freshness == value.Revalidate, Age: l.Entry.Age(l.At)})
	return l.Value, l.Err
}

// An answer is what a call returns.
type answer struct {
	value any
	info  event.ValueInfo
	err   error
}

// GetOrLoad finds a value, or has it loaded.
func (c *Reader) GetOrLoad(ctx context.Context, key string, load fill.Loader) (any, event.ValueInfo, error) {
	if served, ok := c.Store.FromMemory(ctx, key); ok {
		if served.TakeRefresh() {
			c.refreshNear(client.Detach(ctx), key, load, served.Copy)
		} else if c.audited(!served.Info.Stale) {
			c.auditNear(ctx, key, load, &served)
		}
		return served.Value, served.Info, served.Err
	}
	for call := (*flight.Caller)(nil); ; {
		a, m := c.readAndDeliver(ctx, key, load, call)
		if m == nil {
			return a.value, a.info, a.err
		}
		patience, cancel := c.patience(ctx, m)
		r, verdict := c.Fills.Wait(patience, m.waiter)
		cancel()
		a, over := c.settle(ctx, m, r, verdict, patience.Err())
		if over {
			return a.value, a.info, a.err
		}
		call = m.Caller
	}
}

// A miss is a call that waits for a fill. It is not in a frame of the stack: goroutines that wait have
// small stacks.
type miss struct {
	waiter
	*value.Lookup // what the caller's own read found
	from          origin
	joined        time.Time // it had joined the fill by then
}

// readAndDeliver delivers what a read finds, or returns a miss. call is nil in the first round of a call.
func (c *Reader) readAndDeliver(ctx context.Context, key string, load fill.Loader,
	call *flight.Caller) (answer, *miss) {
	l := value.Lookup{Key: key}
	w, from, err := c.readOrJoin(ctx, key, load, call, &l)
	switch {
	case err != nil:
		return answer{err: err}, nil
	case !l.Hit():
		found := l
		return answer{}, &miss{w, &found, from, time.Now()}
	case c.audited(l.Freshness == value.Fresh):
		c.auditHit(ctx, key, load, &l)
	}
	from.hit = true
	return c.deliver(ctx, key, &l.Found, from), nil
}

// readOrJoin reads key from Redis, by a GET that callers share. If that finds nothing to serve, the
// caller joins the key's fill, or starts one. A caller does not read if a fill runs that found the
// key empty: it joins at once. call is nil in the first round of a call.
func (c *Reader) readOrJoin(ctx context.Context, key string, load fill.Loader, call *flight.Caller,
	l *value.Lookup) (w waiter, from origin, err error) {
	if c.Fills.Filling(key) {
		w, err = c.join(ctx, fill.Source{Loader: load}, call, 0, l)
		return w, from, err
	}
	turn, found, err := c.Reads.Arrive(key).Wait(ctx)
	delegated := false // another goroutine has read for this caller
	for err == nil && found == nil && turn.Arrived != 0 && c.Client.MayLeave(ctx) {
		delegated = true // so that the others need no second read if this caller leaves
		turn, found, err = turn.Delegate(ctx, func(turn flight.Turn[value.Lookup]) { c.readFor(client.Detach(ctx), key, load, turn) })
	}
	switch {
	case err != nil:
		return w, from, err
	case found != nil:
		*l, from.shared = *found, !delegated
		if !l.Hit() {
			w, err = c.join(ctx, fill.Source{Loader: load}, call, turn.Arrived, l)
		}
		return w, from, err
	}
	from.own = true
	ended := false
	defer func() {
		if !ended { // the caller left, or a function of Trace panicked: another caller of the batch reads
			turn.End(nil)
		}
	}()
	if !c.Fills.Filling(key) { // again: another caller may have read, missed and joined since
		c.Store.Read(ctx, l)
	}
	switch {
	case l.RedisErr != nil && ctx.Err() != nil:
		return w, from, ctx.Err()
	case !l.Hit(): // join before the turn ends: the next batch then meets the fill, and does not read
		if w, err = c.join(ctx, fill.Source{Loader: load}, call, turn.Arrived, l); err != nil {
			return w, from, err
		}
	}
	ended = true
	if turn.End(l) && c.Store.Type.Clone != nil {
		from.own = false
	}
	if c.Store.Due(l) {
		c.Filler.Refresh(client.Detach(ctx), key, l.Data, fill.Source{Loader: load})
	}
	return w, from, nil
}

// readFor reads for a batch of callers, in a goroutine that one of them started.
func (c *Reader) readFor(ctx context.Context, key string, load fill.Loader, turn flight.Turn[value.Lookup]) {
	l := value.Lookup{Key: key}
	found := &l
	defer func() { turn.End(found) }()
	if c.Fills.Filling(key) {
		return
	}
	found = nil // a function of Trace may panic
	c.Store.Read(ctx, &l)
	found = &l
	if c.Store.Due(&l) {
		c.Filler.Refresh(ctx, key, l.Data, fill.Source{Loader: load})
	}
}

// refreshNear refreshes an entry that memory has, unless another process has refreshed it: then it
// only reads the new one.
func (c *Reader) refreshNear(ctx context.Context, key string, load fill.Loader, kept *value.Copy) {
	c.Fills.Go(func() {
		l := value.Lookup{Key: key}
		if c.Store.Read(ctx, &l); !kept.Outlived(&l) {
			c.Filler.Refresh(ctx, key, l.Data, fill.Source{Loader: load})
		}
	})
}

type waiter = flight.Waiter[fill.Result]

// join joins the fill of key, or starts one with what l has found. A fill of many keys has a seat in a
// bulk load, in place of load.
func (c *Reader) join(ctx context.Context, from fill.Source, call *flight.Caller, arrived flight.Stamp,
	l *value.Lookup) (waiter, error) {
	if call == nil {
		call = &flight.Caller{Outer: flight.LoadOf(ctx), Stamp: arrived}
	}
	call.Empty = l.RedisErr == nil && l.Freshness == value.Expired
	call.Keep = c.StaleAfter > 0 && c.Store.Servable(&l.Found)
	call.Group = from.Seat.Node()
	return c.Filler.Join(ctx, call, from, l)
}

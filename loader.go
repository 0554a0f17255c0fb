package singlefill

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/singlefill/singlefill/internal/bulk"
	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/event"
	"github.com/singlefill/singlefill/internal/fill"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/foreign"
	"github.com/singlefill/singlefill/internal/tags"
	"github.com/singlefill/singlefill/internal/value"
)

// A Loader asks the source for the value of key. It returns [ErrNotFound], bare or wrapped, when
// the source has no such value; the cache remembers that, and no other error.
//
// A Loader works for all callers that wait, so all Loaders given for one key must mean the same,
// and do nothing that may not happen twice. Its ctx has the values of the call that started it, but
// neither its deadline nor its cancellation: it ends after [Options.LoadTimeout], or when the key
// is deleted and no earlier caller waits. A refresh may outlive the request of that call: so must
// what the values of ctx refer to. A Loader may call GetOrLoad for other keys, and of other caches,
// with its ctx.
type Loader[T any] func(ctx context.Context, key string) (T, error)

// GetOrLoad returns the value under key: from Redis if it is there, otherwise from load, which runs
// once for all callers that ask at that time, in all processes.
//
// ctx bounds how long this caller waits. When it ends, GetOrLoad returns ctx.Err(): at once while
// it waits for a load, never later than the deadline, and within RedisTimeout if ctx is cancelled
// during a Redis command. The load goes on for the other callers and for the cache.
//
// Callers of this process that waited for a load get its error unchanged, those in other processes
// a [*RemoteError]. A panic or runtime.Goexit in load is a [*PanicError]. A remembered
// [ErrNotFound] comes back bare.
//
// A value that expires soon, or is stale within [Options.StaleWhileRevalidate], is returned at
// once, and load may run in the background. A value within [Options.StaleIfError] is returned in
// place of an error of load, and when the deadline of ctx comes first.
//
// While Redis does not answer, load still runs once at a time per process; its value is returned
// and not stored. GetOrLoad never returns an error of Redis.
func (c *Cache[T]) GetOrLoad(ctx context.Context, key string, load Loader[T]) (T, error) {
	v, _, err := c.GetOrLoadInfo(ctx, key, load)
	return v, err
}

// GetOrLoadInfo is [Cache.GetOrLoad] that also tells whether the value is fresh or stale, how old
// it is, and why it is not newer.
func (c *Cache[T]) GetOrLoadInfo(ctx context.Context, key string, load Loader[T]) (T, ValueInfo, error) {
	var untyped fill.Loader // stays nil for a nil Loader
	if load != nil {
		untyped = loadOf[T](load)
	}
	v, info, err := c.engine.getOrLoad(ctx, key, untyped)
	return valueOf[T](v), ValueInfo(info), err
}

// A loadOf is a Loader as the rooms call it, which do not know T.
type loadOf[T any] Loader[T]

func (l loadOf[T]) Load(ctx context.Context, key string) (any, error) {
	v, err := l(ctx, key)
	return &v, err
}

func (c *engine) getOrLoad(ctx context.Context, key string, load fill.Loader) (any, event.ValueInfo, error) {
	if err := checkCall(ctx, key); err != nil {
		return nil, event.ValueInfo{}, err
	}
	if load == nil {
		return nil, event.ValueInfo{}, errors.New("singlefill: load is nil")
	}
	if err := c.checkOpen(); err != nil && !c.fills.Inside(flight.LoadOf(ctx)) {
		return nil, event.ValueInfo{}, err
	}
	if served, ok := c.store.FromMemory(ctx, key); ok {
		if served.TakeRefresh() {
			c.refreshNear(client.Detach(ctx), key, load, served.Copy)
		} else if c.audited(!served.Info.Stale) {
			c.auditNear(ctx, key, load, &served)
		}
		return served.Value, served.Info, served.Err
	}
	for call := (*flight.Caller)(nil); ; {
		v, info, m, err := c.readAndDeliver(ctx, key, load, call)
		if m == nil {
			return v, info, err
		}
		patience, cancel := c.patience(ctx, m)
		r, verdict := c.fills.Wait(patience, m.waiter)
		cancel()
		v, info, err, over := c.settle(ctx, key, m, r, verdict, patience.Err())
		if over {
			return v, info, err
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
func (c *engine) readAndDeliver(ctx context.Context, key string, load fill.Loader,
	call *flight.Caller) (v any, info event.ValueInfo, m *miss, err error) {
	l := value.Lookup{Key: key}
	w, from, err := c.readOrJoin(ctx, key, load, call, &l)
	switch {
	case err != nil:
		return nil, info, nil, err
	case !l.Hit():
		found := l
		return nil, info, &miss{w, &found, from, time.Now()}, nil
	case c.audited(l.Freshness == value.Fresh):
		c.auditHit(ctx, key, load, &l)
	}
	from.hit = true
	v, info, err = c.deliver(ctx, key, &l.Found, from)
	return v, info, nil, err
}

// An origin tells how a caller got its result.
type origin struct {
	hit     bool  // by its first read
	own     bool  // the caller owns the value; the others get copies
	shared  bool  // another call of this process did the work
	failure error // of the load in whose place an old value is served
}

// readOrJoin reads key from Redis, by a GET that callers share. If that finds nothing to serve, the
// caller joins the key's fill, or starts one. A caller does not read if a fill runs that found the
// key empty: it joins at once. call is nil in the first round of a call.
func (c *engine) readOrJoin(ctx context.Context, key string, load fill.Loader, call *flight.Caller,
	l *value.Lookup) (w waiter, from origin, err error) {
	if c.fills.Filling(key) {
		w, err = c.join(ctx, key, load, call, 0, l, nil)
		return w, from, err
	}
	turn, found, err := c.reads.Arrive(key).Wait(ctx)
	delegated := false // another goroutine has read for this caller
	for err == nil && found == nil && turn.Arrived != 0 && c.client.MayLeave(ctx) {
		delegated = true // so that the others need no second read if this caller leaves
		turn, found, err = turn.Delegate(ctx, func(turn flight.Turn[value.Lookup]) { c.readFor(client.Detach(ctx), key, load, turn) })
	}
	switch {
	case err != nil:
		return w, from, err
	case found != nil:
		*l, from.shared = *found, !delegated
		if !l.Hit() {
			w, err = c.join(ctx, key, load, call, turn.Arrived, l, nil)
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
	if !c.fills.Filling(key) { // again: another caller may have read, missed and joined since
		c.store.Read(ctx, l)
	}
	switch {
	case l.RedisErr != nil && ctx.Err() != nil:
		return w, from, ctx.Err()
	case !l.Hit(): // join before the turn ends: the next batch then meets the fill, and does not read
		if w, err = c.join(ctx, key, load, call, turn.Arrived, l, nil); err != nil {
			return w, from, err
		}
	}
	ended = true
	if turn.End(l) && c.values.Clone != nil {
		from.own = false
	}
	if c.store.Due(l) {
		c.filler.Refresh(client.Detach(ctx), key, l.Data, fill.Source{Loader: load})
	}
	return w, from, nil
}

// readFor reads for a batch of callers, in a goroutine that one of them started.
func (c *engine) readFor(ctx context.Context, key string, load fill.Loader, turn flight.Turn[value.Lookup]) {
	l := value.Lookup{Key: key}
	found := &l
	defer func() { turn.End(found) }()
	if c.fills.Filling(key) {
		return
	}
	found = nil // a function of Trace may panic
	c.store.Read(ctx, &l)
	found = &l
	if c.store.Due(&l) {
		c.filler.Refresh(ctx, key, l.Data, fill.Source{Loader: load})
	}
}

// refreshNear refreshes an entry that memory has, unless another process has refreshed it: then it
// only reads the new one.
func (c *engine) refreshNear(ctx context.Context, key string, load fill.Loader, kept *value.Copy) {
	c.fills.Go(func() {
		l := value.Lookup{Key: key}
		if c.store.Read(ctx, &l); !kept.Outlived(&l) {
			c.filler.Refresh(ctx, key, l.Data, fill.Source{Loader: load})
		}
	})
}

type waiter = flight.Waiter[fill.Result]

// join joins the fill of key, or starts one with what l has found. A fill of many keys has a seat in a
// bulk load, in place of load.
func (c *engine) join(ctx context.Context, key string, load fill.Loader, call *flight.Caller, arrived flight.Stamp,
	l *value.Lookup, in *bulk.Seat) (waiter, error) {
	if call == nil {
		call = &flight.Caller{Outer: flight.LoadOf(ctx), Stamp: arrived}
	}
	call.Empty = l.RedisErr == nil && l.Freshness == value.Expired
	call.Keep = c.opts.staleAfter > 0 && c.store.Servable(&l.Found)
	call.Group = in.Node()
	return c.filler.Join(ctx, call, fill.Source{Loader: load, Seat: in}, l)
}

// patience returns the context of a wait. If the caller has an old value, it ends when the fill is
// StaleAfter old.
func (c *engine) patience(ctx context.Context, m *miss) (context.Context, context.CancelFunc) {
	if !m.Keep || !c.store.Servable(&m.Found) {
		return ctx, noCancel
	}
	return context.WithDeadline(ctx, m.Begun.Add(c.opts.staleAfter))
}

func noCancel() {}

// settle delivers what a wait has brought, or the old value in its place. ended is the error of patience.
func (c *engine) settle(ctx context.Context, key string, m *miss, r *fill.Result, verdict flight.Verdict,
	ended error) (v any, info event.ValueInfo, err error, over bool) {
	if !m.First {
		defer func() { c.events.ShareDone(ctx, key, m.joined, fill.LoadContext(m.Fill)) }()
	}
	old, from := c.fallback(m, r, verdict, ended)
	switch {
	case old != nil:
	case verdict == flight.Left && ctx.Err() != nil:
		return nil, info, ctx.Err(), true
	case verdict == flight.Owned || verdict == flight.Shared:
		v, info, err = c.deliver(ctx, key, &r.Found, origin{own: verdict == flight.Owned, shared: !m.First})
		return v, info, err, true
	case r != nil && r.Unverified && c.unreachable(ctx, key, m.joined):
		v, info, err = c.deliver(ctx, key, &r.Found, origin{shared: true})
		return v, info, err, true
	case ctx.Err() == nil:
		return nil, info, nil, false
	default:
		if old, from = c.fallback(m, nil, flight.Left, ctx.Err()); old == nil {
			return nil, info, ctx.Err(), true
		}
	}
	v, info, err = c.deliver(ctx, key, old, from)
	return v, info, err, true
}

// unreachable reports whether Redis did not answer a command that was sent after a caller had joined. While
// the breaker is open, the probes tell so; if none has come to its end yet, the caller joins the next load
// in place of waiting for one.
func (c *engine) unreachable(ctx context.Context, key string, joined time.Time) bool {
	k := c.store.Key(key)
	if c.client.Away(k) {
		return c.client.Unanswered(k, joined)
	}
	return !c.client.Reachable(ctx, k, joined)
}

// fallback returns the old value that a caller gets in place of a failure, or at its deadline; nil
// if there is none. The caller's own read found it, unless the fill has seen the
// key since.
func (c *engine) fallback(m *miss, r *fill.Result, verdict flight.Verdict, ended error) (old *value.Found, from origin) {
	from.shared = !m.First
	switch {
	case verdict == flight.Left && ended == context.DeadlineExceeded:
		old, from.own, from.failure = &m.Found, m.from.own, ended
	case r == nil || !r.Failed:
		return nil, from
	case m.Before(r.OldSince):
		old, from.failure = r.Old, r.Err
	default:
		old, from.own, from.failure = &m.Found, m.from.own, r.Err
	}
	if old == nil || !c.store.Servable(old) {
		return nil, from
	}
	return old, from
}

// A user calls what the user has given to a cache. It implements fill.User.
type user struct {
	store  *value.Store
	errors sentinels
}

func (u user) Load(ctx context.Context, key string, load fill.Loader) fill.Outcome {
	v, err := load.Load(ctx, key)
	return u.Returned(key, v, err)
}

func (u user) Returned(key string, v any, err error) (o fill.Outcome) {
	if o.Value, o.Err = v, err; err == nil {
		o.Life = u.store.LifeOf(key, v) // by Options.TTLFunc
	} else {
		o.NotFound, o.Text = isNotFound(err), foreign.Text(err)
	}
	return o
}

func (u user) LoadMany(ctx context.Context, keys []string, load fill.ManyLoader) bulk.Outcome {
	o, err := load.LoadMany(ctx, keys)
	if err != nil {
		return func(string) (any, error) { return nil, err }
	}
	return o
}

func (user) Panicked(p any) fill.Outcome {
	err := panicked(p)
	return fill.Outcome{Err: err, Text: foreign.Text(err)}
}

func (user) IsNotFound(err error) bool { return isNotFound(err) }

func (u user) NameOf(err error) string { return u.errors.nameOf(err) }

func (u user) RemoteError(key, record string) error { return u.errors.remoteError(key, record) }

// isNotFound reports whether the source has no such value. A panic tells nothing of the source, whatever
// its argument: that of a ManyLoader comes as an error.
func isNotFound(err error) (is bool) {
	defer func() { _ = recover() }() // of a method of err
	_, panicked := errors.AsType[*PanicError](err)
	return !panicked && errors.Is(err, ErrNotFound)
}

const maxTags = 32 // of a value

// callTags calls Options.Tags for the value of a key.
func callTags(key string, call func() []string) (names []string, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = errors.New("singlefill: Options.Tags panicked: " + foreign.Text(p))
		}
	}()
	names, err = tags.Names(call())
	if err == nil && len(names) > maxTags {
		err = fmt.Errorf("singlefill: Options.Tags returned %d tags for the key %.100q: at most %d are allowed", len(names), key, maxTags)
	}
	return names, err
}

// deliver returns a result to a caller. The owner gets the value, every other caller a copy, so
// that no caller can change the value of another. If several callers share a read, and the value
// can be cloned, each of them gets a clone.
func (c *engine) deliver(ctx context.Context, key string, f *value.Found, from origin) (any, event.ValueInfo, error) {
	if from.shared {
		c.events.Shared()
	}
	info, err := c.store.Info(f, from.failure)
	if from.hit {
		c.events.Hit(ctx, key, false, info)
	} else {
		c.events.Miss(ctx, key, info)
	}
	if err != nil {
		return nil, info, err
	}
	switch {
	case f.Err != nil:
		return nil, info, f.Err
	case from.own:
	case from.hit && c.values.Clone != nil:
		return c.values.Clone(f.Value), info, nil
	case f.Entry.Payload != nil:
		if v, err := c.values.DecodeEntry(&f.Entry); err == nil {
			return v, info, nil
		}
	}
	return f.Value, info, nil
}

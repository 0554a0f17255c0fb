package read

import (
	"context"
	"time"

	"github.com/singlefill/singlefill/internal/fill"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/value"
)

// An origin tells how a caller got its result.
type origin struct {
	hit     bool  // by its first read
	own     bool  // the caller owns the value; the others get copies
	shared  bool  // another call of this process did the work
	failure error // of the load in whose place an old value is served
}

// patience returns the context of a wait. If the caller has an old value, it ends when the fill is
// StaleAfter old.
func (c *Reader) patience(ctx context.Context, m *miss) (context.Context, context.CancelFunc) {
	if !m.Keep || !c.Store.Servable(&m.Found) {
		return ctx, noCancel
	}
	return context.WithDeadline(ctx, m.Begun.Add(c.StaleAfter))
}

func noCancel() {}

// settle delivers what a wait has brought, or the old value in its place. ended is the error of patience.
func (c *Reader) settle(ctx context.Context, m *miss, r *fill.Result, verdict flight.Verdict, ended error) (a answer, over bool) {
	if !m.First {
		defer func() { c.Events.ShareDone(ctx, m.Lookup.Key, m.joined, fill.LoadContext(m.Fill)) }()
	}
	old, from := c.fallback(m, r, verdict, ended)
	switch {
	case old != nil:
	case verdict == flight.Left && ctx.Err() != nil:
		return answer{err: ctx.Err()}, true
	case verdict == flight.Owned || verdict == flight.Shared:
		return c.deliver(ctx, m.Lookup.Key, &r.Found, origin{own: verdict == flight.Owned, shared: !m.First}), true
	case r != nil && r.Unverified && c.unreachable(ctx, m.Lookup.Key, m.joined):
		return c.deliver(ctx, m.Lookup.Key, &r.Found, origin{shared: true}), true
	case ctx.Err() == nil:
		return answer{}, false
	case r != nil && r.NoStale:
		return answer{err: ctx.Err()}, true
	default:
		if old, from = c.fallback(m, nil, flight.Left, ctx.Err()); old == nil {
			return answer{err: ctx.Err()}, true
		}
	}
	return c.deliver(ctx, m.Lookup.Key, old, from), true
}

// unreachable reports whether Redis did not answer a command that was sent after a caller had joined. While
// the breaker is open, the probes tell so; if none has come to its end yet, the caller joins the next load
// in place of waiting for one.
func (c *Reader) unreachable(ctx context.Context, key string, joined time.Time) bool {
	k := c.Store.Key(key)
	if c.Client.Away(k) {
		return c.Client.Unanswered(k, joined)
	}
	return !c.Client.Reachable(ctx, k, joined)
}

// fallback returns the old value that a caller gets in place of a failure, or at its deadline; nil
// if there is none. The caller's own read found it, unless the fill has seen the
// key since.
func (c *Reader) fallback(m *miss, r *fill.Result, verdict flight.Verdict, ended error) (old *value.Found, from origin) {
	from.shared = !m.First
	switch {
	case verdict == flight.Left && ended == context.DeadlineExceeded:
		old, from.own, from.failure = &m.Found, m.from.own, ended
	case r == nil || !r.Failed || r.NoStale:
		return nil, from
	case m.Before(r.OldSince):
		old, from.failure = r.Old, r.Err
	default:
		old, from.own, from.failure = &m.Found, m.from.own, r.Err
	}
	if old == nil || !c.Store.Servable(old) {
		return nil, from
	}
	return old, from
}

// deliver returns a result to a caller. The owner gets the value, every other caller a copy, so
// that no caller can change the value of another. If several callers share a read, and the value
// can be cloned, each of them gets a clone.
func (c *Reader) deliver(ctx context.Context, key string, f *value.Found, from origin) answer {
	if from.shared {
		c.Events.Shared()
	}
	info, err := c.Store.Info(f, from.failure)
	if from.hit {
		c.Events.Hit(ctx, key, false, info)
	} else {
		c.Events.Miss(ctx, key, info)
	}
	if err != nil {
		return answer{nil, info, err}
	}
	switch {
	case f.Err != nil:
		return answer{nil, info, f.Err}
	case from.own:
	case from.hit && c.Store.Type.Clone != nil:
		return answer{c.Store.Type.Clone(f.Value), info, nil}
	case f.Entry.Payload != nil:
		if v, err := c.Store.Type.DecodeEntry(&f.Entry); err == nil {
			return answer{v, info, nil}
		}
	}
	return answer{f.Value, info, nil}
}

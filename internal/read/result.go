package read

import (
	"cmp"
	"context"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/fill"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/value"
)

// An origin tells how a caller got its result.
type origin struct {
	hit     bool      // by its first read
	own     bool      // the caller owns the value; the others get copies
	clone   any       // a value without an owner, for clones; nil: the copies are decoded
	shared  bool      // another call of this process did the work
	failure error     // of the load in whose place an old value is served
	at      time.Time // of the failure
}

// own reports whether the caller owns what its read has found. Several that share a value that can be cloned get
// clones.
func (c *call) own(a *ask) bool { return a.by == self && !(a.turn.Shared && c.Store.Type.Clone != nil) }

// hit answers with the value that a read has found.
func (c *call) hit(a *ask) {
	from := origin{hit: true, own: c.own(a), shared: a.by == other}
	if !from.own && c.Store.Type.Clone != nil {
		from.clone = a.Value
	}
	c.deliver(a, &a.Found, from)
}

// settle answers with what a wait has brought, or with the old value in its place. It returns false if the call has
// to ask again.
func (c *call) settle(a *ask) (over bool) {
	w := a.wait
	if !w.First {
		defer func() { c.Events.ShareDone(c.ctx, a.Key, w.Over.Sub(w.Joined), fill.LoadContext(w.Fill)) }()
	}
	if c.anew {
		return c.settleAnew(a)
	}
	old, from := c.fallback(a)
	switch {
	case old != nil:
	case w.Verdict == flight.Left && c.ctx.Err() != nil:
		a.err = c.ctx.Err()
		return true
	case w.Verdict == flight.Owned || w.Verdict == flight.Shared:
		from := origin{own: w.Verdict == flight.Owned, shared: !w.First}
		if !from.own && c.Store.Type.Clone != nil {
			from.clone = w.Result.Pristine(c.Store.Type, a.Key)
		}
		c.deliver(a, &w.Result.Found, from)
		return true
	case w.Result != nil && w.Result.Unverified && c.Client.Away(c.Store.Key(a.Key)):
		// The call came after the beginning of the load, and Redis cannot tell whether another process has invalidated
		// the key in between. This process has not: then there is no result. The breaker counts now, and not when the
		// call joined: once Redis is back, a Delete in another process may have succeeded. See
		// TestUnlocked_LateCallerAfterTheOutage.
		c.deliver(a, &w.Result.Found, origin{shared: true})
		return true
	case c.ctx.Err() == nil:
		return false
	case w.Result != nil && w.Result.NoStale:
		a.err = c.ctx.Err()
		return true
	default:
		w.Result, w.Verdict = nil, flight.Left
		if old, from = c.fallback(a); old == nil {
			a.err = c.ctx.Err()
			return true
		}
	}
	c.deliver(a, old, from)
	return true
}

// settleAnew answers when a wait is over. It returns false if the call has to ask again: if the fill has brought a
// value that may have been there before the call, or the key was invalidated during the load.
func (c *call) settleAnew(a *ask) (over bool) {
	w := a.wait
	r, taken := w.Result, w.Verdict == flight.Owned || w.Verdict == flight.Shared
	switch {
	case r == nil:
	case r.Failed && (taken || r.Resting), taken && r.Err == flight.ErrClosed:
		a.err = r.Err
		return true
	case r.StoreErr != nil && !r.Failed:
		a.err = value.Wrap(c.ctx, "refresh", r.StoreErr)
		return true
	case taken:
		return true
	}
	a.err = c.ctx.Err()
	return a.err != nil
}

// mayBeStored reports whether a new value may be stored under a key although the call returns an error for it.
func (a *ask) mayBeStored() bool {
	w := a.wait
	if w == nil || w.Err != nil { // the key could not be read, or the call has not joined
		return false
	}
	switch r := w.Result; {
	case r == nil: // the call has left
		return true
	case r.Failed:
		return false
	case r.StoreErr == nil: // the call has left when it had to join again
		return true
	default: // what was not to be stored has no ID
		return r.Unverified && r.Entry.ID != 0 && client.Unreachable(r.StoreErr)
	}
}

// fallback returns the old value that a caller gets in place of a failure, or when it leaves at the end of its time;
// nil if there is none. The caller's own read found it, unless the fill has seen the key since.
func (c *call) fallback(a *ask) (old *value.Found, from origin) {
	w := a.wait
	from.shared, from.at = !w.First, w.Over
	switch r := w.Result; {
	case w.Verdict == flight.Impatient || w.Verdict == flight.Left && c.ctx.Err() == context.DeadlineExceeded:
		old, from.own, from.failure = &a.Found, c.own(a), context.DeadlineExceeded
	case r == nil || !r.Failed || r.NoStale:
		return nil, from
	case w.Before(r.OldSince):
		old, from.failure = r.Old, r.Err
	default:
		old, from.own, from.failure = &a.Found, c.own(a), r.Err
	}
	if old == nil || !c.Store.Servable(old, w.Over) {
		return nil, from
	}
	return old, from
}

// deliver answers. The owner gets the value, every other caller a copy, so that no caller can change the value of
// another. If several callers share a read, and the value can be cloned, each of them gets a clone.
func (c *call) deliver(a *ask, f *value.Found, from origin) {
	if from.shared {
		c.Events.Shared()
	}
	info, err := c.Store.Info(f, from.failure, from.at)
	if from.hit {
		c.Events.Hit(c.ctx, a.Key, false, &info)
	} else {
		c.Events.Miss(c.ctx, a.Key, info)
	}
	if c.info != nil {
		*c.info = info
	}
	a.value, a.err = f.Value, cmp.Or(err, f.Err)
	switch {
	case a.err != nil:
		a.value = nil
	case from.own:
	case from.clone != nil:
		a.value = c.Store.Type.Clone(from.clone)
	case f.Entry.Payload != nil:
		if v, err := c.Store.Type.DecodeEntry(a.Key, &f.Entry); err == nil {
			a.value = v
		}
	}
}

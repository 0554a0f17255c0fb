package fill

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/singlefill/singlefill/internal/event"
	"github.com/singlefill/singlefill/internal/filllock"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/value"
)

// A running is a running load of a set, and what of it must end with it.
type running struct {
	*Filler
	fills    []*filling
	context  context.Context
	cancel   func()
	stop     func()       // ends the renewals of the locks
	sets     atomic.Int64 // that have not ended: the set, and those that it has left the keys of other servers to
	void     atomic.Int64 // fills of which no caller may have the value any more
	returned atomic.Bool  // the set has an outcome
}

// claim reports whether the set goes on in this goroutine: in the goroutine of the Loader, or, if the Loader has not
// returned at LoadTimeout, in another one.
func (r *running) claim() bool { return r.returned.CompareAndSwap(false, true) }

// setEnded ends the renewals with the last set. Until then a value is being encoded or stored, which may take longer
// than LockTTL: other processes would load in the same time, and Redis would refuse the value.
func (r *running) setEnded() {
	if r.sets.Add(-1) == 0 {
		r.stop()
	}
}

// callLoader is the turn in which the Loader runs. The goroutine of a Loader that has not returned by LoadTimeout,
// or when loads are aborted, is abandoned: the set goes on in another one.
func (x *set) callLoader(ctx context.Context) state {
	loadCtx := x.beginLoad(ctx)
	// Not context.AfterFunc, since the context also ends when the fills are superseded.
	defer time.AfterFunc(x.LoadTimeout, func() {
		<-loadCtx.Done() // at its deadline, which is now, and not because loaded cancels it
		x.abandonLoad(ctx, fmt.Errorf("singlefill: the load took longer than LoadTimeout (%v): %w", x.LoadTimeout, context.DeadlineExceeded))
	}).Stop()
	defer context.AfterFunc(x.Fills.Aborting(), func() { x.abandonLoad(ctx, flight.ErrClosed) })()
	outcomes := x.callUser(loadCtx)
	if !x.call.claim() {
		return ended
	}
	x.loaded(outcomes)
	return storing
}

// abandonLoad goes on in this goroutine, unless the Loader has returned.
func (x *set) abandonLoad(ctx context.Context, err error) {
	if x.call.claim() {
		x.loaded(slices.Repeat([]Outcome{{Err: err, Text: err.Error(), Passing: true}}, len(x.fills)))
		x.run(ctx, storing)
	}
}

// beginLoad returns a context that ends at LoadTimeout, or earlier by cancel.
func (x *set) beginLoad(ctx context.Context) (loadCtx context.Context) {
	loadCtx, cancel := context.WithTimeout(ctx, x.LoadTimeout)
	x.call = &running{Filler: x.Filler, fills: x.fills, context: loadCtx, cancel: cancel, stop: func() {}}
	x.call.sets.Store(1)
	var locks []*filllock.Lock
	for _, f := range x.fills {
		x.Events.LoadBegun(f.fill.Refresh)
		f.began = x.Fills.BeginLoad(f.fill, func() {
			f.superseded.Store(true)
			if int(x.call.void.Add(1)) == len(x.call.fills) {
				cancel()
			}
		})
		switch {
		case !f.unlocked:
			locks = append(locks, f.lock)
			continue
		case f.lock.InDoubt:
			f.lock.InDoubt = false
			x.giveUp(ctx, f)
		}
		x.Events.LoadUnlocked()
	}
	if len(locks) == 0 {
		return loadCtx
	}
	x.call.stop = x.renew(ctx, loadCtx, locks)
	if x.Tags != nil {
		x.since = x.Tags.Sequences(loadCtx)
	}
	return loadCtx
}

// renewAfter is the age at which locks are first renewed. A quicker load needs no timer for
// renewals.
const renewAfter = 10 * time.Millisecond

// renew renews locks until stop is called, or LoadTimeout is over. A caller that joins brings the next renewal forward,
// so that a lost lock is noticed soon; of a load that has ended the store tells.
func (x *set) renew(ctx, loadCtx context.Context, locks []*filllock.Lock) (stop func()) {
	fills := x.fills // among them the fills of the locks
	call, load := x.call, x.load
	deadline, _ := loadCtx.Deadline()
	ctx, cancel := context.WithCancel(ctx)
	later := x.Fills.Later(min(renewAfter, x.LockTTL/3), func() {
		ctx, cancel := context.WithDeadline(ctx, deadline)
		defer cancel()
		filllock.Keep(ctx, locks, load.Woken, func(l *filllock.Lock) {
			if call.returned.Load() {
				return
			}
			x.Events.LockLost()
			for _, f := range fills {
				if f.lock == l {
					x.Fills.LockLost(f.fill)
				}
			}
		})
	})
	return func() { cancel(); later() }
}

// callUser calls the Loader, and TTLFunc for each of its values.
func (x *set) callUser(ctx context.Context) []Outcome {
	r := x.call
	if x.Fills.Aborting().Err() != nil {
		return slices.Repeat([]Outcome{{Err: flight.ErrClosed, Passing: true}}, len(r.fills))
	}
	keys := make([]string, len(r.fills))
	for i, f := range r.fills {
		keys[i] = f.key
	}
	ctx = x.Events.LoadStart(inside(x.load.Inside(ctx), r), keys[0])
	call := &flight.Call{Context: ctx, Keys: len(keys), Begun: time.Now()}
	for _, f := range r.fills {
		f.fill.Call.Store(call)
	}
	result := x.User.Load(ctx, keys, x.from.Loader)
	outcomes := make([]Outcome, len(keys))
	for i, key := range keys {
		o := r.outcomeOf(result, key)
		o.Passing = o.Passing || o.Err != nil && r.context.Err() != nil // whatever the Loader makes of the end of its context
		outcomes[i] = o
	}
	return outcomes
}

// outcomeOf is the outcome of one key. TTLFunc may panic, which does no harm to other keys.
func (r *running) outcomeOf(result Outcomes, key string) (o Outcome) {
	defer func() {
		if p := recover(); p != nil {
			r.Events.LoadPanics(1)
			o = r.User.Panicked(p, true)
		}
	}()
	value, err := result(key)
	return r.User.Returned(key, value, err)
}

// loaded takes the outcomes of the fills.
func (x *set) loaded(outcomes []Outcome) {
	for i, f := range x.fills {
		o := outcome{Outcome: outcomes[i]}
		o.superseded = o.Err != nil && f.superseded.Load()
		o.info.Key, o.info.Refresh, o.info.Queued, o.info.Err = f.key, f.fill.Refresh, x.queued, o.Err
		if o.call = f.fill.Call.Load(); o.call != nil {
			o.info.Keys, o.info.Duration = o.call.Keys, time.Since(o.call.Begun)
		}
		o.info.Unlocked = f.unlocked
		f.outcome = o
		x.Events.LoadEnded()
		if !f.unlocked && !o.failed() {
			x.times.Note(f.key, o.info.Duration)
		}
	}
	x.call.cancel()
	x.slot.Release()
}

// LoadContext returns the context of the Loader of a fill, or nil if none has been called.
func LoadContext(f *flight.Fill[Result]) context.Context {
	if call := f.Call.Load(); call != nil {
		return call.Context
	}
	return nil
}

// runningKey is the key under which the context of a Loader has its running load.
type runningKey struct{}

func inside(ctx context.Context, r *running) context.Context {
	return context.WithValue(ctx, runningKey{}, r)
}

// Outside returns the context of a Loader that works for no fill.
func Outside(ctx context.Context) context.Context { return inside(ctx, new(running)) }

// Previous returns the value that the running load of key replaces, or nil. ctx is the context of the Loader.
func Previous(ctx context.Context, key string) (any, event.ValueInfo) {
	if r, _ := ctx.Value(runningKey{}).(*running); r != nil {
		for _, f := range r.fills {
			if f.key == key {
				return r.previous(f)
			}
		}
	}
	return nil, event.ValueInfo{}
}

func (r *running) previous(f *filling) (any, event.ValueInfo) {
	if r.returned.Load() || !f.replaces || r.Fills.Superseded(f.fill) {
		return nil, event.ValueInfo{}
	}
	old := f.old.Entry
	if old.NotFound || old.Payload == nil || old.Version < r.Store.Type.Policy.Version {
		return nil, event.ValueInfo{}
	}
	v, err := r.Store.Type.DecodeEntry(f.key, &old)
	if err != nil { // told as a BadValue when it was read
		return nil, event.ValueInfo{}
	}
	return v, value.InfoOf(&old, time.Now())
}

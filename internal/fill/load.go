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
	"github.com/singlefill/singlefill/internal/tags"
	"github.com/singlefill/singlefill/internal/value"
)

// A running is a running load of a set, and what of it must end with it.
type running struct {
	*Filler
	items    []*item
	load     *flight.Load // in whose goroutine the Loader runs
	call     flight.Call
	context  context.Context // ends at LoadTimeout, or earlier by cancel
	cancel   func()
	watch    flight.Later
	unwatch  atomic.Pointer[context.CancelFunc] // ends the watch, once that has begun
	since    *tags.Sequences                    // before the load; nil without Options.Tags
	sets     atomic.Int64                       // that have not ended: see set.split
	void     atomic.Int64                       // items of which no caller may have the value any more
	returned atomic.Bool                        // the set has outcomes
}

// Load returns the load from whose inside the Loader calls caches.
func (r *running) Load() *flight.Load { return r.load }

// An item is the load of one key.
type item struct {
	*filling
	of         *running
	queued     time.Duration // for slots before
	unlocked   error         // Redis did not answer: the load has no lock, and its value is not stored
	replaces   bool          // the key held old when this fill took the lock
	rest       time.Duration // how long no other refresh of the same entry is started
	began      flight.Stamp
	superseded atomic.Bool // no caller may have the value any more
	outcome    outcome
}

// A loading calls the Loader.
type loading struct{ *set }

// claim reports whether the set goes on in this goroutine: in the goroutine of the Loader, or, if the Loader has not
// returned at LoadTimeout, in another one.
func (r *running) claim() bool { return r.returned.CompareAndSwap(false, true) }

// setEnded ends the watch with the last set. Until then a value is being encoded or stored, which may take longer than
// LockTTL: other processes would load in the same time, and Redis would refuse the value.
func (r *running) setEnded() {
	if r.sets.Add(-1) > 0 {
		return
	}
	r.watch.Stop()
	if unwatch := r.unwatch.Load(); unwatch != nil {
		(*unwatch)()
	}
}

// run is the turn in which the Loader runs. The goroutine of a Loader that has not returned by LoadTimeout, or when
// loads are aborted, is abandoned: the set goes on in another one.
func (l loading) run() phase {
	l.begin()
	outcomes := l.callUser()
	if !l.call.claim() {
		return nil
	}
	return l.loaded(outcomes)
}

// abandon goes on in this goroutine, unless the Loader has returned.
func (l loading) abandon(err error) {
	if l.call.claim() {
		l.set.run(l.loaded(l.without(err)))
	}
}

func (l loading) tookLonger() error {
	return fmt.Errorf("singlefill: the load took longer than LoadTimeout (%v): %w", l.LoadTimeout, context.DeadlineExceeded)
}

// without returns the outcomes of a load of which the Loader has brought none.
func (l loading) without(err error) []Outcome {
	return slices.Repeat([]Outcome{{Err: err, Text: err.Error(), Passing: true}}, len(l.call.items))
}

// failed goes on in another goroutine, unless the load was abandoned: the Loader has not returned.
func (l loading) failed(o Outcome) {
	if l.call.claim() {
		l.Events.LoadPanics(len(l.call.items))
		l.goOn(l.loaded(slices.Repeat([]Outcome{o}, len(l.call.items))))
	}
}

// begin begins the loads of the keys.
func (l loading) begin() {
	r, locked := l.call, false
	for _, o := range r.items {
		l.Events.LoadBegun(o.Refresh)
		o.began = l.Fills.BeginLoad(o.Fill, o.void)
		if o.unlocked == nil {
			locked = true
			continue
		}
		if o.lock.InDoubt {
			l.giveUp(o.filling)
		}
		l.Events.LoadUnlocked()
	}
	l.Fills.Later(&r.watch, min(watchAfter, l.LockTTL/3, l.LoadTimeout), l.watch)
	if locked && l.Tags != nil {
		r.since = l.Tags.Sequences(r.context)
	}
}

// void notes that no caller may have the value any more.
func (o *item) void() {
	o.superseded.Store(true)
	if r := o.of; int(r.void.Add(1)) == len(r.items) {
		r.cancel()
	}
}

// watchAfter is the age at which a load is first watched. A quicker one needs no more than a timer for that.
const watchAfter = 10 * time.Millisecond

// watch abandons a load at LoadTimeout, or when loads are aborted. Until LoadTimeout it renews the locks: a release
// that is lost again and again keeps other processes waiting no longer. A caller that joins brings the next renewal
// forward, so that a lost lock is noticed soon; of a load that has ended the store tells.
func (l loading) watch() {
	r := l.call
	ctx, cancel := context.WithCancel(l.ctx)
	defer cancel()
	if r.unwatch.Store(&cancel); r.sets.Load() == 0 { // setEnded may not have seen it
		return
	}
	deadline, _ := r.context.Deadline()
	// Not context.AfterFunc, since the context also ends when the fills are superseded.
	defer time.AfterFunc(time.Until(deadline), func() {
		<-r.context.Done() // at its deadline, which is now
		l.abandon(l.tookLonger())
	}).Stop()
	defer context.AfterFunc(l.Fills.Aborting(), func() { l.abandon(flight.ErrClosed) })()
	var locks []*filllock.Lock
	for _, o := range r.items {
		if o.unlocked == nil {
			locks = append(locks, o.lock)
		}
	}
	if len(locks) > 0 {
		keeping, stop := context.WithDeadline(ctx, deadline)
		defer stop()
		filllock.Keep(keeping, locks, l.load.Woken, func(lost *filllock.Lock) {
			if r.returned.Load() {
				return
			}
			r.Events.LockLost()
			for _, o := range r.items {
				if o.lock == lost {
					r.Fills.LockLost(o.Fill)
				}
			}
		})
	}
	<-ctx.Done()
}

// callUser calls the Loader, and TTLFunc for each of its values.
func (l loading) callUser() []Outcome {
	r := l.call
	switch {
	case l.Fills.Aborting().Err() != nil:
		return l.without(flight.ErrClosed)
	case r.context.Err() == context.DeadlineExceeded: // the sequences have come too late: watch abandons the load now
		return l.without(l.tookLonger())
	}
	keys := make([]string, len(r.items))
	for i, o := range r.items {
		keys[i] = o.Key
	}
	ctx := l.Events.LoadStart(flight.Inside(r.context, r), keys[0])
	r.call = flight.Call{Context: ctx, Keys: len(keys), Begun: time.Now()}
	for _, o := range r.items {
		o.Call.Store(&r.call)
	}
	result := l.User.Load(ctx, keys, l.from.Loader)
	outcomes := make([]Outcome, len(keys))
	for i, key := range keys {
		o := r.outcomeOf(result, key)
		// A failure after the end of its context is passing, whatever the Loader makes of that end.
		o.Passing = o.Passing || o.Err != nil && r.context.Err() != nil
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

// loaded takes the outcomes.
func (l loading) loaded(outcomes []Outcome) phase {
	for i, o := range l.call.items {
		o.outcome.Outcome = outcomes[i]
		info := &o.outcome.info
		info.Key, info.Refresh, info.Queued, info.Err, info.Unlocked = o.Key, o.Refresh, o.queued, outcomes[i].Err, o.unlocked != nil
		if call := o.Call.Load(); call != nil {
			info.Keys, info.Duration = call.Keys, time.Since(call.Begun)
		}
		l.Events.LoadEnded()
		if o.unlocked == nil && !o.outcome.failed() {
			l.times.Note(o.Key, info.Duration)
		}
	}
	l.call.cancel()
	l.slot.Release()
	return storing{l.set, l.call.items}
}

// LoadContext returns the context of the Loader of a fill, or nil if none has been called.
func LoadContext(f *flight.Fill[Result]) context.Context {
	if call := f.Call.Load(); call != nil {
		return call.Context
	}
	return nil
}

// Previous returns the value that the running load of key replaces, or nil. ctx is the context of the Loader.
func Previous(ctx context.Context, key string) (any, event.ValueInfo) {
	if r, ok := flight.WorkOf(ctx).(*running); ok {
		for _, o := range r.items {
			if o.Key == key {
				return r.previous(o)
			}
		}
	}
	return nil, event.ValueInfo{}
}

func (r *running) previous(o *item) (any, event.ValueInfo) {
	if r.returned.Load() || !o.replaces || r.Fills.Superseded(o.Fill) {
		return nil, event.ValueInfo{}
	}
	old := o.old.Entry
	if old.NotFound || old.Payload == nil || old.Version < r.Store.Type.Policy.Version {
		return nil, event.ValueInfo{}
	}
	v, err := r.Store.Type.DecodeEntry(o.Key, &old)
	if err != nil { // told as a BadValue when it was read
		return nil, event.ValueInfo{}
	}
	return v, value.InfoOf(&old, time.Now())
}

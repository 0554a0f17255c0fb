package fill

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/singlefill/singlefill/internal/bulk"
	"github.com/singlefill/singlefill/internal/event"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/value"
)

// A User calls what the user has given to the cache, which may panic or call runtime.Goexit.
type User interface {
	// Load calls a Loader.
	Load(ctx context.Context, key string, load Loader) Outcome

	// Returned is the outcome of a Loader that has returned value and err.
	Returned(key string, value any, err error) Outcome

	// LoadMany calls a ManyLoader.
	LoadMany(ctx context.Context, keys []string, load ManyLoader) bulk.Outcome

	// Panicked is the outcome of a panic with the argument p, or of runtime.Goexit, for which p is nil. It is called
	// by a deferred function: the stack is that of the panic.
	Panicked(p any) Outcome

	// IsNotFound reports whether the source has no such value.
	IsNotFound(err error) bool

	// NameOf returns the name of an error in Options.Errors, or "".
	NameOf(err error) string

	// RemoteError is the error that the failure record of another process stands for.
	RemoteError(key, record string) error
}

// A Loader is that of the user, without its type.
type Loader interface {
	Load(ctx context.Context, key string) (value any, err error)
}

// A ManyLoader is that of the user, without its type.
type ManyLoader interface {
	LoadMany(ctx context.Context, keys []string) (bulk.Outcome, error)
}

// An Outcome is what a Loader has brought.
type Outcome struct {
	Value    any
	Life     time.Duration // of Value
	Err      error
	Text     string // of Err
	NotFound bool   // Err is ErrNotFound or wraps it
	NoStale  bool   // Err is ErrNoStale or wraps it
	Passing  bool   // Err says nothing about the next load: it is a panic, or of a context
}

// ErrNoStale is the public error of this name.
var ErrNoStale = errors.New("singlefill: no stale value may be served")

// A load is a running load, and what of it must end with it.
type load struct {
	unlocked bool // Redis does not answer: the load has no lock, and its value is not stored
	began    flight.Stamp
	cancel   func()
	stop     func() // ends the renewals of the lock
}

// callLoader is the turn in which the Source loads. The goroutine of a Loader that has not returned by LoadTimeout,
// or when loads are aborted, is abandoned: the fill goes on in another one.
func (x *filling) callLoader(ctx context.Context) state {
	loadCtx := x.beginLoad(ctx)
	x.Events.LoadBegun(x.fill.Refresh)
	if x.from.Seat == nil {
		// Not context.AfterFunc, since the context also ends when the fill is superseded.
		defer time.AfterFunc(x.LoadTimeout, func() {
			<-loadCtx.Done() // at its deadline, which is now, and not because loaded cancels it
			x.abandonLoad(ctx, x.tooLong())
		}).Stop()
		defer context.AfterFunc(x.Fills.Aborting(), func() { x.abandonLoad(ctx, flight.ErrClosed) })()
	}
	o := outcome{Outcome: x.outcomeOf(loadCtx)}
	o.superseded = o.Err != nil && x.superseded.Load()
	o.Passing = o.Passing || o.Err != nil && loadCtx.Err() != nil // whatever the Loader makes of the end of its context
	if !x.claim() {
		return elsewhere
	}
	x.loaded(o)
	return storing
}

// abandonLoad goes on in this goroutine, unless the Loader has returned.
func (x *filling) abandonLoad(ctx context.Context, err error) {
	if x.claim() {
		x.loaded(outcome{Outcome: Outcome{Err: err, Text: err.Error(), Passing: true}})
		x.run(ctx, storing)
	}
}

// beginLoad returns a context that ends at LoadTimeout, or earlier by cancel. That of a fill of many keys
// ends by cancel only: the fill may still wait for its call of the ManyLoader, which internal/bulk ends.
func (x *filling) beginLoad(ctx context.Context) (loadCtx context.Context) {
	if x.load.unlocked && x.lock.InDoubt {
		lock := *x.lock
		x.lock.InDoubt = false
		x.Fills.Behind(func() { x.abandon(ctx, lock) })
	}
	if x.load.unlocked {
		x.Events.LoadUnlocked()
	}
	var cancel func()
	if x.from.Seat == nil {
		loadCtx, cancel = context.WithTimeout(ctx, x.LoadTimeout)
	} else {
		loadCtx, cancel = context.WithCancel(ctx)
	}
	x.load.cancel = cancel
	x.load.began = x.Fills.BeginLoad(x.fill, func() {
		x.superseded.Store(true)
		cancel()
	})
	if x.load.unlocked {
		return loadCtx
	}
	x.load.stop = x.renew(loadCtx)
	if x.Tags != nil && x.from.Seat == nil { // fills of many keys share those of their load
		x.since = x.Tags.Sequences(loadCtx)
	}
	return loadCtx
}

// renewAfter is the age at which a lock is first renewed. A quicker load needs no timer for
// renewals.
const renewAfter = 10 * time.Millisecond

// renew renews the lock until stop is called. A caller that joins brings the next renewal forward,
// so that a lost lock is noticed soon.
func (x *filling) renew(ctx context.Context) (stop func()) {
	return x.Fills.Later(min(renewAfter, x.LockTTL/3), func() {
		x.lock.Keep(ctx, x.fill.Wake, func() {
			x.Events.LockLost()
			x.Fills.LockLost(x.fill)
		})
	})
}

// outcomeOf calls the Loader, or waits for a call of the ManyLoader.
func (x *filling) outcomeOf(ctx context.Context) Outcome {
	key, seat := x.fill.Key, x.from.Seat
	ctx = inside(x.fill.Load.Inside(ctx), x)
	if seat == nil && x.Fills.Aborting().Err() != nil {
		return Outcome{Err: flight.ErrClosed, Passing: true}
	}
	if seat == nil {
		return x.User.Load(x.begun(ctx, key, &x.fill.Call), key, x.from.Loader)
	}
	v, err := seat.Load(ctx, key) // its call of the ManyLoader begins later
	if err == bulk.ErrAbandoned {
		err = x.tooLong()
	}
	return x.User.Returned(key, v, err)
}

// begun is called before a Loader or ManyLoader is. key is the first of its keys; calls has the place of
// each of them where its fill finds the call.
func (f *Filler) begun(ctx context.Context, key string, calls ...*atomic.Pointer[flight.Call]) context.Context {
	ctx = f.Events.LoadStart(ctx, key)
	call := &flight.Call{Context: ctx, Keys: len(calls), Begun: time.Now()}
	for _, place := range calls {
		place.Store(call)
	}
	return ctx
}

// claim reports whether the fill goes on in this goroutine: in that of the Loader, or, if it has not returned at
// LoadTimeout, in another one.
func (x *filling) claim() bool { return x.returned.CompareAndSwap(false, true) }

// loaded takes the outcome of the Source.
func (x *filling) loaded(o outcome) {
	o.info.Key, o.info.Refresh, o.info.Queued, o.info.Err = x.fill.Key, x.fill.Refresh, x.queued, o.Err
	if o.call = x.fill.Call.Load(); o.call != nil {
		o.info.Keys, o.info.Duration = o.call.Keys, time.Since(o.call.Begun)
	}
	o.info.Unlocked = x.load.unlocked
	x.outcome = o
	x.Events.LoadEnded()
	if !x.load.unlocked {
		x.load.stop()
	}
	x.load.cancel()
	x.slot.Release()
	if convoy := x.from.Seat.Stores(); x.load.unlocked {
		convoy.Leave()
	} else {
		x.lock.Convoy = convoy
	}
	if !x.load.unlocked && !o.failed() {
		x.times.Note(x.fill.Key, o.info.Duration)
	}
}

// tooLong is the error of a load that was abandoned.
func (x *filling) tooLong() error {
	return fmt.Errorf("singlefill: the load took longer than LoadTimeout (%v): %w", x.LoadTimeout, context.DeadlineExceeded)
}

// LoadContext returns the context of the Loader of a fill, or nil if none has been called.
func LoadContext(f *flight.Fill[Result]) context.Context {
	if call := f.Call.Load(); call != nil {
		return call.Context
	}
	return nil
}

// told tells what has become of a load.
func (x *filling) told(ctx context.Context) {
	o := &x.outcome
	if o.call != nil {
		ctx = o.call.Context
	}
	x.Events.LoadDone(ctx, o.info, o.NotFound)
}

// fillsKey is the key under which the context of a Loader has its fills: those of one call of a
// ManyLoader are several.
type fillsKey struct{}

func inside(ctx context.Context, fills ...*filling) context.Context {
	return context.WithValue(ctx, fillsKey{}, fills)
}

// Outside returns the context of a Loader that works for no fill.
func Outside(ctx context.Context) context.Context { return inside(ctx) }

func fillsOf(ctx context.Context) []*filling {
	fills, _ := ctx.Value(fillsKey{}).([]*filling)
	return fills
}

// Previous returns the value that the running load of key replaces, or nil. ctx is that of the Loader.
func Previous(ctx context.Context, key string) (any, event.ValueInfo) {
	for _, x := range fillsOf(ctx) {
		if x.fill.Key == key {
			return x.previous()
		}
	}
	return nil, event.ValueInfo{}
}

func (x *filling) previous() (any, event.ValueInfo) {
	old := x.old.Entry
	if !x.replaces || old.NotFound || old.Payload == nil || x.returned.Load() || x.Fills.Superseded(x.fill) {
		return nil, event.ValueInfo{}
	}
	v, err := x.Store.Type.DecodeEntry(x.fill.Key, &old)
	if err != nil { // told as a BadValue when it was read
		return nil, event.ValueInfo{}
	}
	return v, value.InfoOf(&old, time.Now())
}

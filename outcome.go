package singlefill

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/filllock"
	"github.com/singlefill/singlefill/internal/flight"
)

// An outcome is how a load ended, and what happened to its value.
type outcome struct {
	LoadInfo
	value      any
	entry      entry.Entry   // of value, or of ErrNotFound
	life       time.Duration // of value
	notFound   bool          // Err is ErrNotFound or wraps it
	text       string        // of Err
	superseded bool          // the load was cancelled because no caller could have had its value

	call   *flight.Call   // of the Loader; nil: there was none
	convoy *client.Convoy // with what the command goes that stores it
}

func (o outcome) failed() bool { return o.Err != nil && !o.notFound }

func (o outcome) result() result {
	return result{value: o.value, entry: o.entry, at: o.entry.WrittenAt, freshness: fresh, err: o.Err, failed: o.failed()}
}

// call runs the Loader, and then done, once, with its outcome: in this goroutine, or, if the Loader
// has not returned at LoadTimeout, in another one. The goroutine of a Loader that hangs is
// abandoned.
func (x *filling) call(l running, done func(o outcome)) {
	f := x.fill
	x.counters.loads.Add(1)
	if f.Refresh {
		x.counters.refreshes.Add(1)
	}
	x.counters.loading.Add(1)
	begun := time.Now()
	finish := func(o outcome) {
		if x.returned.CompareAndSwap(false, true) {
			x.counters.loading.Add(-1)
			o.Key, o.Refresh, o.Duration, o.Queued = f.Key, f.Refresh, time.Since(begun), x.queued
			if o.call = f.Call.Load(); o.call != nil {
				o.Keys = o.call.Keys
			}
			done(o)
		}
	}
	// Not context.AfterFunc, since the context also ends when the fill is superseded.
	timeout := time.AfterFunc(x.opts.loadTimeout, func() {
		<-l.ctx.Done() // at its deadline, which is now, and not because finish cancels it
		var o outcome
		o.Err = fmt.Errorf("singlefill: load of %.100q took longer than LoadTimeout (%v): %w", f.Key, x.opts.loadTimeout, context.DeadlineExceeded)
		o.text = o.Err.Error()
		finish(o)
	})
	x.protect(l.ctx, func(o outcome) {
		timeout.Stop()
		finish(o)
	})
}

// protect runs the code of the user, and reports a panic or runtime.Goexit as the outcome.
func (x *filling) protect(ctx context.Context, done func(o outcome)) {
	var o outcome
	returned := false
	defer func() {
		if !returned {
			p := recover()
			if p == nil { // panic(nil) has not been nil since Go 1.21
				p = "runtime.Goexit was called"
			}
			o.Err = &PanicError{Value: p, Stack: debug.Stack()}
			o.notFound, o.text = false, o.Err.Error()
			x.counters.loadPanics.Add(1)
		}
		done(o)
	}()
	key := x.fill.Key
	ctx = x.fill.Load.Inside(ctx)
	if x.seat.bulk == nil { // otherwise the call of the ManyLoader begins later
		ctx = x.loadStart(ctx, key, &x.fill.Call)
	}
	o.value, o.Err = x.load.load(ctx, key)
	o.convoy = x.seat.stores()
	if o.Err == nil {
		o.life = x.lifeOf(key, o.value)
	} else {
		o.notFound, o.text = isNotFound(o.Err), o.Err.Error()
		o.superseded = x.superseded.Load()
	}
	returned = true
}

// isNotFound reports whether the source has no such value. A panic tells nothing of the source, whatever
// its argument: that of a ManyLoader comes as an error.
func isNotFound(err error) bool {
	_, panicked := errors.AsType[*PanicError](err)
	return !panicked && errors.Is(err, ErrNotFound)
}

// encode returns the entry to store for an outcome, or nil and the note with which to release the
// lock.
func (c *engine) encode(o *outcome) (data []byte, note filllock.ReleaseNote) {
	switch {
	case o.Err == nil:
		o.entry.Payload, o.StoreErr = c.values.encode(o.value)
	case o.notFound:
		o.life, note.Failure = c.shorten(c.opts.notFoundTTL), filllock.NotFoundRecord
	case errors.Is(o.Err, ErrClosed):
		return nil, note // this process is closing; other processes can still load
	default:
		note.Failure = filllock.FailureRecord(c.opts.errors.nameOf(o.Err), o.text)
		return nil, note
	}
	o.entry.NotFound, o.entry.LoadTime, o.entry.WrittenAt = o.notFound, o.Duration, time.Now()
	if o.StoreErr == nil {
		o.entry.FreshUntil = o.entry.WrittenAt.Add(o.life)
		data, o.StoreErr = o.entry.Encode()
	}
	if o.StoreErr != nil {
		o.entry.Payload = nil
		return nil, note
	}
	o.entry.Payload = data[entry.HeaderLen:] // the codec may have returned memory of the value itself
	if o.life < time.Millisecond {
		note.Drop = true // remove the old entry, too
		return nil, note
	}
	return data, note
}

package singlefill

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/fill"
)

// An outcome is how a load ended, and what became of it.
type outcome[T any] struct {
	LoadInfo
	value      T
	entry      entry.Entry   // of value, or that there is none
	life       time.Duration // how long value is to be kept
	notFound   bool          // Err is ErrNotFound or wraps it
	text       string        // of Err
	superseded bool          // the load was cancelled because no caller could be given its value
}

func (o outcome[T]) failed() bool { return o.Err != nil && !o.notFound }

func (o outcome[T]) result() result[T] {
	return result[T]{value: o.value, entry: o.entry, at: o.entry.WrittenAt, freshness: fresh, err: o.Err, failed: o.failed()}
}

// call runs the Loader, and then done, once, with its outcome: in this goroutine, or, if the Loader has not returned at
// LoadTimeout, in another one, since this one may never be free again.
func (x *filling[T]) call(l running, done func(o outcome[T])) {
	f := x.fill
	x.counters.loads.Add(1)
	if f.Refresh {
		x.counters.refreshes.Add(1)
	}
	x.counters.loading.Add(1)
	begun := time.Now()
	var over atomic.Bool
	settle := func(o outcome[T]) {
		if over.CompareAndSwap(false, true) {
			x.counters.loading.Add(-1)
			o.Key, o.Refresh, o.Duration = f.Key, f.Refresh, time.Since(begun)
			done(o)
		}
	}
	forget := context.AfterFunc(l.bounded, func() {
		var o outcome[T]
		o.Err = fmt.Errorf("singlefill: load of %.100q took longer than LoadTimeout (%v): %w", f.Key, x.opts.loadTimeout, context.DeadlineExceeded)
		o.text = o.Err.Error()
		settle(o)
	})
	x.protect(l.ctx, func(o outcome[T]) {
		forget()
		settle(o)
	})
}

// protect runs what the user wrote so that it always has an outcome: return, panic and Goexit are told apart.
func (x *filling[T]) protect(ctx context.Context, done func(o outcome[T])) {
	var o outcome[T]
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
	if x.opts.trace.LoadStart != nil {
		ctx = x.opts.trace.LoadStart(ctx, key)
	}
	if o.value, o.Err = x.load(ctx, key); o.Err == nil {
		o.life = x.lifeOf(key, o.value)
	} else {
		o.notFound, o.text = errors.Is(o.Err, ErrNotFound), o.Err.Error()
		o.superseded = context.Cause(ctx) == errSuperseded
	}
	returned = true
}

func (c *Cache[T]) loadDone(ctx context.Context, o outcome[T]) {
	n := c.counters
	switch {
	case o.notFound:
		n.loadsNotFound.Add(1)
	case o.Err != nil:
		n.loadErrors.Add(1)
	}
	if o.Stored {
		n.stored.Add(1)
	}
	if o.Fenced {
		n.fenced.Add(1)
	}
	if o.StoreErr != nil {
		n.storeErrors.Add(1)
	}
	if c.opts.trace.LoadDone != nil {
		c.opts.trace.LoadDone(ctx, o.LoadInfo)
	}
}

// encode makes the entry to be stored for an outcome, nil if there is nothing to store, and what to leave instead.
func (c *Cache[T]) encode(o *outcome[T]) (data []byte, leave fill.ReleaseNote) {
	switch {
	case o.Err == nil:
		o.entry.Payload, o.StoreErr = c.marshal(o.value)
	case o.notFound:
		o.life, leave.Failure = c.shorten(c.opts.notFoundTTL), fill.NotFoundRecord
	case errors.Is(o.Err, ErrClosed):
		return nil, leave // it asked a cache that is being closed here: others can do better
	default:
		leave.Failure = fill.FailureRecord(o.text)
		return nil, leave
	}
	o.entry.NotFound, o.entry.LoadTime, o.entry.WrittenAt = o.notFound, o.Duration, time.Now()
	if o.StoreErr == nil {
		o.entry.FreshUntil = o.entry.WrittenAt.Add(o.life)
		data, o.StoreErr = o.entry.Encode()
	}
	if o.StoreErr != nil {
		o.entry.Payload = nil
		return nil, leave
	}
	o.entry.Payload = data[entry.HeaderLen:] // not what the codec returned, which may be the value's own memory
	if o.life < time.Millisecond {
		leave.Drop = true // also what was kept before
		return nil, leave
	}
	return data, leave
}

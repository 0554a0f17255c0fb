package singlefill

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/fill"
	"github.com/singlefill/singlefill/internal/flight"
)

// An outcome is how a load ended, and what became of it.
type outcome[T any] struct {
	LoadInfo
	value    T
	entry    entry.Entry   // of value, or that there is none
	life     time.Duration // how long value is to be kept
	notFound bool          // Err is ErrNotFound or wraps it
	text     string        // of Err
	replaced bool          // a stale value is served in its place
}

func (o outcome[T]) failed() bool { return o.Err != nil && !o.notFound }

func (o outcome[T]) result() result[T] {
	return result[T]{value: o.value, entry: o.entry, use: fresh, err: o.Err}
}

// call runs the Loader, in a goroutine of its own: it may panic, call runtime.Goexit, or not come back.
func (c *Cache[T]) call(ctx context.Context, f *flight.Flight[result[T]], load Loader[T]) outcome[T] {
	bounded, cancel := context.WithTimeout(f.Load.Inside(ctx), c.opts.loadTimeout)
	defer cancel()
	ctx = bounded
	if c.opts.trace.LoadStart != nil {
		ctx = c.opts.trace.LoadStart(ctx, f.Key)
	}
	c.counters.loads.Add(1)
	if f.Refresh {
		c.counters.refreshes.Add(1)
	}
	c.counters.loading.Add(1)
	defer c.counters.loading.Add(-1)
	begun := time.Now()
	outcomes := make(chan outcome[T], 1)
	go c.protect(ctx, f.Key, load, outcomes)

	var o outcome[T]
	select {
	case o = <-outcomes:
	case <-bounded.Done():
		select {
		case o = <-outcomes:
		default:
			o.Err = fmt.Errorf("singlefill: load of %.100q took longer than LoadTimeout (%v): %w", f.Key, c.opts.loadTimeout, context.DeadlineExceeded)
			o.text = o.Err.Error()
		}
	}
	o.Key, o.Refresh, o.Duration = f.Key, f.Refresh, time.Since(begun)
	return o
}

// protect runs what the user wrote so that it always has an outcome: return, panic and Goexit are told apart.
func (c *Cache[T]) protect(ctx context.Context, key string, load Loader[T], outcomes chan<- outcome[T]) {
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
			c.counters.loadPanics.Add(1)
		}
		outcomes <- o
	}()
	if o.value, o.Err = load(ctx, key); o.Err == nil {
		o.life = c.lifeOf(key, o.value)
	} else {
		o.notFound, o.text = errors.Is(o.Err, ErrNotFound), o.Err.Error()
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

// seal makes the entry to be stored for an outcome, nil if there is nothing to store, and what to leave instead.
func (c *Cache[T]) seal(o *outcome[T]) (data []byte, leave fill.Leave) {
	switch {
	case o.Err == nil:
		o.entry.Payload, o.StoreErr = c.marshal(o.value)
	case o.notFound:
		o.life, leave.Word = c.shorten(c.opts.notFoundTTL), fill.NotFoundWord
	case errors.Is(o.Err, ErrClosed):
		return nil, leave // it asked a cache that is being closed here: others can do better
	default:
		leave.Word = fill.ErrorWord(o.text)
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

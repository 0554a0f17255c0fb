package singlefill

import (
	"context"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/flight"
)

// Trace is a set of optional functions that a [Cache] calls when something happens, synchronously
// and from many goroutines at once: they must be quick and must not panic. No function gets a
// value. Keys may be secret. The contexts of RedisError and BadValue have the values of a caller's
// context and never end.
type Trace struct {
	// Hit is called when the first read of a GetOrLoad or Get finds a value.
	Hit func(ctx context.Context, key string)

	// Miss is called when a GetOrLoad gets its result in another way, or a Get finds nothing.
	Miss func(ctx context.Context, key string)

	// Stale is called, beside Hit or Miss, when a call returns a stale value.
	Stale func(ctx context.Context, key string, info ValueInfo)

	// LoadStart is called before each call of a Loader, or of a ManyLoader with the first of its
	// keys. The Loader gets the context that it returns, which must be ctx or derived from it.
	LoadStart func(ctx context.Context, key string) context.Context

	// LoadDone is called when the outcome of a load has been stored, refused or given up: for each
	// key of a ManyLoader. The calls that waited may have returned before. ctx has the values of
	// the context that LoadStart returned.
	LoadDone func(ctx context.Context, info LoadInfo)

	// ShareDone is called when a GetOrLoad has waited for another call of this process.
	ShareDone func(ctx context.Context, info ShareInfo)

	// WaitDone is called when this process has waited for a load in another one.
	WaitDone func(ctx context.Context, info WaitInfo)

	// AuditDone is called when a hit has been compared with the source, or could not be.
	AuditDone func(ctx context.Context, info AuditInfo)

	// TagDone is called when a DeleteTag or ExpireTag has ended.
	TagDone func(ctx context.Context, info TagInfo)

	// RedisError is called for each command that failed. op is its purpose: get, lock, store,
	// release, renew, abandon, set, delete, expire, clear, tag, near (for its log), wake, fleet
	// (for MaxFleetLoads), audit or ping.
	RedisError func(ctx context.Context, op string, err error)

	// BadValue is called when the bytes under key are not an entry, or cannot be decoded.
	BadValue func(ctx context.Context, key string, err error)

	// NearDropped is called when everything that [Near] has in memory was dropped, because Redis
	// has lost a part of the log before its end. An idle log that expires is not reported.
	NearDropped func()

	// Clearing is called after each step of a Clear, for each master in a goroutine.
	Clearing func(ctx context.Context, info ClearInfo)

	// BreakerChanged is called when the cache stops sending commands to a Redis that does not
	// answer (open), and when it sends them again. With a Cluster: for the first node, and when it
	// sends to all nodes again.
	BreakerChanged func(open bool)

	// breaker is called before BreakerChanged, with the error that has opened the breaker, or nil.
	breaker func(why error)

	// named returns the Trace t for the cache of a namespace; nil: t itself.
	named func(t Trace, namespace string) *Trace
}

// LoadInfo describes a load to [Trace.LoadDone].
type LoadInfo struct {
	Key      string
	Keys     int           // of the ManyLoader's call; 1 for a Loader, 0 if neither has been called
	Duration time.Duration // of the Loader alone
	Queued   time.Duration // for slots of MaxLoads and MaxFleetLoads before
	Err      error         // of the Loader; nil for a value
	StoreErr error         // why the outcome is not in Redis although it should be
	Stored   bool          // the outcome is in Redis: the value, or that there is none
	Fenced   bool          // Redis refused the outcome: the key was changed, or the lock lost
	Refresh  bool          // it ran in the background
	Unlocked bool          // Redis did not answer: other processes may have loaded at the same time
}

// ShareInfo describes to [Trace.ShareDone] how a call has waited for the load of another one.
type ShareInfo struct {
	Key      string
	Duration time.Duration // of the wait
	// Load has the values of the context that LoadStart has returned. It is nil if no Loader has been
	// called in this process.
	Load context.Context
}

func shareInfo(key string, d time.Duration, call *flight.Call) ShareInfo {
	info := ShareInfo{Key: key, Duration: d}
	if call != nil {
		info.Load = client.Detach(call.Context)
	}
	return info
}

// AddTrace adds functions to those of [Options.Trace], which are called first, for what happens
// from now on. They cannot be removed. Nil adds nothing.
func (c *Cache[T]) AddTrace(t *Trace) { c.engine.addTrace(t) }

func (c *engine) addTrace(t *Trace) {
	if t != nil && t.named != nil {
		t = t.named(*t, c.namespace)
	}
	for t != nil {
		old := c.trace.Load()
		if c.trace.CompareAndSwap(old, join(old, t)) {
			return
		}
	}
}

// join returns a Trace that calls the functions of a, and then those of b.
func join(a, b *Trace) *Trace {
	t := &Trace{
		Hit:        then(a.Hit, b.Hit),
		Miss:       then(a.Miss, b.Miss),
		Stale:      then2(a.Stale, b.Stale),
		LoadStart:  a.LoadStart,
		LoadDone:   then(a.LoadDone, b.LoadDone),
		ShareDone:  then(a.ShareDone, b.ShareDone),
		WaitDone:   then(a.WaitDone, b.WaitDone),
		AuditDone:  then(a.AuditDone, b.AuditDone),
		TagDone:    then(a.TagDone, b.TagDone),
		RedisError: then2(a.RedisError, b.RedisError),
		BadValue:   then2(a.BadValue, b.BadValue),
		Clearing:   then(a.Clearing, b.Clearing),
	}
	switch {
	case a.LoadStart == nil:
		t.LoadStart = b.LoadStart
	case b.LoadStart != nil:
		t.LoadStart = func(ctx context.Context, key string) context.Context {
			return b.LoadStart(a.LoadStart(ctx, key), key)
		}
	}
	if t.NearDropped = a.NearDropped; a.NearDropped == nil {
		t.NearDropped = b.NearDropped
	} else if b.NearDropped != nil {
		t.NearDropped = func() { a.NearDropped(); b.NearDropped() }
	}
	if t.BreakerChanged = a.BreakerChanged; a.BreakerChanged == nil {
		t.BreakerChanged = b.BreakerChanged
	} else if b.BreakerChanged != nil {
		t.BreakerChanged = func(open bool) { a.BreakerChanged(open); b.BreakerChanged(open) }
	}
	if t.breaker = a.breaker; a.breaker == nil {
		t.breaker = b.breaker
	} else if b.breaker != nil {
		t.breaker = func(why error) { a.breaker(why); b.breaker(why) }
	}
	return t
}

func then[A any](f, g func(context.Context, A)) func(context.Context, A) {
	switch {
	case f == nil:
		return g
	case g == nil:
		return f
	}
	return func(ctx context.Context, a A) { f(ctx, a); g(ctx, a) }
}

func then2[A, B any](f, g func(context.Context, A, B)) func(context.Context, A, B) {
	switch {
	case f == nil:
		return g
	case g == nil:
		return f
	}
	return func(ctx context.Context, a A, b B) { f(ctx, a, b); g(ctx, a, b) }
}

// WaitInfo describes a wait for another process to [Trace.WaitDone].
type WaitInfo struct {
	Key      string
	Duration time.Duration
	Polls    int // commands sent during the wait
}

package singlefill

import (
	"context"
	"time"

	"github.com/singlefill/singlefill/internal/event"
)

// Trace is a set of optional functions that a [Cache] calls when something happens, synchronously
// and from many goroutines at once: they must be quick, and must return. After a panic or runtime.Goexit
// the calls that the function is called for return a [*PanicError]. A call in whose own goroutine
// runtime.Goexit is called does not return, and a panic in a goroutine that works for no call ends the
// process. No function gets a value. Keys may be secret. The contexts of RedisError and BadValue have the
// values of a caller's context and never end.
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

	// RedisError is called for each command that failed, but not for the pings of an outage. op is its purpose: get,
	// lock, store, release, renew, abandon, set, delete, expire, clear, tag, near (for its log), wake, fleet
	// (for MaxFleetLoads), audit, check, or ping (only if BreakerChanged has panicked).
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
	// StoreErr is why the outcome is not in Redis although it should be; with ErrNoStale, why the old value may be.
	StoreErr error
	Stored   bool // the outcome is in Redis: the value, or that there is none
	Fenced   bool // Redis refused the outcome: the key was changed, or the lock lost
	Refresh  bool // it ran in the background
	Unlocked bool // Redis did not answer: other processes may have loaded at the same time
}

// ShareInfo describes to [Trace.ShareDone] how a call has waited for the load of another one.
type ShareInfo struct {
	Key      string
	Duration time.Duration // of the wait
	// Load has the values of the context that LoadStart has returned. It is nil if no Loader has been
	// called in this process.
	Load context.Context
}

// WaitInfo describes a wait for another process to [Trace.WaitDone].
type WaitInfo struct {
	Key      string
	Duration time.Duration
	Polls    int // commands sent during the wait
}

// AuditInfo describes to [Trace.AuditDone] how a fresh hit compares with the source: see
// [Options.Audit].
type AuditInfo struct {
	Key string
	// Stale reports that the source had another value, and Redis the same entry a second later.
	Stale bool
	Age   time.Duration // of the value, when it was served
	Near  bool          // it was served from memory
	// Err is why nothing was found out: the load failed, or was cut short by a call that needed the
	// key; its value could not be encoded; Redis did not answer; or the cache was closed.
	Err error
}

// TagInfo describes a DeleteTag or ExpireTag to [Trace.TagDone].
type TagInfo struct {
	Tags    []string
	Expire  bool // by ExpireTag
	Keys    int  // that were found and invalidated; a key with two of the tags may count twice
	Rebuilt bool // what was known of the tags may have been lost: all values were read to find it out again
	Cleared bool // Rebuilt, and nothing told the tags of any value: all were removed, as by Clear
	Err     error
}

// ClearInfo tells [Trace.Clearing] how far a Clear is.
type ClearInfo struct {
	Pass    int   // 1: locks; 2: values
	Scanned int64 // keys of the database that this pass has looked at, about
	Keys    int64 // keys of the database when the pass began; 0: Redis does not say
	Removed int64 // values that have been removed
}

// addTo adds the functions of t, or of nil none, for the cache of a namespace.
func (t *Trace) addTo(events *event.Sink, namespace string) {
	if t == nil {
		return
	}
	if t.named != nil {
		t = t.named(*t, namespace)
	}
	events.Add(&event.Trace{BreakerChanged: t.breaker})
	events.Add(t.functions())
}

// functions returns the functions of t as the rooms call them, which do not know this package.
func (t *Trace) functions() *event.Trace {
	to := &event.Trace{
		Hit: t.Hit, Miss: t.Miss, LoadStart: t.LoadStart, RedisError: t.RedisError, BadValue: t.BadValue,
		NearDropped: t.NearDropped,
	}
	if f := t.BreakerChanged; f != nil {
		to.BreakerChanged = func(why error) { f(why != nil) }
	}
	if f := t.Stale; f != nil {
		to.Stale = func(ctx context.Context, key string, i event.ValueInfo) { f(ctx, key, infoOf(i)) }
	}
	if f := t.LoadDone; f != nil {
		to.LoadDone = func(ctx context.Context, i event.LoadInfo) { f(ctx, LoadInfo(i)) }
	}
	if f := t.ShareDone; f != nil {
		to.ShareDone = func(ctx context.Context, i event.ShareInfo) { f(ctx, ShareInfo(i)) }
	}
	if f := t.WaitDone; f != nil {
		to.WaitDone = func(ctx context.Context, i event.WaitInfo) { f(ctx, WaitInfo(i)) }
	}
	if f := t.AuditDone; f != nil {
		to.AuditDone = func(ctx context.Context, i event.AuditInfo) { f(ctx, AuditInfo(i)) }
	}
	if f := t.TagDone; f != nil {
		to.TagDone = func(ctx context.Context, i event.TagInfo) { f(ctx, TagInfo(i)) }
	}
	if f := t.Clearing; f != nil {
		to.Clearing = func(ctx context.Context, i event.ClearInfo) { f(ctx, ClearInfo(i)) }
	}
	return to
}

// Package event counts what happens in a cache, and calls its Trace. All rooms report to a Sink, which calls
// none of them.
package event

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/singlefill/singlefill/internal/client"
)

// A Sink takes the events of one cache. Only its methods change the counts.
type Sink struct {
	trace atomic.Pointer[Trace] // never nil
	_     [56]byte              // calls write the counts behind, and only read trace
	counters
}

func NewSink() *Sink {
	s := new(Sink)
	s.trace.Store(new(Trace))
	return s
}

// Add adds the functions of t, to be called from now on behind those that are there.
func (s *Sink) Add(t *Trace) {
	for {
		old := s.trace.Load()
		if s.trace.CompareAndSwap(old, join(old, t)) {
			return
		}
	}
}

// Hit takes a call whose first read found a value: in memory (near), or in Redis. info may be
// nil if the value is fresh.
func (s *Sink) Hit(ctx context.Context, key string, near bool, info *ValueInfo) {
	stale := info != nil && info.Stale
	if near {
		s.near.note(stale)
	} else {
		s.redis.note(stale)
	}
	t := s.trace.Load()
	if t.Hit != nil {
		t.Hit(ctx, key)
	}
	if stale && t.Stale != nil {
		t.Stale(ctx, key, *info)
	}
}

// Miss takes a call that got its result in another way, or none.
func (s *Sink) Miss(ctx context.Context, key string, info ValueInfo) {
	s.misses.Add(1)
	switch {
	case !info.Stale:
	case info.Err != nil:
		s.staleOnError.Add(1)
	default:
		s.staleMisses.Add(1)
	}
	t := s.trace.Load()
	if t.Miss != nil {
		t.Miss(ctx, key)
	}
	if info.Stale && t.Stale != nil {
		t.Stale(ctx, key, info)
	}
}

// Shared takes a call for which another call of this process worked.
func (s *Sink) Shared() { s.shared.Add(1) }

// ShareDone takes the end of a wait for the load of another call. load is the context of that load's Loader, or nil
// if none has been called.
func (s *Sink) ShareDone(ctx context.Context, key string, took time.Duration, load context.Context) {
	t := s.trace.Load()
	if t.ShareDone == nil {
		return
	}
	info := ShareInfo{Key: key, Duration: took}
	if load != nil {
		info.Load = client.Detach(load)
	}
	t.ShareDone(ctx, info)
}

// WaitDone takes the end of a wait for another process, which took polls commands.
func (s *Sink) WaitDone(ctx context.Context, key string, begun time.Time, polls int) {
	s.waits.Add(1)
	if t := s.trace.Load(); t.WaitDone != nil {
		t.WaitDone(ctx, WaitInfo{Key: key, Duration: time.Since(begun), Polls: polls})
	}
}

// LoadBegun takes a load for one key, before its Loader is called.
func (s *Sink) LoadBegun(refresh bool) {
	s.loads.Add(1)
	if refresh {
		s.refreshes.Add(1)
	}
	s.loading.Add(1)
}

// LoadUnlocked takes a load without the fill lock.
func (s *Sink) LoadUnlocked() { s.loadsUnlocked.Add(1) }

// LoadEnded takes the end of a load for one key: the Loader has returned, or is given up.
func (s *Sink) LoadEnded() { s.loading.Add(-1) }

// LoadStart returns the context for a Loader, or a ManyLoader whose first key is key.
func (s *Sink) LoadStart(ctx context.Context, key string) context.Context {
	if t := s.trace.Load(); t.LoadStart != nil {
		ctx = t.LoadStart(ctx, key)
	}
	return ctx
}

// LoadPanics takes the loads of keys whose Loader panicked or called runtime.Goexit.
func (s *Sink) LoadPanics(keys int) { s.loadPanics.Add(int64(keys)) }

// LoadUnlimited takes a load that MaxFleetLoads could not limit.
func (s *Sink) LoadUnlimited() { s.loadsUnlimited.Add(1) }

// LockLost takes a lock that was found lost while its load ran.
func (s *Sink) LockLost() { s.locksLost.Add(1) }

// CountLoad counts a load whose outcome has been stored, refused or given up. notFound tells that info.Err is
// ErrNotFound.
func (s *Sink) CountLoad(info *LoadInfo, notFound bool) {
	switch {
	case notFound:
		s.loadsNotFound.Add(1)
	case info.Err != nil:
		s.loadErrors.Add(1)
	}
	if info.Stored {
		s.stored.Add(1)
	}
	if info.Fenced {
		s.fenced.Add(1)
	}
	if info.StoreErr != nil {
		s.storeErrors.Add(1)
	}
}

// LoadDone tells the end of a load that has been counted.
func (s *Sink) LoadDone(ctx context.Context, info LoadInfo) {
	if t := s.trace.Load(); t.LoadDone != nil {
		t.LoadDone(client.Detach(ctx), info)
	}
}

func (s *Sink) AuditDone(ctx context.Context, info AuditInfo) {
	if info.Err == nil {
		s.audits.Add(1)
	}
	if info.Stale {
		s.auditsStale.Add(1)
	}
	if t := s.trace.Load(); t.AuditDone != nil {
		t.AuditDone(ctx, info)
	}
}

func (s *Sink) TagDone(ctx context.Context, info TagInfo) {
	s.tagCalls.Add(1)
	s.tagKeys.Add(int64(info.Keys))
	if info.Rebuilt {
		s.tagRebuilds.Add(1)
	}
	if info.Cleared {
		s.tagClears.Add(1)
	}
	if t := s.trace.Load(); t.TagDone != nil {
		t.TagDone(ctx, info)
	}
}

// TellsClearing reports whether somebody wants to know how far a Clear is.
func (s *Sink) TellsClearing() bool { return s.trace.Load().Clearing != nil }

func (s *Sink) Clearing(ctx context.Context, info ClearInfo) {
	if t := s.trace.Load(); t.Clearing != nil {
		t.Clearing(ctx, info)
	}
}

// BadValue takes bytes under a key that are not an entry, or cannot be decoded.
func (s *Sink) BadValue(ctx context.Context, key string, err error) {
	s.badValues.Add(1)
	if t := s.trace.Load(); t.BadValue != nil {
		t.BadValue(client.Detach(ctx), key, err)
	}
}

// NearDropped takes the loss of all that is in memory.
func (s *Sink) NearDropped() {
	s.nearDrops.Add(1)
	if t := s.trace.Load(); t.NearDropped != nil {
		t.NearDropped()
	}
}

// RedisError takes a command that failed. op is its purpose.
func (s *Sink) RedisError(ctx context.Context, op string, err error) {
	s.redisErrors.Add(1)
	if client.Refused(err) {
		s.refused.Add(1)
	}
	if t := s.trace.Load(); t.RedisError != nil {
		t.RedisError(ctx, op, err)
	}
}

// BreakerChanged takes the error that has opened the breaker, or nil when it has closed.
func (s *Sink) BreakerChanged(why error) {
	if why != nil {
		s.breakerOpens.Add(1)
	}
	if t := s.trace.Load(); t.BreakerChanged != nil {
		t.BreakerChanged(why)
	}
}

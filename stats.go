package singlefill

import (
	"context"
	"errors"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/flight"
)

// Stats are counts since [New], except where a field says "now". They are read one by one, so sums
// are exact only while no call runs.
type Stats struct {
	// Calls.
	Hits         int64 // calls whose first read found a value, or ErrNotFound, in memory or in Redis
	NearHits     int64 // of Hits, those in memory: see Near
	StaleHits    int64 // of Hits, those that found a stale value
	NearStale    int64 // of NearHits, those that found a stale value
	Misses       int64 // GetOrLoad calls answered in another way, and Get calls that returned ErrMiss
	Shared       int64 // of Misses, those for which another call of this process worked
	Stale        int64 // calls that returned a stale value, hits and misses
	StaleOnError int64 // of Stale, misses whose load failed or took too long

	// Loads.
	Loads          int64 // loads started
	Refreshes      int64 // of Loads, those in the background
	LoadsNotFound  int64 // loads that ended with ErrNotFound
	LoadErrors     int64 // loads that ended with another error, a panic, or at LoadTimeout
	LoadPanics     int64 // of LoadErrors, loads that panicked or called runtime.Goexit
	LoadsUnlocked  int64 // loads without the fill lock, because Redis did not answer
	LoadsUnlimited int64 // loads that MaxFleetLoads could not limit, because Redis did not answer
	Loading        int64 // loads running now
	Queued         int64 // loads waiting now for a slot of MaxLoads or MaxFleetLoads

	// Outcomes of loads.
	Stored      int64 // stored in Redis
	StoreErrors int64 // not stored: Redis failed or refused, or the value could not be encoded
	Fenced      int64 // refused: the key was changed, or the lock lost, during the load

	// Processes.
	Waits     int64 // waits for a load in another process
	LocksLost int64 // locks found lost while their load ran

	// Audits: see Options.Audit.
	Audits      int64 // fresh hits that were compared with the source
	AuditsStale int64 // of Audits, those that found the hit stale

	// Tags: see Options.Tags.
	TagCalls    int64 // calls of DeleteTag and ExpireTag
	TagKeys     int64 // keys that they found and invalidated
	TagRebuilds int64 // of TagCalls, those that had to read all values: see DeleteTag
	TagClears   int64 // of TagRebuilds, those that had to remove all values: see TagInfo.Cleared

	// Near.
	NearDrops int64         // times everything in memory was dropped: see Trace.NearDropped
	NearAge   time.Duration // age of the newest proof that memory is current; -1 without a proof, 0 without Near

	// Redis.
	RedisErrors    int64 // commands that failed
	Refused        int64 // of RedisErrors, those that the server refused: no right, no memory, read-only
	BadValues      int64 // stored bytes that were not an entry or could not be decoded
	BreakerOpens   int64 // times the cache stopped sending commands to Redis
	BreakerOpen    bool  // the cache sends no commands now; with a Cluster: not to all nodes
	CommandsQueued int64 // commands waiting now for a connection of the client's pool
}

// counters are the counts from which Stats are made.
type counters struct {
	redis, near                                                          hits
	misses, staleMisses, staleOnError, shared, refreshes                 atomic.Int64
	loads, loadsNotFound, loadErrors, loadPanics, loadsUnlocked, loading atomic.Int64
	loadsUnlimited                                                       atomic.Int64
	stored, storeErrors, fenced, locksLost                               atomic.Int64
	audits, auditsStale                                                  atomic.Int64
	tagCalls, tagKeys, tagRebuilds, tagClears                            atomic.Int64
	waits, redisErrors, refused, badValues, breakerOpens                 atomic.Int64
}

// hits are the hits in Redis, or in memory.
type hits struct {
	fresh spread
	stale atomic.Int64
}

// A spread is a count of what many goroutines do at the same time: it is a sum of several, each in a line of
// memory of its own. A goroutine adds to the one that the address of its stack gives, so that the line stays
// with its processor.
type spread [16]struct {
	n atomic.Int64
	_ [56]byte
}

func (s *spread) inc() {
	var here byte
	const golden = 0x9E3779B97F4A7C15
	i := uint64(uintptr(unsafe.Pointer(&here))) >> 11 * golden >> 60
	s[i].n.Add(1)
}

func (s *spread) Load() (n int64) {
	for i := range s {
		n += s[i].n.Load()
	}
	return n
}

// Stats returns the counts so far, also after Close.
func (c *Cache[T]) Stats() Stats { return c.engine.stats() }

func (c *engine) stats() Stats {
	n := c.counters
	stale, nearStale, onError := n.redis.stale.Load(), n.near.stale.Load(), n.staleOnError.Load()
	nearHits := n.near.fresh.Load() + nearStale
	s := Stats{
		Hits: n.redis.fresh.Load() + stale + nearHits, NearHits: nearHits, StaleHits: stale + nearStale, NearStale: nearStale,
		Misses: n.misses.Load(), Stale: stale + nearStale + n.staleMisses.Load() + onError, StaleOnError: onError,
		Shared: n.shared.Load(), Refreshes: n.refreshes.Load(),
		Loads: n.loads.Load(), LoadsNotFound: n.loadsNotFound.Load(), LoadErrors: n.loadErrors.Load(),
		LoadPanics: n.loadPanics.Load(), LoadsUnlocked: n.loadsUnlocked.Load(), LoadsUnlimited: n.loadsUnlimited.Load(), Loading: n.loading.Load(),
		Stored: n.stored.Load(), StoreErrors: n.storeErrors.Load(), Fenced: n.fenced.Load(),
		Audits: n.audits.Load(), AuditsStale: n.auditsStale.Load(),
		TagCalls: n.tagCalls.Load(), TagKeys: n.tagKeys.Load(), TagRebuilds: n.tagRebuilds.Load(), TagClears: n.tagClears.Load(),
		LocksLost: n.locksLost.Load(), Waits: n.waits.Load(), RedisErrors: n.redisErrors.Load(), Refused: n.refused.Load(),
		BadValues: n.badValues.Load(), BreakerOpens: n.breakerOpens.Load(), BreakerOpen: c.client.AnyAway(),
		CommandsQueued: c.client.Queued(), Queued: int64(c.slots.Queued()),
	}
	if c.near != nil {
		s.NearDrops, s.NearAge = c.near.dropped.Load(), c.near.Age()
	}
	return s
}

// The methods below count an event and call the function of Trace for it.

func (c *engine) noteHit(ctx context.Context, key string, n *hits, info ValueInfo) {
	if info.Stale {
		n.stale.Add(1)
	} else {
		n.fresh.inc()
	}
	t := c.trace.Load()
	if t.Hit != nil {
		t.Hit(ctx, key)
	}
	if info.Stale && t.Stale != nil {
		t.Stale(ctx, key, info)
	}
}

func (c *engine) noteMiss(ctx context.Context, key string, info ValueInfo) {
	c.counters.misses.Add(1)
	switch {
	case !info.Stale:
	case info.Err != nil:
		c.counters.staleOnError.Add(1)
	default:
		c.counters.staleMisses.Add(1)
	}
	t := c.trace.Load()
	if t.Miss != nil {
		t.Miss(ctx, key)
	}
	if info.Stale && t.Stale != nil {
		t.Stale(ctx, key, info)
	}
}

// loadStart is called before a Loader or ManyLoader is. key is the first of its keys; calls has the place of
// each of them where its fill finds the call.
func (c *engine) loadStart(ctx context.Context, key string, calls ...*atomic.Pointer[flight.Call]) context.Context {
	if t := c.trace.Load(); t.LoadStart != nil {
		ctx = t.LoadStart(ctx, key)
	}
	call := &flight.Call{Context: ctx, Keys: len(calls), Begun: time.Now()}
	for _, place := range calls {
		place.Store(call)
	}
	return ctx
}

func (c *engine) loadDone(ctx context.Context, o outcome) {
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
	t := c.trace.Load()
	if t.LoadDone == nil {
		return
	}
	if o.call != nil {
		ctx = client.Detach(o.call.Context)
	}
	t.LoadDone(ctx, o.LoadInfo)
}

func (c *engine) auditDone(ctx context.Context, info AuditInfo) {
	if info.Err == nil {
		c.counters.audits.Add(1)
	}
	if info.Stale {
		c.counters.auditsStale.Add(1)
	}
	if t := c.trace.Load(); t.AuditDone != nil {
		t.AuditDone(ctx, info)
	}
}

func (c *engine) tagDone(ctx context.Context, info TagInfo) {
	c.counters.tagCalls.Add(1)
	c.counters.tagKeys.Add(int64(info.Keys))
	if info.Rebuilt {
		c.counters.tagRebuilds.Add(1)
	}
	if info.Cleared {
		c.counters.tagClears.Add(1)
	}
	if t := c.trace.Load(); t.TagDone != nil {
		t.TagDone(ctx, info)
	}
}

func (c *engine) badValue(ctx context.Context, key string, err error) {
	c.counters.badValues.Add(1)
	if t := c.trace.Load(); t.BadValue != nil {
		t.BadValue(client.Detach(ctx), key, err)
	}
}

func (c *engine) redisFailed(ctx context.Context, op string, err error) {
	c.counters.redisErrors.Add(1)
	if refusal(err) {
		c.counters.refused.Add(1)
	}
	if t := c.trace.Load(); t.RedisError != nil {
		t.RedisError(ctx, op, err)
	}
}

// breakerChanged is told the error that has opened the breaker, or nil when it has closed.
func (c *engine) breakerChanged(why error) {
	t := c.trace.Load()
	if why != nil {
		c.counters.breakerOpens.Add(1)
	}
	if t.breaker != nil {
		t.breaker(why)
	}
	if t.BreakerChanged != nil {
		t.BreakerChanged(why != nil)
	}
}

// refusal reports whether a server that could answer has refused a command.
func refusal(err error) bool {
	var reply redis.Error
	return errors.As(err, &reply) && !client.Unreachable(err)
}

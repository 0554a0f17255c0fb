package singlefill

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
)

// Stats are counts since [New], except where a field says "now". They are read one by one, so sums
// of several fields are exact only while no call runs.
type Stats struct {
	// Calls.
	Hits         int64 // calls whose first read found a value, or ErrNotFound, in memory or in Redis
	NearHits     int64 // of Hits, those in memory: see Near
	Misses       int64 // GetOrLoad calls answered in another way, and Get calls that returned ErrMiss
	Shared       int64 // of these, GetOrLoad calls for which another call of this process read, waited or loaded
	Stale        int64 // of these, calls that returned a stale value
	StaleOnError int64 // of Stale, calls that got it because a load failed or took too long for them

	// Loads.
	Loads          int64 // loads started
	Refreshes      int64 // of Loads, those in the background of a value that could still be served
	LoadsNotFound  int64 // loads that ended with ErrNotFound
	LoadErrors     int64 // loads that ended with another error, a panic, or at LoadTimeout
	LoadPanics     int64 // of LoadErrors, loads that panicked or called runtime.Goexit
	LoadsUnlocked  int64 // loads without the fill lock, because Redis did not answer
	LoadsUnlimited int64 // times a load went on without a slot of MaxFleetLoads that Redis did not grant or refuse
	Loading        int64 // loads running now
	Queued         int64 // loads waiting now for a slot of MaxLoads or MaxFleetLoads

	// Outcomes of loads.
	Stored      int64 // stored in Redis
	StoreErrors int64 // not stored: Redis failed or refused, or the value could not be encoded
	Fenced      int64 // refused: the key was deleted, set or made stale, or the lock was lost during the load

	// Processes.
	Waits     int64 // waits for a load in another process
	LocksLost int64 // locks found lost while their load ran

	// Near.
	NearDrops int64         // times everything in memory was dropped, since Redis had lost a part of the log
	NearAge   time.Duration // age of the newest proof that memory is current; -1 without a proof, 0 without Near

	// Redis.
	RedisErrors    int64 // commands that failed
	Refused        int64 // of RedisErrors, commands that the server refused: no right, no memory, read-only
	BadValues      int64 // stored bytes that were not an entry or could not be decoded
	BreakerOpens   int64 // times the cache stopped sending commands to Redis
	BreakerOpen    bool  // the cache sends no commands now; with a Cluster: not to all nodes
	CommandsQueued int64 // commands waiting now for a connection of the client's pool
}

// counters are the counts from which Stats are made.
type counters struct {
	hits, nearHits, misses, shared, stale, staleOnError, refreshes       atomic.Int64
	loads, loadsNotFound, loadErrors, loadPanics, loadsUnlocked, loading atomic.Int64
	loadsUnlimited                                                       atomic.Int64
	stored, storeErrors, fenced, locksLost                               atomic.Int64
	waits, redisErrors, refused, badValues, breakerOpens                 atomic.Int64
}

// Stats returns the counts so far, also after Close.
func (c *Cache[T]) Stats() Stats {
	n := c.counters
	nearHits := n.nearHits.Load()
	s := Stats{
		Hits: n.hits.Load() + nearHits, NearHits: nearHits, Misses: n.misses.Load(), Shared: n.shared.Load(),
		Stale: n.stale.Load(), StaleOnError: n.staleOnError.Load(), Refreshes: n.refreshes.Load(),
		Loads: n.loads.Load(), LoadsNotFound: n.loadsNotFound.Load(), LoadErrors: n.loadErrors.Load(),
		LoadPanics: n.loadPanics.Load(), LoadsUnlocked: n.loadsUnlocked.Load(), LoadsUnlimited: n.loadsUnlimited.Load(), Loading: n.loading.Load(),
		Stored: n.stored.Load(), StoreErrors: n.storeErrors.Load(), Fenced: n.fenced.Load(),
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

func (c *Cache[T]) noteHit(ctx context.Context, key string) {
	c.counters.hits.Add(1)
	if c.opts.trace.Hit != nil {
		c.opts.trace.Hit(ctx, key)
	}
}

func (c *Cache[T]) noteMiss(ctx context.Context, key string) {
	c.counters.misses.Add(1)
	if c.opts.trace.Miss != nil {
		c.opts.trace.Miss(ctx, key)
	}
}

func (c *Cache[T]) noteStale(ctx context.Context, key string, info ValueInfo) {
	c.counters.stale.Add(1)
	if info.Err != nil {
		c.counters.staleOnError.Add(1)
	}
	if c.opts.trace.Stale != nil {
		c.opts.trace.Stale(ctx, key, info)
	}
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

func (c *Cache[T]) badValue(ctx context.Context, key string, err error) {
	c.counters.badValues.Add(1)
	if c.opts.trace.BadValue != nil {
		c.opts.trace.BadValue(client.Detach(ctx), key, err)
	}
}

func (c *Cache[T]) redisFailed(ctx context.Context, op string, err error) {
	c.counters.redisErrors.Add(1)
	var reply redis.Error
	if errors.As(err, &reply) && !client.Unreachable(err) {
		c.counters.refused.Add(1)
	}
	if c.opts.trace.RedisError != nil {
		c.opts.trace.RedisError(ctx, op, err)
	}
}

func (c *Cache[T]) breakerChanged(open bool) {
	if open {
		c.counters.breakerOpens.Add(1)
	}
	if c.opts.trace.BreakerChanged != nil {
		c.opts.trace.BreakerChanged(open)
	}
}

package singlefill

import (
	"context"
	"sync/atomic"
	"time"
)

// Trace is a set of optional functions that a [Cache] calls as things happen, as net/http/httptrace does.
// They are called synchronously, from many goroutines at once: they must be quick and must not panic.
// The context of RedisError and of BadValue has the values of a caller's, and never ends.
// No function is ever given a value; keys are given and may be secret, so think before logging them.
type Trace struct {
	// Hit is called when a GetOrLoad or Get is answered from Redis at its first look.
	Hit func(ctx context.Context, key string)

	// Miss is called when a GetOrLoad was answered otherwise (by a load here or elsewhere), or a Get not at all.
	Miss func(ctx context.Context, key string)

	// Stale is called, beside Hit or Miss, when a GetOrLoad or Get is answered with a stale value.
	Stale func(ctx context.Context, key string, info ValueInfo)

	// LoadStart is called before each Loader; the context it returns is the Loader's.
	// It must be ctx or made from it.
	LoadStart func(ctx context.Context, key string) context.Context

	// LoadDone is called when a load is over and its outcome has been stored, refused or given up; the calls that
	// waited for it may have returned before.
	LoadDone func(ctx context.Context, info LoadInfo)

	// WaitDone is called when a call of this process has waited for a load in another process.
	WaitDone func(ctx context.Context, info WaitInfo)

	// RedisError is called for every command that failed. op names what it was for: get, lock, store,
	// release, renew, abandon, set, delete, expire, fleet (MaxFleetLoads), ping.
	RedisError func(ctx context.Context, op string, err error)

	// BadValue is called when the bytes under key were no entry, or its payload could not be decoded.
	BadValue func(ctx context.Context, key string, err error)

	// Breaker is called when the cache stops asking a Redis that does not answer (open), and when it asks again. With
	// a Cluster: when it stops asking a first node, and when it asks all of them again.
	Breaker func(open bool)
}

// LoadInfo tells [Trace.LoadDone] how a load ended.
type LoadInfo struct {
	Key      string
	Duration time.Duration // of the Loader alone
	Err      error         // of the Loader; nil for a value
	StoreErr error         // why a value was not stored although it should have been; nil otherwise
	Stored   bool          // the value, or that there is none, is in Redis
	Fenced   bool          // the store was refused: the key was deleted, set or made stale meanwhile, or the lock was lost
	Refresh  bool          // begun behind the readers of a value that could still be served
	Unlocked bool          // Redis could not be asked for the lock, so other processes may have loaded too
}

// WaitInfo tells [Trace.WaitDone] how a wait for another process ended.
type WaitInfo struct {
	Key      string
	Duration time.Duration
	Polls    int // commands sent meanwhile
}

// Stats are counts since [New], except where a field says otherwise.
// They are read one by one, so sums across fields are exact only while nothing runs.
type Stats struct {
	Hits          int64 // calls answered from Redis at their first look, "not found" included
	Misses        int64 // GetOrLoad calls answered otherwise, and Get calls that returned ErrMiss
	Shared        int64 // GetOrLoad calls, among those above, answered by the read, wait or load of another call here
	Stale         int64 // GetOrLoad and Get calls, among those above, answered with a stale value
	StaleOnError  int64 // calls, among Stale, answered so because a load had failed or they could wait no longer
	Loads         int64 // loads begun
	Refreshes     int64 // loads, among those, begun behind the readers of a value that could still be served
	LoadsNotFound int64 // loads that ended with ErrNotFound
	LoadErrors    int64 // loads that ended with another error, a panic or at LoadTimeout
	LoadPanics    int64 // loads, among LoadErrors, that panicked or called Goexit
	LoadsUnlocked int64 // loads begun without the fleet's lock, because Redis could not be asked
	Loading       int64 // loads running now
	Stored        int64 // outcomes of loads stored
	StoreErrors   int64 // values loaded and not stored: Redis would not, or they could not be encoded
	Fenced        int64 // values loaded and refused at the store: deleted, set, made stale, or the lock lost meanwhile
	LocksLost     int64 // locks found lost while the load still ran
	Waits         int64 // times this process waited for a load in another one
	RedisErrors   int64 // commands that failed
	BadValues     int64 // stored bytes that were no entry or could not be decoded
	BreakerOpens  int64 // times the cache stopped asking Redis
	BreakerOpen   bool  // it is not asking now, or with a Cluster: not all of its nodes

	// CommandsQueued is how many commands wait now to be sent: all connections of the client's pool are in use.
	CommandsQueued int64

	// Queued is how many loads wait now for a place of MaxLoads or MaxFleetLoads.
	Queued int64
}

// counters is Stats while it is counted.
type counters struct {
	hits, misses, shared, stale, staleOnError, refreshes                 atomic.Int64
	loads, loadsNotFound, loadErrors, loadPanics, loadsUnlocked, loading atomic.Int64
	stored, storeErrors, fenced, locksLost                               atomic.Int64
	waits, redisErrors, badValues, breakerOpens                          atomic.Int64
}

// Stats returns the counts so far. It works after Close too.
func (c *Cache[T]) Stats() Stats {
	n := c.counters
	return Stats{
		Hits: n.hits.Load(), Misses: n.misses.Load(), Shared: n.shared.Load(),
		Stale: n.stale.Load(), StaleOnError: n.staleOnError.Load(), Refreshes: n.refreshes.Load(),
		Loads: n.loads.Load(), LoadsNotFound: n.loadsNotFound.Load(), LoadErrors: n.loadErrors.Load(),
		LoadPanics: n.loadPanics.Load(), LoadsUnlocked: n.loadsUnlocked.Load(), Loading: n.loading.Load(),
		Stored: n.stored.Load(), StoreErrors: n.storeErrors.Load(), Fenced: n.fenced.Load(),
		LocksLost: n.locksLost.Load(), Waits: n.waits.Load(), RedisErrors: n.redisErrors.Load(),
		BadValues: n.badValues.Load(), BreakerOpens: n.breakerOpens.Load(), BreakerOpen: c.client.AnyAway(),
		CommandsQueued: c.client.Queued(), Queued: int64(c.slots.Queued()),
	}
}

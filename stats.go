package singlefill

import "time"

// Stats are counts since [New], except where a field says "now". They are read one by one, so sums
// are exact only while no call runs.
type Stats struct {
	// Calls.
	Hits         int64 // calls whose first read found a value, or ErrNotFound, in memory or in Redis
	NearHits     int64 // of Hits, those in memory: see Near
	StaleHits    int64 // of Hits, those that found a stale value
	NearStale    int64 // of NearHits, those that found a stale value
	Misses       int64 // GetOrLoad calls answered in another way, and Get calls that returned ErrMiss
	Shared       int64 // of Hits and Misses, those for which another call of this process worked
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

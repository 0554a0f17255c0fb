package event

import (
	"sync/atomic"
	"time"
	"unsafe"
)

// Stats has the fields of the public Stats, where they are described, and converts to it. A Sink leaves zero what
// it is not told: NearAge, Queued, BreakerOpen and CommandsQueued.
type Stats struct {
	Hits, NearHits, StaleHits, NearStale, Misses, Shared, Stale, StaleOnError int64

	Loads, Refreshes, LoadsNotFound, LoadErrors, LoadPanics, LoadsUnlocked, LoadsUnlimited, Loading, Queued int64

	Stored, StoreErrors, Fenced               int64
	Waits, LocksLost                          int64
	Audits, AuditsStale                       int64
	TagCalls, TagKeys, TagRebuilds, TagClears int64

	NearDrops int64
	NearAge   time.Duration

	RedisErrors, Refused, BadValues, BreakerOpens int64
	BreakerOpen                                   bool
	CommandsQueued                                int64
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
	waits, redisErrors, refused, badValues, breakerOpens, nearDrops      atomic.Int64
}

// hits are the hits in Redis, or in memory.
type hits struct {
	fresh spread
	stale atomic.Int64
}

func (h *hits) note(stale bool) {
	if stale {
		h.stale.Add(1)
	} else {
		h.fresh.inc()
	}
}

// A spread is a count of what many goroutines do at the same time: it is a sum of several counts, each in a
// separate cache line. A goroutine adds to the count that the address of its stack selects, so that the line
// stays with its processor.
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

// Stats returns the counts so far. They are read one by one.
func (n *counters) Stats() Stats {
	stale, nearStale, onError := n.redis.stale.Load(), n.near.stale.Load(), n.staleOnError.Load()
	nearHits := n.near.fresh.Load() + nearStale
	return Stats{
		Hits: n.redis.fresh.Load() + stale + nearHits, StaleHits: stale + nearStale,
		NearHits: nearHits, NearStale: nearStale,
		Misses: n.misses.Load(), Shared: n.shared.Load(),
		Stale: stale + nearStale + n.staleMisses.Load() + onError, StaleOnError: onError,
		Loads: n.loads.Load(), Refreshes: n.refreshes.Load(), Loading: n.loading.Load(),
		LoadsNotFound: n.loadsNotFound.Load(), LoadErrors: n.loadErrors.Load(), LoadPanics: n.loadPanics.Load(),
		LoadsUnlocked: n.loadsUnlocked.Load(), LoadsUnlimited: n.loadsUnlimited.Load(),
		Stored: n.stored.Load(), StoreErrors: n.storeErrors.Load(), Fenced: n.fenced.Load(),
		Waits: n.waits.Load(), LocksLost: n.locksLost.Load(),
		Audits: n.audits.Load(), AuditsStale: n.auditsStale.Load(),
		TagCalls: n.tagCalls.Load(), TagKeys: n.tagKeys.Load(),
		TagRebuilds: n.tagRebuilds.Load(), TagClears: n.tagClears.Load(),
		NearDrops:   n.nearDrops.Load(),
		RedisErrors: n.redisErrors.Load(), Refused: n.refused.Load(), BadValues: n.badValues.Load(),
		BreakerOpens: n.breakerOpens.Load(),
	}
}

package singlefill

import (
	"context"
	"math"
	"math/rand/v2"
	"time"

	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/flight"
)

// ValueInfo tells what a value is that [Cache.GetOrLoadInfo] returned, or a remembered ErrNotFound. It is zero with any
// other error.
type ValueInfo struct {
	Stale bool          // past its life, or made stale by Expire
	Age   time.Duration // since it was loaded or set, by the clocks of its writer and of this process; not negative

	// Err says why a stale value is returned although it was too old to be served without trying: the error of
	// the load, a *RemoteError if another process made it (also one before this call, within RetryAfter), or
	// context.DeadlineExceeded if this call's deadline came first. nil for all others.
	Err error
}

// A freshness is what an entry is good for, at one time.
type freshness int

const (
	expired    freshness = iota
	ifError              // to be served if a load fails: StaleIfError
	revalidate           // to be served, and refreshed behind: StaleWhileRevalidate
	fresh
)

func (c *Cache[T]) freshnessOf(e *entry.Entry, now time.Time) freshness {
	late := now.Sub(e.FreshUntil)
	if late < 0 && !e.Expired {
		return fresh
	}
	switch late = max(late, 0); {
	case late < c.opts.staleWhileRevalidate:
		return revalidate
	case late < c.opts.staleIfError:
		return ifError
	}
	return expired
}

// window is how long after its life an entry may be served.
func (s *settings[T]) window() time.Duration { return max(s.staleWhileRevalidate, s.staleIfError) }

// keptFor is how long Redis keeps an entry that is fresh for life.
func (s *settings[T]) keptFor(life time.Duration) time.Duration {
	if w := s.window(); life <= math.MaxInt64-w {
		return life + w
	}
	return math.MaxInt64
}

// early decides by lot whether a hit refreshes its entry before it expires: with probability
// exp(-left/(β·δ)), where δ is how long its load took. So the one who pays for it is chosen without any word
// between the processes, the sooner the longer a load takes, and at any rate of reads about e^(1/β) would be
// chosen per expiry. The lock makes it one.
//
// This is XFetch: Vattani, Chierichetti, Lowenstein, Optimal Probabilistic Cache Stampede Prevention, VLDB 2015.
func (c *Cache[T]) early(e *entry.Entry, now time.Time) bool {
	mean := c.opts.earlyRefresh * float64(e.LoadTime)
	return mean > 0 && rand.ExpFloat64()*mean >= float64(e.FreshUntil.Sub(now))
}

const (
	// refreshRest is how long after a refresh another one of the same entry is not even tried in this process:
	// a replica, or the client's own cache, may go on showing it.
	refreshRest = 100 * time.Millisecond

	// maxRest is how long one is not tried after it has found that it cannot be made now: another process holds
	// the lock, the source is to be left alone, there is no place to load, or Redis cannot be asked.
	maxRest = time.Second
)

// restFor returns how long not to try again what another process does, or has done, for left.
func restFor(left time.Duration) time.Duration {
	if left == 0 {
		return refreshRest
	}
	return min(left, maxRest)
}

// refresh loads key behind its readers, in one process of the fleet. No caller waits for it, unless the entry is gone
// before it is done. Loads that callers wait for go first.
func (c *Cache[T]) refresh(ctx context.Context, key string, load Loader[T], data []byte) {
	if c.checkOpen() != nil {
		return
	}
	c.fills.Refresh(key, entry.Header(data), func(f *flight.Fill[result[T]], over func()) {
		c.fill(ctx, f, load, &lookup[T]{data: data}, over)
	})
}

// servable reports whether an old value may still be served.
func (c *Cache[T]) servable(r *result[T]) bool {
	return r.freshness > expired && c.freshnessOf(&r.entry, time.Now()) > expired
}

// infoOf says what a result is by now. An error is the failure of the load for which an old value was to stand in
// that has become too old.
func (c *Cache[T]) infoOf(r *result[T]) (info ValueInfo, err error) {
	if r.entry.WrittenAt.IsZero() {
		return info, nil
	}
	now, use := r.at, r.freshness
	if r.failure != nil { // some time ago
		now = time.Now()
		use = c.freshnessOf(&r.entry, now)
	}
	info.Age = r.entry.Age(now)
	switch {
	case use == expired:
		return ValueInfo{}, r.failure
	case use < fresh:
		info.Stale, info.Err = true, r.failure
	}
	return info, nil
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

package singlefill

import (
	"context"
	"math"
	"math/rand/v2"
	"time"

	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/event"
	"github.com/singlefill/singlefill/internal/flight"
)

// ValueInfo describes a value, or a remembered ErrNotFound, that [Cache.GetOrLoadInfo] returned. It
// is zero with any other error.
type ValueInfo struct {
	// Stale reports whether the value has expired, or was made stale by Expire.
	Stale bool

	// Age is the time since the value was loaded or set, by the clocks of its writer and of this
	// process, never negative.
	Age time.Duration

	// Err is why a value within StaleIfError was returned: the error of the load; a *RemoteError if
	// it failed in another process, or before this call within RetryAfter; context.DeadlineExceeded
	// if the deadline of this call, or StaleAfter, came first.
	Err error
}

// A freshness is how an entry may be served at one time.
type freshness int

const (
	expired    freshness = iota
	ifError              // to be served if a load fails: StaleIfError
	revalidate           // to be served, and refreshed behind: StaleWhileRevalidate
	fresh
)

func (c *engine) freshnessOf(e *entry.Entry, now time.Time) freshness {
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

// window returns how long an expired entry may be served.
func (s staleWindows) window() time.Duration { return max(s.staleWhileRevalidate, s.staleIfError) }

// keptFor returns how long Redis keeps an entry that is fresh for life.
func (s staleWindows) keptFor(life time.Duration) time.Duration {
	if w := s.window(); life <= math.MaxInt64-w {
		return life + w
	}
	return math.MaxInt64
}

// due reports whether a hit refreshes its entry: if it is stale, or early.
func (c *engine) due(l *lookup) bool {
	if !l.hit || l.freshness == revalidate || c.near != nil { // with Near one draw decides for all hits in memory
		return l.freshness == revalidate || l.hit && l.early
	}
	by := c.opts.earlyBy(&l.entry, rand.ExpFloat64)
	return by > 0 && by >= l.entry.FreshUntil.Sub(l.at)
}

// earlyBy draws how long before it expires an entry is refreshed: β·δ on average, where δ is the duration
// of its load. So a hit refreshes with the probability exp(-left/(β·δ)): processes choose a reader
// without talking to each other, and the longer a load takes, the sooner. The lock lets one of the
// chosen readers load.
//
// Each hit draws, so the probabilities add up: with n reads a second the first reader is chosen about
// β·δ·ln(n·β·δ) before the end. For slow loads of hot values that is the whole life, and they would load
// without pause. So by default no draw is longer than half of the life.
//
// This is XFetch: Vattani, Chierichetti, Lowenstein, Optimal Probabilistic Cache Stampede
// Prevention, VLDB 2015.
func (s *settings) earlyBy(e *entry.Entry, draw func() float64) time.Duration {
	mean := s.earlyRefresh * float64(e.LoadTime)
	if mean == 0 {
		return 0
	}
	by := time.Duration(min(draw()*mean, float64(forever)))
	if s.secondHalf {
		by = min(by, e.FreshUntil.Sub(e.WrittenAt)/2)
	}
	return max(by, 0)
}

const (
	// refreshRest is how long after a refresh this process does not refresh the same entry again: a
	// replica, or the client's own cache, may still return it.
	refreshRest = 100 * time.Millisecond

	// maxRest is how long this process does not refresh an entry after a refresh that could not
	// load: another process held the lock, RetryAfter was not over, no slot was free, or Redis did
	// not answer.
	maxRest = time.Second
)

// restFor returns how long to rest after a refresh. left is what remains of the lock, or of
// RetryAfter.
func restFor(left time.Duration) time.Duration {
	if left == 0 {
		return refreshRest
	}
	return min(left, maxRest)
}

// refresh loads key in the background, in one process of the fleet. A caller that finds nothing to
// serve joins it. Loads that callers wait for go first.
func (c *engine) refresh(ctx context.Context, key string, load loader, data []byte) {
	if c.checkOpen() != nil {
		return
	}
	c.fills.Refresh(key, entry.Header(data), nil, func(f *flight.Fill[result], over func()) {
		c.fill(ctx, f, load, &lookup{data: data}, over, nil)
	})
}

// servable reports whether an old value may still be served.
func (c *engine) servable(r *result) bool {
	return r.freshness > expired && c.freshnessOf(&r.entry, time.Now()) > expired
}

// infoOf describes a result. If it is a fallback that has become too old by now, infoOf returns the
// failure that it replaced.
func (c *engine) infoOf(r *result) (info event.ValueInfo, err error) {
	if r.entry.WrittenAt.IsZero() {
		return info, nil
	}
	now, use := r.at, r.freshness
	if r.failure != nil { // the fallback was judged before the load
		now = time.Now()
		use = c.freshnessOf(&r.entry, now)
	}
	info.Age = max(0, now.Sub(r.entry.WrittenAt)) // the clocks of writer and reader may disagree
	switch {
	case use == expired:
		return event.ValueInfo{}, r.failure
	case use < fresh:
		info.Stale, info.Err = true, r.failure
	}
	return info, nil
}

// Previous returns the value that the running load of key is to replace: one that is stale or about
// to expire. A Loader or ManyLoader calls it with its ctx, asks the source by an ETag or a version
// whether the value has changed, and if not returns it for one more life. The caller owns it;
// info.Err is nil.
//
// ok is false if the cache has no such value or remembers ErrNotFound, if Redis does not answer,
// outside of a load, for keys that the load is not for, if T is not that of the cache, and if the
// key was deleted before the load took its lock, or in this process since then. If it is deleted
// later, or elsewhere, the value of the load is not stored: a Delete is never undone.
//
// Without stale windows a load seldom has a previous value: only after [Cache.Expire], and by
// [Options.EarlyRefresh].
func Previous[T any](ctx context.Context, key string) (v T, info ValueInfo, ok bool) {
	for _, x := range fillsOf(ctx) {
		if x.fill.Key == key {
			old, info := x.previous()
			if p, isT := old.(*T); isT {
				return *p, ValueInfo(info), true
			}
		}
	}
	return v, ValueInfo{}, false
}

// fillsKey is the key under which the context of a Loader has its fills: those of one call of a
// ManyLoader are several.
type fillsKey struct{}

func withFills(ctx context.Context, fills ...*filling) context.Context {
	return context.WithValue(ctx, fillsKey{}, fills)
}

func fillsOf(ctx context.Context) []*filling {
	fills, _ := ctx.Value(fillsKey{}).([]*filling)
	return fills
}

// previous returns the value that the load replaces, or nil.
func (x *filling) previous() (any, event.ValueInfo) {
	old := x.old.entry
	if !x.replaces || old.NotFound || old.Payload == nil || x.returned.Load() || x.fills.Superseded(x.fill) {
		return nil, event.ValueInfo{}
	}
	v, err := x.values.decodeEntry(&old)
	if err != nil { // told as a BadValue when it was read
		return nil, event.ValueInfo{}
	}
	now := time.Now()
	return v, event.ValueInfo{Stale: old.Expired || !now.Before(old.FreshUntil), Age: old.Age(now)}
}

package singlefill

import (
	"context"
	"time"

	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/event"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/value"
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

// maxRest is how long this process does not refresh an entry after a refresh that could not
// load: another process held the lock, RetryAfter was not over, no slot was free, or Redis did
// not answer.
const maxRest = time.Second

// restFor returns how long to rest after a refresh. left is what remains of the lock, or of
// RetryAfter.
func restFor(left time.Duration) time.Duration {
	if left == 0 {
		return value.RefreshRest
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
		c.fill(ctx, f, load, &value.Lookup{Key: key, Data: data}, over, nil)
	})
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
	old := x.old.Entry
	if !x.replaces || old.NotFound || old.Payload == nil || x.returned.Load() || x.fills.Superseded(x.fill) {
		return nil, event.ValueInfo{}
	}
	v, err := x.values.DecodeEntry(&old)
	if err != nil { // told as a BadValue when it was read
		return nil, event.ValueInfo{}
	}
	now := time.Now()
	return v, event.ValueInfo{Stale: old.Expired || !now.Before(old.FreshUntil), Age: old.Age(now)}
}

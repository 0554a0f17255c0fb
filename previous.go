package singlefill

import (
	"context"
	"time"
)

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
			var old any
			old, info = x.previous()
			if p, isT := old.(*T); isT {
				return *p, info, true
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
func (x *filling) previous() (any, ValueInfo) {
	old := x.old.entry
	if !x.replaces || old.NotFound || old.Payload == nil || x.returned.Load() || x.fills.Superseded(x.fill) {
		return nil, ValueInfo{}
	}
	v, err := x.values.decode(old.Payload)
	if err != nil { // told as a BadValue when it was read
		return nil, ValueInfo{}
	}
	now := time.Now()
	return v, ValueInfo{Stale: old.Expired || !now.Before(old.FreshUntil), Age: old.Age(now)}
}

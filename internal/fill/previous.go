package fill

import (
	"context"
	"time"

	"github.com/singlefill/singlefill/internal/event"
)

// fillsKey is the key under which the context of a Loader has its fills: those of one call of a
// ManyLoader are several.
type fillsKey struct{}

func inside(ctx context.Context, fills ...*filling) context.Context {
	return context.WithValue(ctx, fillsKey{}, fills)
}

// Outside returns the context of a Loader that works for no fill.
func Outside(ctx context.Context) context.Context { return inside(ctx) }

func fillsOf(ctx context.Context) []*filling {
	fills, _ := ctx.Value(fillsKey{}).([]*filling)
	return fills
}

// Previous returns the value that the running load of key replaces, or nil. ctx is that of the Loader.
func Previous(ctx context.Context, key string) (any, event.ValueInfo) {
	for _, x := range fillsOf(ctx) {
		if x.fill.Key == key {
			return x.previous()
		}
	}
	return nil, event.ValueInfo{}
}

func (x *filling) previous() (any, event.ValueInfo) {
	old := x.old.Entry
	if !x.replaces || old.NotFound || old.Payload == nil || x.returned.Load() || x.Fills.Superseded(x.fill) {
		return nil, event.ValueInfo{}
	}
	v, err := x.Store.Type.DecodeEntry(&old)
	if err != nil { // told as a BadValue when it was read
		return nil, event.ValueInfo{}
	}
	now := time.Now()
	return v, event.ValueInfo{Stale: old.Expired || !now.Before(old.FreshUntil), Age: old.Age(now)}
}

package fill

import (
	"context"
	"sync/atomic"

	"github.com/singlefill/singlefill/internal/bulk"
	"github.com/singlefill/singlefill/internal/flight"
)

// NewBulk returns the bulk of fills that are about to begin. outer is the load that makes the call, or nil.
func (f *Filler) NewBulk(load ManyLoader, outer *flight.Load, fills int) *bulk.Bulk {
	node := f.Fills.NewLoad(outer)
	return bulk.New(manySource{f, load}, f.LoadTimeout, node, f.Slots.NewShared(node), fills)
}

// A manySource loads for the fills of a bulk.
type manySource struct {
	*Filler
	load ManyLoader
}

// Load implements bulk.Loader.
func (s manySource) Load(ctx context.Context, keys []string, loads []context.Context) bulk.Outcome {
	var fills []*filling
	var calls []*atomic.Pointer[flight.Call]
	for _, load := range loads {
		x := fillsOf(load)[0]
		fills, calls = append(fills, x), append(calls, &x.fill.Call)
	}
	if s.Fills.Aborting().Err() != nil {
		return bulk.Closed
	}
	if s.Tags != nil {
		since := s.Tags.Sequences(ctx)
		for _, x := range fills {
			x.since = since
		}
	}
	return s.User.LoadMany(s.begun(inside(ctx, fills...), keys[0], calls...), keys, s.load)
}

// AfterAbort implements bulk.Loader.
func (s manySource) AfterAbort(run func()) (stop func() bool) {
	return context.AfterFunc(s.Fills.Aborting(), run)
}

// Panicked implements bulk.Loader.
func (s manySource) Panicked(p any, keys int) bulk.Outcome {
	s.Events.LoadPanics(keys)
	err := s.User.Panicked(p).Err
	return func(string) (any, error) { return nil, err }
}

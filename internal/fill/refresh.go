package fill

import (
	"context"
	"slices"

	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/value"
)

// Refresh loads keys in the background, in one process of the fleet, since their entries are stale or about to expire.
// With Options.LoadMany it loads the keys of several calls together, with the context of the first. A caller that finds
// nothing to serve joins the fill of its key. Loads that callers wait for go first. ctx never ends.
func (f *Filler) Refresh(ctx context.Context, found []*value.Lookup, from Source) {
	if f.LoadMany == nil || f.closed() {
		f.refresh(ctx, found, from)
		return
	}
	g := &f.refreshes
	g.mu.Lock()
	defer g.mu.Unlock()
	g.due = append(g.due, found...)
	if len(g.due) > len(found) {
		return
	}
	g.ctx = ctx
	f.Fills.Go(func() {
		f.pauseFor(gather)
		g.mu.Lock()
		ctx, due := g.ctx, g.due
		g.ctx, g.due = nil, nil
		g.mu.Unlock()
		f.refresh(ctx, due, Source{Loader: f.LoadMany})
	})
}

// refresh begins the fills of keys that have none.
func (f *Filler) refresh(ctx context.Context, found []*value.Lookup, from Source) {
	if f.closed() {
		return
	}
	for found := range slices.Chunk(found, f.MaxBatch) {
		keys, entries := make([]string, len(found)), make([]string, len(found))
		for i, l := range found {
			keys[i], entries[i] = l.Key, entry.Header(l.Data)
		}
		f.Fills.Refresh(keys, entries, func(of []int, fills []*flight.Fill[Result]) (run func(*flight.Load)) {
			x := f.newSet(ctx, from, fills, func(k int) *value.Lookup {
				return &value.Lookup{Key: keys[of[k]], Data: found[of[k]].Data}
			})
			return func(l *flight.Load) { x.start(l, beginning{x}) }
		})
	}
}

package filllock

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/renew"
)

// Keep renews locks that were taken at one time, together, until ctx ends; a load quicker than a third of the TTL costs
// nothing. A value from wake makes it check sooner whether the locks are still held. Keep calls lost for a lock that is
// not, and returns when none is left. While Redis does not answer, the load goes on: a value is refused if its lock
// was lost.
func Keep(ctx context.Context, locks []*Lock, wake <-chan struct{}, lost func(l *Lock)) {
	left := slices.Clone(locks)
	lease := renew.Lease{TTL: locks[0].ttl, Taken: locks[0].held, Nudge: wake}
	for _, l := range locks {
		if l.held.Before(lease.Taken) {
			lease.Taken = l.held
		}
	}
	lease.Renew = func(ctx context.Context, _ *time.Time) (held bool, err error) {
		var gone []*Lock
		gone, err = renewAll(ctx, left)
		left = slices.DeleteFunc(left, func(l *Lock) bool { return slices.Contains(gone, l) })
		for _, l := range gone {
			if ctx.Err() == nil { // otherwise the load may just have released it
				lost(l)
			}
		}
		return len(left) > 0, err
	}
	_ = lease.Keep(ctx) // it has no other reason to end than that all are lost
}

// renewAll renews locks, in pipelines for each server. It returns the lost ones.
func renewAll(ctx context.Context, locks []*Lock) (lost []*Lock, err error) {
	c := locks[0].client
	var mu sync.Mutex
	var all sync.WaitGroup
	for _, part := range client.InParts(c, locks, func(l *Lock) string { return l.Keys.Lock }) {
		all.Go(func() {
			acts := make([]Act, len(part))
			for i, l := range part {
				acts[i] = l.Renew()
			}
			answers := Do(ctx, c.Timeout, acts...)
			mu.Lock()
			defer mu.Unlock()
			for i, a := range answers {
				switch {
				case a.Err != nil:
					err = a.Err
				case !a.Value:
					lost = append(lost, part[i])
				}
			}
		})
	}
	all.Wait()
	return lost, err
}

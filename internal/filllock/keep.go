package filllock

import (
	"context"

	"github.com/singlefill/singlefill/internal/renew"
)

// Keep renews the lock until ctx ends; a load quicker than a third of the TTL costs nothing. A
// value from wake makes it check sooner whether the lock is still held. If it is not, Keep calls
// lost and returns. While Redis does not answer, the load goes on: its value is refused if the lock
// was lost.
func (l *Lock) Keep(ctx context.Context, wake <-chan struct{}, lost func()) {
	lease := renew.Lease{TTL: l.ttl, Taken: l.held, Renew: l.Renew, Nudge: wake}
	if lease.Keep(ctx) != nil {
		lost()
	}
}

package fill

import (
	"context"

	"github.com/singlefill/singlefill/internal/renew"
)

// Keep renews the lock until ctx ends; a load quicker than a third of its life costs nothing. A nudge makes it
// look soon whether the lock is still ours. When it is not, lost is called and Keep returns. While Redis is not
// heard of the load goes on: what it brings is refused if the lock was lost meanwhile. try is l.Renew, or calls it.
func (l *Lock) Keep(ctx context.Context, nudge <-chan struct{}, try func(ctx context.Context) (held bool, err error), lost func()) {
	lease := renew.Lease{TTL: l.ttl, Taken: l.held, Renew: try, Nudge: nudge}
	if lease.Keep(ctx) != nil {
		lost()
	}
}

package fill

import (
	"context"
	"time"
)

// recheck is how soon after a renewal a nudge may cause another one.
const recheck = 10 * time.Millisecond

// Keep renews the lock at a third of its life, counted from the last success, until ctx ends; a load quicker
// than that costs nothing. A nudge makes it look soon whether the lock is still ours. When it is not, lost is
// called and Keep returns. renew is l.Renew, or calls it.
func (l *Lock) Keep(ctx context.Context, nudge <-chan struct{}, renew func(ctx context.Context) (held bool, err error), lost func()) {
	due := l.held.Add(l.ttl / 3)
	timer := time.NewTimer(time.Until(due))
	defer timer.Stop()
	last := time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-nudge:
			if soon := last.Add(recheck); soon.Before(due) {
				due = soon
				timer.Reset(time.Until(due))
			}
			continue
		case <-timer.C:
		}
		last = time.Now()
		held, err := renew(ctx)
		switch {
		case ctx.Err() != nil:
			return // the lock may just have been released
		case err == nil && !held:
			lost()
			return
		case err == nil:
			due = last.Add(l.ttl / 3)
		default:
			due = time.Now().Add(l.ttl / 10)
		}
		timer.Reset(time.Until(due))
	}
}

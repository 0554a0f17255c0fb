package singlefill

import (
	"context"
	"errors"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/fill"
	"github.com/singlefill/singlefill/internal/flight"
)

// ask sends one command: it looks for an entry, and takes the lock if no process holds it and take is set. It notes what
// the key holds, as of the stamp that it returns.
func (x *filling[T]) ask(ctx context.Context, within time.Duration, awaited string, take, wanted bool) (fill.Reply, flight.Stamp, error) {
	query := fill.Query{Known: entry.Header(x.old.data), Awaited: awaited, Take: take, For: x.purpose(wanted)}
	stamp := x.clock.Now()
	sent := time.Now()
	reply, err := client.Retry(ctx, within, client.Unreachable, func(within time.Duration) (fill.Reply, error) {
		return x.lock.GetOrLock(ctx, within, query)
	})
	x.wait.heard(time.Since(sent))
	switch {
	case err != nil:
	case reply.Status == fill.Hit:
		x.old = new(lookup[T])
		x.decode(ctx, x.fill.Key, []byte(reply.Text), x.old)
		x.oldSince = stamp
	default:
		x.oldSince = stamp
		if !reply.Known {
			x.old.freshness = expired
		}
	}
	return reply, stamp, err
}

// purpose is what the entry that the key holds is to those for whom x asks.
func (x *filling[T]) purpose(wanted bool) string {
	switch {
	case !wanted:
		return fill.Served
	case x.servable(&x.old.result):
		return fill.Fallback
	}
	return fill.Unusable
}

// keepAfter is how long a new lock is not looked after. A quicker load costs no timer for renewals.
const keepAfter = 10 * time.Millisecond

// keep renews the lock until stop is called. A caller that joins makes it look sooner whether the lock is still held.
func (x *filling[T]) keep(ctx context.Context) (stop func()) {
	return x.fills.Later(min(keepAfter, x.opts.lockTTL/3), func() {
		x.lock.Keep(ctx, x.fill.Wake, func() {
			x.counters.locksLost.Add(1)
			x.fills.LockLost(x.fill)
		})
	})
}

// commit brings the outcome of a load to Redis and to the callers.
func (x *filling[T]) commit(ctx context.Context, o outcome[T], began flight.Stamp) {
	data, note := x.encode(&o)
	r := o.result()
	if o.superseded {
		note = fill.ReleaseNote{} // others had better load than fail with this
	} else if data == nil && !note.Drop && !errors.Is(o.Err, ErrClosed) {
		x.backOff(&note)
	}
	stamp := x.clock.Now()
	ours, err := x.storeOrRelease(ctx, &o, data, note)
	switch {
	case err == nil && ours: // this proves that the key has not been invalidated since the load began
		x.oldSince = stamp
		x.end(ctx, &r, stamp)
	case r.failed && !x.servable(&x.old.result): // callers that joined while it ran have waited for it
		x.end(ctx, &r, stamp)
	default:
		r.unverified = err != nil
		x.end(ctx, &r, began)
	}
	if client.Unreachable(err) { // once more, now that no caller waits
		_, err = x.storeOrRelease(ctx, &o, data, note)
	}
	// A value that Redis never accepts, for example one that is too large, must not keep the lock.
	x.lock.InDoubt = x.lock.InDoubt || client.Unreachable(err)
	x.loadDone(ctx, o)
}

// backOff has the whole fleet leave the source alone for a while, if there is an old value to serve.
func (x *filling[T]) backOff(note *fill.ReleaseNote) {
	if x.servable(&x.old.result) {
		note.RetryAfter = x.opts.retryAfter
		x.rest = min(x.opts.retryAfter, maxRest)
	}
}

// storeOrRelease stores what was loaded and releases the lock, or only releases it. It reports whether the lock was still held.
func (x *filling[T]) storeOrRelease(ctx context.Context, o *outcome[T], data []byte, note fill.ReleaseNote) (ours bool, err error) {
	if data != nil {
		ours, err = client.Retry(ctx, x.opts.redisTimeout, client.Unreachable, func(within time.Duration) (bool, error) {
			return x.lock.Store(ctx, within, data, x.opts.keptFor(o.life))
		})
		o.Stored, o.Fenced, o.StoreErr = ours, err == nil && !ours, err
		if err == nil || client.Unreachable(err) {
			return ours, err
		}
		x.backOff(&note) // Redis would refuse the next one too
	}
	return client.Retry(ctx, x.opts.redisTimeout, client.Unreachable, func(within time.Duration) (bool, error) {
		return x.lock.Release(ctx, within, note)
	})
}

// abandon gives up an attempt to lock that was not answered, or the command may lock for no caller. It tries until Redis
// answers, the lock has ended by itself, or the cache is closed.
func (c *Cache[T]) abandon(ctx context.Context, lock fill.Lock) {
	end := time.Now().Add(c.opts.lockTTL)
	for time.Now().Before(end) {
		if !c.client.Away(lock.Key()) {
			if _, err := lock.Abandon(ctx); !client.Unreachable(err) {
				return
			}
		}
		select {
		case <-c.closing:
			return
		case <-time.After(maxPause):
		}
	}
}

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

// A filling is one fill at work: it brings a value that another process stores, or loads one.
type filling[T any] struct {
	*Cache[T]
	fill *flight.Fill[result[T]]
	load Loader[T]
	lock *fill.Lock
	slot *flight.Slot
	wait wait
	over func() // call it when all work is done

	old      *lookup[T]      // what the key holds, as far as known
	oldSince flight.Stamp  // as of when
	of       string        // header of the entry that a refresh is for
	rest     time.Duration // how long that entry is not to be refreshed again
	loading  bool          // the Loader has been called, and has no outcome yet
}

// fill runs a fill. l is what a read has found.
func (c *Cache[T]) fill(ctx context.Context, f *flight.Fill[result[T]], load Loader[T], l *lookup[T], over func()) {
	x := &filling[T]{
		Cache: c, fill: f, load: load, over: over, old: l, of: entry.Header(l.data),
		lock: c.newLock(f.Key),
		slot: c.slots.NewSlot(&f.Load),
	}
	loads := false
	defer func() {
		if !loads { // a load finishes in the goroutine in which it ends
			x.finish(ctx)
		}
	}()
	if f.Refresh {
		c.decode(ctx, f.Key, l.data, x.old) // the reader owns what it has decoded
	}
	x.wait = newWait(c.loadTimes.estimate(f.Key, x.old.entry.LoadTime))
	within := c.opts.redisTimeout
	if l.redisErr != nil && c.client.Silent(x.lock.Key()) {
		within -= l.asked
	}
	for {
		next := x.acquire(ctx, within)
		switch {
		case next == loadLocked:
			loads = true
			x.loadLocked(ctx)
			return
		case next == loadUnlocked && x.slot.Try(true):
			loads = true
			x.loadUnlocked(ctx)
			return
		case next == ended || x.queue(ctx) == interrupted:
			return
		}
		within = c.opts.redisTimeout // while it waited for a place Redis may have come back
	}
}

// finish is the last step of a fill.
func (x *filling[T]) finish(ctx context.Context) {
	if x.loading { // the codec called runtime.Goexit
		x.lock.InDoubt = true
		x.end(ctx, &result[T]{err: &PanicError{Value: "runtime.Goexit was called"}, failed: true}, flight.Always)
	}
	x.end(ctx, nil, 0) // unless it has ended
	x.slot.Release()
	if x.lock.InDoubt {
		x.fills.Behind(func() { x.abandon(ctx, *x.lock) })
	}
	x.over()
}

// end gives the callers their result, known to be true as of validFrom.
func (x *filling[T]) end(ctx context.Context, r *result[T], validFrom flight.Stamp) {
	x.waited(ctx) // before callers go on
	x.loading = false
	if x.fill.Refresh && x.rest > 0 {
		x.fills.Rest(x.fill, x.of, x.rest)
		x.rest = 0
	}
	if r != nil && r.failed {
		r.oldSince = x.oldSince
		if x.servable(&x.old.result) {
			old := x.old.result
			old.failure = r.err
			r.old = &old
		}
	}
	x.fills.End(x.fill, r, validFrom)
}

// A step is what a fill does next.
type step int

const (
	ended        step = iota // nothing: it has a result, or no caller waits any more
	loadLocked               // the lock is held, and there is a place to load
	loadUnlocked             // Redis cannot be asked

	// Only acquire sees these.
	takeValue   // a value has arrived
	takeFailure // the load of another process has failed
	askAgain    // at once
	retryNew    // as a new attempt to lock
	waitForLock // ask again after a pause
	waitForSlot // ask again when there is a place to load
	leave       // leave the key to others: no caller waits for it here
)

// A view is what decide knows beside the reply.
type view struct {
	wanted   bool // a caller waits
	servable bool // the value found can end the fill
}

// decide returns what follows from a reply. It has no effects.
func decide(r fill.Reply, v view) step {
	switch r.Status {
	case fill.Hit:
		if v.servable {
			return takeValue
		}
		return askAgain
	case fill.Locked:
		return loadLocked
	case fill.Failed:
		return takeFailure
	case fill.Refused:
		return retryNew
	case fill.Gone:
		if v.wanted {
			return askAgain // as a load
		}
	case fill.Busy:
		if v.wanted {
			return waitForLock
		}
	case fill.Free:
		if v.wanted {
			return waitForSlot
		}
	}
	return leave
}

// acquire asks Redis for an entry or for the lock until it has either. Asking and competing are one command: it tells a
// waiter that the value arrived, that the load failed, or that the holder died. Between two commands the fill holds
// nothing: no connection, and no place to load while another process has the lock.
//
// A refresh that no caller waits for asks once: it leaves the key to its holder, and places to loads that callers wait for.
func (x *filling[T]) acquire(ctx context.Context, within time.Duration) step {
	defer x.waited(ctx)
	awaited, lastAsked := "", flight.Stamp(0)
	unanswered := 0
	queue := x.slots.Lease == nil // for a place, before asking; with a lease to wait for, asking is cheaper
	for {
		x.rest = maxRest
		wanted := !x.fill.Refresh || x.fills.Wanted(x.fill)
		take := x.try(ctx, wanted)
		switch {
		case take:
		case !wanted && x.fills.EndIfDeserted(x.fill):
			return ended
		case queue && !x.client.Away(x.lock.Key()):
			event := x.queue(ctx)
			within = x.opts.redisTimeout // it may have taken long
			switch event {
			case granted:
				continue
			case interrupted:
				return ended
			}
		}
		if within < time.Millisecond || x.client.Away(x.lock.Key()) {
			return x.unreached()
		}
		reply, stamp, err := x.ask(ctx, within, awaited, take, wanted)
		if err != nil {
			if unanswered++; unanswered < maxUnanswered && wanted && client.Unreachable(err) && !x.client.Silent(x.lock.Key()) {
				continue
			}
			return x.unreached()
		}
		within = x.opts.redisTimeout
		x.rest = restFor(reply.Left)

		switch next := decide(reply, view{wanted: wanted, servable: x.old.freshness >= revalidate}); next {
		case takeValue:
			x.loadTimes.note(x.fill.Key, x.old.entry.LoadTime)
			x.end(ctx, &x.old.result, stamp)
			return ended
		case takeFailure:
			// Callers that had joined when the lock was last seen held have surely waited for that load.
			err := remoteError(x.fill.Key, reply.Text)
			x.end(ctx, &result[T]{err: err, failed: err != ErrNotFound}, lastAsked)
			return ended
		case retryNew:
			x.lock = x.newLock(x.fill.Key)
		case waitForLock:
			x.slot.Release()
			awaited, lastAsked, queue = reply.Text, stamp, false
			x.wait.polls++
			if x.pause(ctx, x.wait.pause(reply)) == interrupted {
				return ended
			}
		case waitForSlot:
			queue, lastAsked = true, stamp
		case leave:
			if x.fills.EndIfDeserted(x.fill) {
				return ended
			}
		case loadLocked:
			if x.slot.Held() {
				return next
			}
			// An earlier command to take the lock came late, when the place had been given back.
			lock := *x.lock
			x.fills.Behind(func() { x.abandon(ctx, lock) })
			x.lock = x.newLock(x.fill.Key)
		}
	}
}

// maxUnanswered is how many times a fill that callers wait for asks a Redis that answers other commands, but not its own.
const maxUnanswered = 2

// try takes a place to load if there is one now.
func (x *filling[T]) try(ctx context.Context, wanted bool) bool {
	if wanted {
		return x.slot.Try(false)
	}
	return x.slot.TryLease(ctx)
}

// unreached is what follows when Redis cannot be asked: callers are served by the source, a refresh is left.
func (x *filling[T]) unreached() step {
	if x.fill.Refresh && x.fills.EndIfDeserted(x.fill) {
		return ended
	}
	return loadUnlocked
}

// loadLocked loads under the lock, which it renews meanwhile, and stores and releases in one step.
func (x *filling[T]) loadLocked(ctx context.Context) {
	l := x.beginLoad(ctx)
	stop := x.keep(l.ctx)
	x.call(l, func(o outcome[T]) {
		defer x.finish(ctx)
		stop()
		l.cancel()
		x.slot.Release()
		if !o.failed() {
			x.loadTimes.note(x.fill.Key, o.Duration)
		}
		x.commit(ctx, o, l.began)
	})
}

// loadUnlocked loads while Redis cannot be asked. The callers of this process share the outcome. It is not stored, since
// a Delete may have come between without being seen.
func (x *filling[T]) loadUnlocked(ctx context.Context) {
	if x.lock.InDoubt {
		lock := *x.lock
		x.lock.InDoubt = false
		x.fills.Behind(func() { x.abandon(ctx, lock) })
	}
	x.counters.loadsUnlocked.Add(1)
	l := x.beginLoad(ctx)
	x.call(l, func(o outcome[T]) {
		defer x.finish(ctx)
		l.cancel()
		x.slot.Release()
		o.Unlocked = true
		x.encode(&o) // for the copies
		r := o.result()
		validFrom := l.began
		if r.failed {
			validFrom = x.clock.Now() // callers that joined while it ran have waited for it
		}
		r.unverified = true
		x.end(ctx, &r, validFrom)
		x.loadDone(ctx, o)
	})
}

// errSuperseded is the cause of the end of a load whose value no caller can be given any more.
var errSuperseded = errors.New("singlefill: the key was deleted, set or made stale while it was loaded")

// A running load has a context for the Loader, and one that ends at LoadTimeout only.
type running struct {
	ctx, bounded context.Context
	cancel       func()
	began        flight.Stamp
}

func (x *filling[T]) beginLoad(ctx context.Context) (l running) {
	l.bounded, l.cancel = context.WithTimeout(ctx, x.opts.loadTimeout)
	inner, void := context.WithCancelCause(l.bounded)
	l.ctx = inner
	l.began = x.fills.BeginLoad(x.fill, func() { void(errSuperseded) })
	x.loading = true
	return l
}

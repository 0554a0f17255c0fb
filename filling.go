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

// A filling is what brings a flight to its end when the first read has not: waiting for another process, or a load.
type filling[T any] struct {
	*Cache[T]
	flight *flight.Flight[result[T]]
	load   Loader[T]
	lock   *fill.Lock
	claim  *claim
	old    look[T] // of what the key holds, as far as known
	seen   int     // the turn as of which it held that
}

// fill ends a flight, after a first look.
func (c *Cache[T]) fill(ctx context.Context, f *flight.Flight[result[T]], load Loader[T], l look[T]) {
	x := &filling[T]{Cache: c, flight: f, load: load, lock: c.newLock(f.Key), claim: c.newClaim()}
	loads := false
	defer func() {
		if !loads {
			x.end(ctx)
		}
	}()
	if !c.flights.BeginFill(f, l.unread == nil) {
		return
	}
	if f.Refresh {
		c.decode(ctx, f.Key, l.data, &l) // a value of its own
	}
	x.note(l, flight.FirstTurn)

	r, asOf, next := x.contend(ctx, l.took)
	switch next {
	case settled:
		c.flights.End(f, r, asOf)
	case locked:
		if l.unread != nil && !f.Refresh && c.flights.HandOver(f) { // the refresh may be loading without the lock
			x.lock.Release(ctx, x.opts.redisTimeout, fill.Leave{})
			break
		}
		loads = true
		x.loadLocked(ctx)
	case unreached:
		if f.Refresh && c.flights.EndIfDeserted(f) || c.flights.HandOver(f) {
			break
		}
		x.askBehind(ctx)
		if x.enter(ctx) {
			loads = true
			x.loadUnlocked(ctx)
		}
	}
}

// end is the last of a filling. A load has it in the goroutine in which it ends: see call.
func (x *filling[T]) end(ctx context.Context) {
	x.flights.End(x.flight, result[T]{}, 0) // if nothing else has
	x.claim.free(ctx)
	if x.lock.InDoubt {
		x.lock.Abandon(ctx)
	}
	x.flights.Running.Done()
}

// askBehind finds out, while a load runs without the lock, whether Redis is there.
func (x *filling[T]) askBehind(ctx context.Context) {
	lock := *x.lock
	x.lock.InDoubt = false
	x.flights.Running.Go(func() {
		if lock.InDoubt {
			lock.Abandon(ctx)
		} else if !x.client.Away(x.valueKey(x.flight.Key)) {
			x.client.Ping()
		}
	})
}

// note remembers what the key holds as of a turn, and offers it to those who cannot wait for better.
func (x *filling[T]) note(l look[T], turn int) {
	x.old, x.seen = l, turn
	if l.use > useless {
		x.flights.Offer(x.flight, l.result, turn)
	}
}

// A step is what contend leads to.
type step int

const (
	settled   step = iota // there is a result
	locked                // the lock and a place to load are ours
	unreached             // Redis cannot be asked
	deserted              // nobody waits any more, and the flight has been ended
)

// contend asks Redis, again and again, for an entry or for the lock, until it has either. Asking and
// competing are one command, so that a waiter learns in one round trip of a value, of a failure, and of a
// holder that is gone, in whatever way it went. Between two commands it holds nothing: no connection, no
// place to load. A refresh that nobody waits for leaves it to the holder, if there is one.
func (x *filling[T]) contend(ctx context.Context, took time.Duration) (r result[T], asOf int, next step) {
	f := x.flight
	w := newWait(x.loads.estimate(f.Key, x.old.entry.LoadTime))
	defer func() { x.waited(ctx, f.Key, w) }()
	within := x.opts.redisTimeout - took // what Redis has left to answer, since it last has
	awaited, asked := "", 0
	for {
		f.Rest = maxRest
		if within < time.Millisecond || x.client.Away(x.valueKey(f.Key)) {
			return r, 0, unreached
		}
		if x.flights.Exempt(f) {
			x.claim.exempt(ctx)
		}
		take := x.claim.try()
		if !take && f.Refresh && !x.flights.Wanted(f) {
			if take = x.claim.tryFleet(ctx); !take && x.flights.EndIfDeserted(f) {
				return r, 0, deserted // those who have nothing to serve come first
			}
		}
		query := fill.Query{Known: entry.Header(x.old.data), Awaited: awaited, Take: take, For: x.purpose()}
		turn := x.flights.Tick(f)
		sent := time.Now()
		reply, err := client.Insist(ctx, within, client.Unreachable, func(within time.Duration) (fill.Reply, error) {
			return x.lock.GetOrLock(ctx, within, query)
		})
		w.heard(time.Since(sent))
		if err != nil {
			return r, 0, unreached
		}
		within = x.opts.redisTimeout
		f.Rest = refreshRest
		switch {
		case reply.Status == fill.Hit:
			var l look[T]
			x.decode(ctx, f.Key, []byte(reply.Text), &l)
			x.note(l, turn)
			x.loads.note(f.Key, x.old.entry.LoadTime)
			if x.old.use >= stale {
				return x.old.result, turn, settled
			}
			continue
		case reply.Known:
			x.note(x.old, turn)
		default:
			x.old.use = useless
		}

		if reply.Status != fill.Locked && !f.Refresh && !x.servable() && x.flights.HandOver(f) {
			return r, 0, deserted
		}
		var queue <-chan bool
		switch reply.Status {
		case fill.Locked:
			return r, 0, locked
		case fill.Failed:
			f.Rest = restFor(reply.Left)
			err := remoteError(f.Key, reply.Text)
			if old, ok := x.standIn(err); ok {
				return old, turn, settled
			}
			// Those who had come when the lock was last seen held have surely waited for that load.
			return result[T]{err: err}, asked, settled
		case fill.Gone:
			if x.flights.EndIfDeserted(f) {
				return r, 0, deserted
			}
			continue
		case fill.Refused:
			x.lock = x.newLock(f.Key)
			continue
		case fill.Busy:
			x.claim.free(ctx)
			f.Rest = restFor(reply.Left)
			if f.Refresh && x.flights.EndIfDeserted(f) {
				return r, 0, deserted
			}
			awaited, w.polls = reply.Text, w.polls+1
		case fill.Free:
			queue = x.claim.queue(ctx)
		}
		asked = turn
		switch x.rest(f, &w, w.pause(reply), queue) {
		case granted:
			x.claim.enter(ctx)
		case closing:
			return result[T]{err: ErrClosed}, flight.Always, settled
		}
		if x.flights.EndIfDeserted(f) {
			return r, 0, deserted
		}
	}
}

// loadLocked loads under the fill lock, which it renews meanwhile, and stores and releases in one step.
func (x *filling[T]) loadLocked(ctx context.Context) {
	f := x.flight
	loading := x.flights.BeginLoad(f)
	bounded, cancel := context.WithTimeout(f.Load.Inside(ctx), x.opts.loadTimeout)
	stop := x.keep(bounded)
	x.call(bounded, func(o outcome[T]) {
		defer x.end(ctx)
		stop()
		cancel()
		x.claim.free(ctx)
		if !o.failed() {
			x.loads.note(f.Key, o.Duration)
		}
		x.bring(ctx, o, loading)
	})
}

// keep renews the lock, unless the load is so quick that there is no need to begin with it.
func (x *filling[T]) keep(ctx context.Context) (stop func()) {
	running := &x.flights.Running
	running.Add(1)
	begin := time.AfterFunc(min(keepAfter, x.opts.lockTTL/3), func() {
		defer running.Done()
		x.lock.Keep(ctx, x.flight.Nudge, x.renew, func() { x.lockLost(x.flight) })
	})
	return func() {
		if begin.Stop() {
			running.Done()
		}
	}
}

// keepAfter is how long nobody looks whether a new lock is still held.
const keepAfter = 10 * time.Millisecond

// bring concludes a load under the lock.
func (x *filling[T]) bring(ctx context.Context, o outcome[T], loading int) {
	r, since, data, leave := x.conclude(&o, loading)
	asOf, err := x.settle(ctx, &o, data, leave, since)
	x.flights.End(x.flight, r, asOf)
	if client.Unreachable(err) { // once more, now that nobody waits
		_, err = x.settle(ctx, &o, data, leave, since)
	}
	// What never gets through, such as a value too large for the server, must not keep the lock from others.
	x.lock.InDoubt = x.lock.InDoubt || client.Unreachable(err)
	x.loadDone(ctx, o)
}

// renew prolongs the lock. That it could be prolonged also shows that nobody has touched the old value since
// the lock was taken: those who have come meanwhile may have it when they can wait no longer.
func (x *filling[T]) renew(ctx context.Context) (held bool, err error) {
	turn := x.flights.Tick(x.flight)
	if held, err = x.lock.Renew(ctx); held && x.old.use > useless {
		x.flights.Offer(x.flight, x.old.result, turn)
	}
	return held, err
}

func (c *Cache[T]) lockLost(f *flight.Flight[result[T]]) {
	c.counters.locksLost.Add(1)
	c.flights.BreakOff(f)
}

// conclude makes of a load's outcome what callers get, as of which turn that is known to be true if nothing
// proves more, and what Redis gets.
func (x *filling[T]) conclude(o *outcome[T], loading int) (r result[T], since int, data []byte, leave fill.Leave) {
	data, leave = x.seal(o)
	r, since = o.result(), loading
	if data != nil || leave.Drop {
		return r, since, data, leave
	}
	old, ok := x.standIn(o.Err)
	if ok && !errors.Is(o.Err, ErrClosed) {
		leave.RetryAfter = x.opts.retryAfter
		x.flight.Rest = min(x.opts.retryAfter, maxRest)
	}
	if ok && o.failed() {
		r, since, o.replaced = old, x.seen, true
	}
	return r, since, data, leave
}

// settle brings the outcome of a load to Redis and says as of when it is true: a store or release that was
// accepted proves that nobody deleted or set the key since the load began; one that was refused proves nothing
// beyond since. When none is answered, whoever came after it was sent may be the first to see Redis again: this
// process may have been frozen.
func (x *filling[T]) settle(ctx context.Context, o *outcome[T], data []byte, leave fill.Leave, since int) (asOf int, err error) {
	turn := x.flights.Tick(x.flight)
	answers := x.client.Answers()
	var ours bool
	if data != nil {
		ours, err = client.Insist(ctx, x.opts.redisTimeout, client.Unreachable, func(within time.Duration) (bool, error) {
			return x.lock.Store(ctx, within, data, x.opts.keptFor(o.life))
		})
		o.Stored, o.Fenced, o.StoreErr = ours, err == nil && !ours, err
	}
	if data != nil && err != nil && !client.Unreachable(err) && x.servable() { // it would refuse the next one too
		leave.RetryAfter, x.flight.Rest = x.opts.retryAfter, min(x.opts.retryAfter, maxRest)
	}
	if data == nil || err != nil && !client.Unreachable(err) {
		ours, err = client.Insist(ctx, x.opts.redisTimeout, client.Unreachable, func(within time.Duration) (bool, error) {
			return x.lock.Release(ctx, within, leave)
		})
	}
	switch {
	case o.failed() && !o.replaced:
		return turn, err // whoever came while it ran has waited for it
	case err == nil && ours:
		return turn, nil
	case err == nil || o.replaced: // an old value may have been deleted without the source having changed
		return since, err
	default:
		return x.unproved(since, turn, answers), err
	}
}

// unproved is the asOf of a load whose truth Redis could not be asked to prove. Without Redis there is nothing
// to compare with, and all who came before it was given up share the load. But if Redis has answered anything
// meanwhile it may have answered a Delete too: those who came after since have to ask again.
func (c *Cache[T]) unproved(since, givenUp int, answers int64) int {
	if c.client.Answers() == answers {
		return givenUp
	}
	return since
}

// enter waits for a place to load, in this process alone; false: there is no need to load any more.
func (x *filling[T]) enter(ctx context.Context) bool {
	f := x.flight
	x.claim.leaveFleet(ctx)
	for !x.claim.try() {
		if x.flights.Exempt(f) {
			x.claim.exempt(ctx)
			break
		}
		select {
		case <-f.Nudge:
		case <-x.claim.queue(ctx):
			x.claim.enter(ctx)
		case <-x.closing:
			x.flights.End(f, result[T]{err: ErrClosed}, flight.Always)
			return false
		}
		if x.flights.EndIfDeserted(f) {
			return false
		}
	}
	return true
}

// loadUnlocked loads without asking the fleet, which cannot be asked. Everyone here shares the outcome;
// it is not stored, since nothing could tell a Delete that it has missed.
func (x *filling[T]) loadUnlocked(ctx context.Context) {
	f := x.flight
	loading, answers := x.flights.BeginLoad(f), x.client.Answers()
	bounded, cancel := context.WithTimeout(f.Load.Inside(ctx), x.opts.loadTimeout)
	x.call(bounded, func(o outcome[T]) {
		defer x.end(ctx)
		cancel()
		x.claim.free(ctx)
		o.Unlocked = true
		x.counters.loadsUnlocked.Add(1)
		r, since, _, _ := x.conclude(&o, loading) // sealed for the copies
		var asOf int
		switch {
		case o.replaced:
			asOf = since
		case o.failed():
			asOf = flight.Always // whoever came while it ran has waited for it
		default:
			asOf = x.unproved(since, flight.Always, answers)
		}
		x.flights.End(f, r, asOf)
		x.loadDone(ctx, o)
	})
}

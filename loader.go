package singlefill

import (
	"context"
	"errors"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/fill"
	"github.com/singlefill/singlefill/internal/flight"
)

// A Loader asks the source for the value of key. It returns ErrNotFound, bare or wrapped, when there is none;
// that is remembered. Any other error is not: those who wait get it, later callers try anew.
//
// A Loader works for everyone who waits, not for the call that happened to come first: ctx has that call's
// values but not its deadline nor its cancellation; it ends after Options.LoadTimeout. All Loaders given for
// one key must mean the same, since whichever runs serves all. A Loader may call GetOrLoad for other keys,
// and of other caches, with its ctx.
type Loader[T any] func(ctx context.Context, key string) (T, error)

// GetOrLoad returns the value under key: from Redis if it is there, else from load, which runs once for all
// who ask at that time, in whatever process.
//
// ctx bounds how long this caller waits, nobody else: when it ends, GetOrLoad returns ctx.Err() — at once
// while waiting for a load, never later than its deadline, and within RedisTimeout when it is cancelled in
// the middle of a Redis command — and the load goes on for the others and for the cache.
//
// An error of load comes back as it is to everyone here who waited for it. Those who waited in other
// processes get a *RemoteError with its text. A panic or runtime.Goexit in load is a *PanicError. ErrNotFound
// is remembered; a remembered one comes back bare.
//
// While Redis cannot be asked, load still runs once per process at a time; what it brings is returned and
// not stored. Redis' own errors never come back from here: see Stats and Trace.
func (c *Cache[T]) GetOrLoad(ctx context.Context, key string, load Loader[T]) (T, error) {
	var zero T
	if err := checkCall(ctx, key); err != nil {
		return zero, err
	}
	if load == nil {
		return zero, errors.New("singlefill: load is nil")
	}
	outer := flight.LoadOf(ctx)
	var prev *flight.Flight[result[T]]
	for {
		s, err := c.flights.Board(key, prev, outer)
		if err != nil {
			return zero, err
		}
		if s.First {
			c.begin(ctx, s.Flight, load)
		}
		r, shared, ok, err := c.flights.Wait(ctx, s, outer)
		if ok {
			return c.deliver(ctx, s, r, shared)
		}
		if err != nil {
			return zero, err
		}
		prev = s.Flight
	}
}

// begin runs a flight: its read in the caller's goroutine if the caller can wait that long, and the rest,
// if there is any, in one of its own, since it belongs to all who board.
func (c *Cache[T]) begin(ctx context.Context, f *flight.Flight[result[T]], load Loader[T]) {
	detached := client.Detach(ctx)
	if c.client.EndsWithin(ctx) {
		go func() {
			if l, hit := c.read(detached, f); !hit {
				c.fill(detached, f, load, l)
			}
		}()
		return
	}
	if l, hit := c.read(detached, f); !hit {
		go c.fill(detached, f, load, l)
	}
}

// A look is what one GET has shown.
type look[T any] struct {
	entry entry.Entry
	value T
	found bool          // entry is fresh, and value decoded unless it says not found
	seen  string        // header of bytes that are no fresh entry of T
	err   error         // Redis could not be asked
	took  time.Duration // only with err
}

// look reads the value key: one plain GET, which a replica or the client's own cache may answer.
func (c *Cache[T]) look(ctx context.Context, key string) (l look[T]) {
	if l.err = c.client.Breaker.Check(); l.err != nil {
		l.took = c.opts.redisTimeout
		return l
	}
	sent := time.Now()
	data, err := client.Do(ctx, c.client, "get", func(ctx context.Context) ([]byte, error) {
		return c.client.Redis.Get(ctx, c.valueKey(key)).Bytes()
	})
	switch {
	case err == nil:
		if l.entry, l.value, l.found = c.decode(ctx, key, data); !l.found {
			l.seen = entry.Header(data)
		}
	case client.WrongType(err):
		c.badValue(ctx, key, err)
	case !errors.Is(err, redis.Nil):
		l.err, l.took = err, time.Since(sent)
	}
	return l
}

// read is a flight's first turn. A fresh entry ends the flight.
func (c *Cache[T]) read(ctx context.Context, f *flight.Flight[result[T]]) (l look[T], hit bool) {
	returned := false
	defer func() {
		if hit || !returned { // a codec or Trace function may panic or Goexit: those who boarded must not wait for ever
			c.flights.End(f, result[T]{}, 0)
			c.flights.Running.Done()
		}
	}()
	if l = c.look(ctx, f.Key); l.found {
		r := resultOf(l.entry, l.value)
		r.hit, hit = true, true
		c.flights.End(f, r, flight.FirstTurn)
	}
	returned = true
	return l, hit
}

// A result is how a flight ended.
type result[T any] struct {
	value   T      // for one caller; shared only if it cannot be copied
	payload []byte // value encoded, of which the other callers get copies of their own; nil: it could not be
	err     error
	hit     bool // by the first read
}

func resultOf[T any](e entry.Entry, v T) result[T] {
	if e.NotFound {
		return result[T]{err: ErrNotFound}
	}
	return result[T]{value: v, payload: e.Payload}
}

// fill ends a flight that has found no fresh entry: by waiting for another process, or by a load.
func (c *Cache[T]) fill(ctx context.Context, f *flight.Flight[result[T]], load Loader[T], l look[T]) {
	defer c.flights.Running.Done()
	defer c.flights.End(f, result[T]{}, 0) // if nothing else has
	c.flights.BeginFill(f)
	place := flight.NewPlace(c.places)
	defer place.Free()
	lock := c.newLock(f.Key)

	r, asOf, next := c.contend(ctx, f, lock, place, l)
	switch next {
	case settled:
		c.flights.End(f, r, asOf)
	case locked:
		c.loadLocked(ctx, f, load, lock, place)
	case unreached:
		c.flights.Running.Go(func() { c.ask(ctx, lock) })
		c.loadUnlocked(ctx, f, load, place)
		return
	}
	if lock.InDoubt {
		lock.Abandon(ctx)
	}
}

// ask finds out, while a load runs without the lock, whether Redis is there.
func (c *Cache[T]) ask(ctx context.Context, lock *fill.Lock) {
	if lock.InDoubt {
		lock.Abandon(ctx)
	} else if !c.client.Breaker.Open() {
		c.client.Ping()
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
// place to load.
func (c *Cache[T]) contend(ctx context.Context, f *flight.Flight[result[T]], lock *fill.Lock, place *flight.Place, l look[T]) (r result[T], asOf int, next step) {
	w := wait{begun: time.Now()}
	defer func() { c.waited(ctx, f.Key, w) }()
	within := c.opts.redisTimeout - l.took // what Redis has left to answer, since it last has
	seen, awaited, asked := l.seen, "", 0
	for {
		if within < time.Millisecond || c.client.Breaker.Open() {
			return r, 0, unreached
		}
		if c.flights.Exempt(f) {
			place.Exempt()
		}
		take := place.Try()
		turn := c.flights.Tick(f)
		reply, err := insist(within, func(within time.Duration) (fill.Reply, error) {
			return lock.GetOrLock(ctx, within, seen, awaited, take)
		})
		if err != nil {
			return r, 0, unreached
		}
		within = c.opts.redisTimeout

		var queue <-chan bool
		switch reply.Status {
		case fill.Locked:
			return r, 0, locked
		case fill.Hit:
			e, v, ok := c.decode(ctx, f.Key, []byte(reply.Text))
			if ok {
				return resultOf(e, v), turn, settled
			}
			seen = entry.Header(reply.Text)
			continue
		case fill.Failed:
			// Those who had come when the lock was last seen held have surely waited for that load.
			return result[T]{err: remoteError(f.Key, reply.Text)}, asked, settled
		case fill.Refused:
			*lock = *c.newLock(f.Key)
			continue
		case fill.Busy:
			place.Free()
			awaited, w.polls = reply.Text, w.polls+1
		case fill.Free:
			queue = place.Queue()
		}
		asked = turn
		switch c.rest(f, &w, w.pause(reply), queue) {
		case granted:
			place.Enter()
		case closing:
			return result[T]{err: ErrClosed}, flight.Always, settled
		}
		if c.flights.EndIfDeserted(f) {
			return r, 0, deserted
		}
	}
}

// loadLocked loads under the fill lock, which it renews meanwhile, and stores and releases in one step.
func (c *Cache[T]) loadLocked(ctx context.Context, f *flight.Flight[result[T]], load Loader[T], lock *fill.Lock, place *flight.Place) {
	loading := c.flights.BeginLoad(f)
	keeping, stop := context.WithTimeout(ctx, c.opts.loadTimeout)
	c.flights.Running.Go(func() { lock.Keep(keeping, f.Nudge, func() { c.lockLost(f) }) })
	o := c.call(ctx, f, load)
	stop()
	place.Free()

	data, word := c.seal(&o)
	asOf, err := c.settle(ctx, f, lock, &o, data, word, loading)
	c.flights.End(f, o.result(), asOf)
	if client.Unreachable(err) {
		c.settle(ctx, f, lock, &o, data, word, loading) // once more, now that nobody waits
	}
	c.loadDone(ctx, o)
}

func (c *Cache[T]) lockLost(f *flight.Flight[result[T]]) {
	c.counters.locksLost.Add(1)
	c.flights.BreakOff(f)
}

// settle brings the outcome of a load to Redis and says as of when it is true: a store or release that was
// accepted proves that nobody deleted or set the key since the load began; one that was refused proves nothing.
func (c *Cache[T]) settle(ctx context.Context, f *flight.Flight[result[T]], lock *fill.Lock, o *outcome[T], data []byte, word string, loading int) (asOf int, err error) {
	turn := c.flights.Tick(f)
	answers := c.client.Breaker.Answers()
	var ours bool
	if data != nil {
		ours, err = insist(c.opts.redisTimeout, func(within time.Duration) (bool, error) { return lock.Store(ctx, within, data, o.life) })
		o.Stored, o.Fenced, o.StoreErr = ours, err == nil && !ours, err
	}
	if data == nil || err != nil && !client.Unreachable(err) {
		ours, err = insist(c.opts.redisTimeout, func(within time.Duration) (bool, error) { return lock.Release(ctx, within, word) })
	}
	switch {
	case o.Err != nil && !o.notFound:
		return turn, err // whoever came while it ran has waited for it
	case err != nil:
		return c.unproved(loading, answers), err
	case ours:
		return turn, nil
	default:
		return loading, nil
	}
}

// unproved is the asOf of a load whose truth Redis could not be asked to prove. Without Redis there is nothing
// to compare with, and all share it. But if Redis has answered anything meanwhile it may have answered a
// Delete too: those who came after the load began have to ask again.
func (c *Cache[T]) unproved(loading int, answers int64) int {
	if c.client.Breaker.Answers() == answers {
		return flight.Always
	}
	return loading
}

// loadUnlocked loads without asking the fleet, which cannot be asked. Everyone here shares the outcome;
// it is not stored, since nothing could tell a Delete that it has missed.
func (c *Cache[T]) loadUnlocked(ctx context.Context, f *flight.Flight[result[T]], load Loader[T], place *flight.Place) {
	for !place.Try() {
		if c.flights.Exempt(f) {
			place.Exempt()
			break
		}
		select {
		case <-f.Nudge:
		case <-place.Queue():
			place.Enter()
		case <-c.closing:
			c.flights.End(f, result[T]{err: ErrClosed}, flight.Always)
			return
		}
		if c.flights.EndIfDeserted(f) {
			return
		}
	}
	loading, answers := c.flights.BeginLoad(f), c.client.Breaker.Answers()
	o := c.call(ctx, f, load)
	place.Free()
	o.Unlocked = true
	c.counters.loadsUnlocked.Add(1)
	c.seal(&o) // for the copies
	asOf := c.unproved(loading, answers)
	if o.Err != nil && !o.notFound {
		asOf = flight.Always // whoever came while it ran has waited for it
	}
	c.flights.End(f, o.result(), asOf)
	c.loadDone(ctx, o)
}

// deliver gives a caller its result. The first one gets the value itself; every other one a copy of its own,
// as a hit would have given it, so that no two callers can change each other's.
func (c *Cache[T]) deliver(ctx context.Context, s flight.Seat[result[T]], r result[T], shared bool) (T, error) {
	if !s.First {
		c.counters.shared.Add(1)
	}
	if r.hit {
		c.noteHit(ctx, s.Key)
	} else {
		c.noteMiss(ctx, s.Key)
	}
	if r.err != nil {
		var zero T
		return zero, r.err
	}
	if shared && r.payload != nil {
		if v, err := c.unmarshal(r.payload); err == nil {
			return v, nil
		}
	}
	return r.value, nil
}

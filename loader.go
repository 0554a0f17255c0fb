package singlefill

import (
	"context"
	"errors"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/flight"
)

// A Loader asks the source for the value of key. It returns [ErrNotFound], bare or wrapped, when there is none;
// that is remembered. Any other error is not: those who wait get it, later callers try anew.
//
// A Loader works for everyone who waits, not for the call that happened to come first: ctx has that call's
// values but not its deadline nor its cancellation; it ends after [Options.LoadTimeout]. All Loaders given for
// one key must mean the same, since whichever runs serves all. A Loader may call GetOrLoad for other keys,
// and of other caches, with its ctx.
//
// A refresh runs behind the call that began it, perhaps after that call has returned: what ctx's values refer to
// must outlive the request then.
type Loader[T any] func(ctx context.Context, key string) (T, error)

// GetOrLoad returns the value under key: from Redis if it is there, else from load, which runs once for all
// who ask at that time, in whatever process.
//
// ctx bounds how long this caller waits, nobody else: when it ends, GetOrLoad returns ctx.Err() — at once
// while waiting for a load, never later than its deadline, and within RedisTimeout when it is cancelled in
// the middle of a Redis command — and the load goes on for the others and for the cache.
//
// An error of load comes back as it is to everyone here who waited for it. Those who waited in other
// processes get a [*RemoteError] with its text. A panic or runtime.Goexit in load is a [*PanicError]. [ErrNotFound]
// is remembered; a remembered one comes back bare.
//
// A value that is about to expire, or stale within [Options.StaleWhileRevalidate], is returned at once, and load
// may run behind this call: see [Options.EarlyRefresh]. A value that is stale within [Options.StaleIfError] is
// returned instead of an error of load, and when the deadline of ctx comes before the load's end.
// [Cache.GetOrLoadInfo] tells which it was.
//
// While Redis cannot be asked, load still runs once per process at a time; what it brings is returned and
// not stored. Redis' own errors never come back from here: see [Stats] and [Trace].
func (c *Cache[T]) GetOrLoad(ctx context.Context, key string, load Loader[T]) (T, error) {
	v, _, err := c.GetOrLoadInfo(ctx, key, load)
	return v, err
}

// GetOrLoadInfo is [Cache.GetOrLoad] that also tells what the value is: fresh or stale, how old, and why not newer.
func (c *Cache[T]) GetOrLoadInfo(ctx context.Context, key string, load Loader[T]) (T, ValueInfo, error) {
	var zero T
	if err := checkCall(ctx, key); err != nil {
		return zero, ValueInfo{}, err
	}
	if load == nil {
		return zero, ValueInfo{}, errors.New("singlefill: load is nil")
	}
	outer := flight.LoadOf(ctx)
	var prev *flight.Flight[result[T]]
	for {
		s, err := c.flights.Board(key, prev, outer)
		if err != nil {
			return zero, ValueInfo{}, err
		}
		if s.First {
			var l look[T]
			if hold, landed := c.begin(ctx, s, load, outer, &l); landed {
				return c.deliver(ctx, s, &l.result, hold)
			}
		}
		r, hold, ok, err := c.flights.Wait(ctx, s, outer)
		if ok {
			if err != nil { // no more patience: what is offered has to do
				r = new(*r)
				r.failure = err
			}
			return c.deliver(ctx, s, r, hold)
		}
		if err != nil {
			return zero, ValueInfo{}, err
		}
		prev = s.Flight
	}
}

// begin runs a flight when it is due: its read in the caller's goroutine if the caller can wait that long, and the rest,
// if there is any, in one of its own, since it belongs to all who board. If the read is all, the caller has landed, and
// takes what l has found.
func (c *Cache[T]) begin(ctx context.Context, s flight.Seat[result[T]], load Loader[T], outer *flight.Load, l *look[T]) (hold flight.Hold, landed bool) {
	switch {
	case s.After && !c.flights.AwaitTurn(ctx, s.Flight):
		detached := client.Detach(ctx)
		c.flights.RunAfter(s.Flight, func() { c.run(detached, s.Flight, load) })
	case c.client.EndsWithin(ctx):
		go c.run(client.Detach(ctx), s.Flight, load)
	default:
		hold, landed = c.read(ctx, s, load, outer, l)
		switch missed := *l; {
		case landed:
		case missed.unread == client.ErrNotSent:
			go c.run(client.Detach(ctx), s.Flight, load)
		default:
			go c.fill(client.Detach(ctx), s.Flight, load, missed)
		}
	}
	return hold, landed
}

// run runs a flight for callers who all wait for it.
func (c *Cache[T]) run(ctx context.Context, f *flight.Flight[result[T]], load Loader[T]) {
	var l look[T]
	if _, hit := c.read(ctx, flight.Seat[result[T]]{Flight: f}, load, nil, &l); !hit {
		c.fill(ctx, f, load, l)
	}
}

// read is a flight's first turn; the end of ctx does not end it. An entry that can be served ends the flight. s is the
// seat of the caller in whose goroutine it runs, who lands then; without First, it runs in one of its own.
func (c *Cache[T]) read(ctx context.Context, s flight.Seat[result[T]], load Loader[T], outer *flight.Load, l *look[T]) (hold flight.Hold, hit bool) {
	f, returned := s.Flight, false
	defer func() {
		if !returned { // a codec or Trace function may panic or Goexit: those who boarded must not wait for ever
			c.flights.End(f, result[T]{}, 0)
		}
		if hit || !returned {
			c.flights.Running.Done()
		}
	}()
	c.look(ctx, f.Key, c.client.GetDetached, l)
	if l.use >= stale {
		l.hit, hit = true, true
		f.Common = c.clone != nil
		if s.First {
			hold = c.flights.Land(s, &l.result, outer)
		} else {
			c.flights.End(f, l.result, flight.FirstTurn)
		}
		if l.use == stale || c.early(&l.entry, l.at) {
			c.refresh(client.Detach(ctx), f.Key, load, l.data)
		}
	}
	returned = true
	return hold, hit
}

// A result is how a flight ended.
type result[T any] struct {
	value   T           // for one caller, or for copies; shared only if it cannot be copied
	entry   entry.Entry // of value, with its payload, of which the other callers get copies of their own; nil: there is none
	at      time.Time   // when entry was looked at
	use     use         // what it was good for then
	hit     bool        // by the first read
	err     error
	failure error // of the load in whose place an old value is served
}

// A look is what one command has shown of a value key.
type look[T any] struct {
	result[T]               // that it is good for; unless its use is useless, its value is decoded
	data      []byte        // what is there
	unread    error         // Redis could not be asked
	took      time.Duration // only with unread
}

// look reads the value key: one plain GET, which a replica or the client's own cache may answer.
func (c *Cache[T]) look(ctx context.Context, key string, get getter, l *look[T]) {
	value := c.valueKey(key)
	if l.unread = c.client.Refusal(value); l.unread != nil {
		l.took = c.opts.redisTimeout
		return
	}
	sent := time.Now()
	data, err := get(ctx, sent, value)
	switch {
	case err == nil:
		c.decode(ctx, key, data, l)
	case client.WrongType(err):
		c.badValue(ctx, key, err)
	case !errors.Is(err, redis.Nil):
		l.unread, l.took = err, time.Since(sent)
	}
}

type getter func(ctx context.Context, now time.Time, key string) ([]byte, error)

// deliver gives a caller its result. The first one gets the value itself; every other one a copy of its own,
// as a hit would have given it, so that no two callers can change each other's. A read of several callers decodes
// the value once, and all of them get copies of that if it can be copied.
func (c *Cache[T]) deliver(ctx context.Context, s flight.Seat[result[T]], r *result[T], hold flight.Hold) (T, ValueInfo, error) {
	if !s.First {
		c.counters.shared.Add(1)
	}
	if r.hit {
		c.noteHit(ctx, s.Key)
	} else {
		c.noteMiss(ctx, s.Key)
	}
	var zero T
	info, err := c.infoOf(r)
	if err != nil {
		return zero, info, err
	}
	if info.Stale {
		c.noteStale(ctx, s.Key, info)
	}
	if r.err != nil {
		return zero, info, r.err
	}
	switch {
	case hold == flight.Common:
		return c.clone(r.value), info, nil
	case hold == flight.Shared && r.entry.Payload != nil:
		if v, err := c.unmarshal(r.entry.Payload); err == nil {
			return v, info, nil
		}
	}
	return r.value, info, nil
}

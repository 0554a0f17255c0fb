package singlefill

import (
	"context"
	"errors"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/event"
	"github.com/singlefill/singlefill/internal/filllock"
	"github.com/singlefill/singlefill/internal/fleetlock"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/foreign"
	"github.com/singlefill/singlefill/internal/value"
	"github.com/singlefill/singlefill/internal/wait"
	"github.com/singlefill/singlefill/lock"
)

// ask sends one command: it looks for an entry and, if take is set, takes the lock if no process
// holds it. The stamp is from before the command. What the reply says of the key is true as of
// then.
func (x *filling) ask(ctx context.Context, take bool) (filllock.Reply, flight.Stamp, error) {
	a := x.next
	query := filllock.Query{Known: entry.Header(x.old.Data), Awaited: a.awaited, Take: take, For: x.purpose(a.wanted)}
	stamp, sent := x.clock.Now(), time.Now()
	var reply filllock.Reply
	var err error
	found := value.Lookup{Key: x.fill.Key}
	x.store.During([]*value.Lookup{&found}, func() {
		reply, err = client.Retry(ctx, a.within, client.Again, func(within time.Duration) (filllock.Reply, error) {
			return x.lock.GetOrLock(ctx, within, query)
		})
		x.wait.Answered(sent)
		if err == nil && reply.Status == filllock.Hit {
			x.store.Decode(ctx, &found, []byte(reply.Text))
			found.Kept(reply.Kept)
		}
	})
	x.replaces = err == nil && reply.Status == filllock.Locked && reply.Known
	switch {
	case err != nil:
	case reply.Status == filllock.Hit:
		x.old, x.oldSince = new(found), stamp
	default:
		x.oldSince = stamp
		if !reply.Known {
			x.old.Freshness = value.Expired
		}
	}
	return reply, stamp, err
}

// purpose tells the script what the callers can do with the entry that the key holds.
func (x *filling) purpose(wanted bool) string {
	switch {
	case !wanted:
		return filllock.Served
	case x.store.Servable(&x.old.Found):
		return filllock.Fallback
	}
	return filllock.Unusable
}

// renewAfter is the age at which a lock is first renewed. A quicker load needs no timer for
// renewals.
const renewAfter = 10 * time.Millisecond

// renew renews the lock until stop is called. A caller that joins brings the next renewal forward,
// so that a lost lock is noticed soon.
func (x *filling) renew(ctx context.Context) (stop func()) {
	return x.fills.Later(min(renewAfter, x.opts.lockTTL/3), func() {
		x.lock.Keep(ctx, x.fill.Wake, func() {
			x.events.LockLost()
			x.fills.LockLost(x.fill)
		})
	})
}

// commit stores the outcome of a load, or releases the lock, and hands the outcome to the callers.
func (x *filling) commit(ctx context.Context, o outcome, began flight.Stamp) {
	data, note := x.encode(&o)
	if err := x.takeTags(&o); err != nil {
		data, o.StoreErr, o.untagged = nil, err, true
	}
	r := o.result()
	if o.superseded {
		note = filllock.ReleaseNote{} // waiters in other processes load, rather than fail with this
	} else if data == nil && !note.Drop && !foreign.Is(o.Err, ErrClosed) {
		x.backOff(&note)
	}
	stamp := x.clock.Now()
	var ours bool
	err := x.client.Refusal(x.lock.Keys.Lock)
	if err == nil {
		stored := value.Lookup{Key: x.fill.Key}
		x.store.During([]*value.Lookup{&stored}, func() {
			if ours, err = x.storeOrRelease(ctx, &o, data, note); err == nil && o.Stored {
				x.store.Stored(&stored, data, o.entry, o.life)
			}
		})
	}
	switch {
	case err == nil && ours: // this proves that the key has not been invalidated since the load began
		if !o.Stored && note.Drop && x.near != nil {
			x.near.Forget(x.lock.Keys.Value) // Redis has just dropped the old value
		}
		x.oldSince = stamp
		x.end(ctx, &r, stamp)
	case r.failed && !x.store.Servable(&x.old.Found): // callers that joined during the load have waited for its failure
		x.end(ctx, &r, stamp)
	default:
		r.unverified = err != nil
		x.end(ctx, &r, began)
	}
	if client.Unreachable(err) { // once more, or for the first time, now that no caller waits
		_, err = x.storeOrRelease(ctx, &o, data, note)
	}
	// A value that the server never accepts, for example one that is too large, must not keep the
	// lock, nor must a server that refuses writes for a moment.
	x.lock.InDoubt = x.lock.InDoubt || err != nil
	x.loadDone(ctx, o)
}

// backOff keeps the fleet off the source for RetryAfter, if there is an old value to serve.
func (x *filling) backOff(note *filllock.ReleaseNote) {
	if x.store.Servable(&x.old.Found) {
		note.RetryAfter = x.opts.retryAfter
		x.rest = min(x.opts.retryAfter, maxRest)
	}
}

// storeOrRelease stores data and releases the lock in one step. Without data, or if the server
// refuses to store it, or if one of its tags has been invalidated, it only releases the lock. It reports
// whether this fill still held the lock, and the key has not been invalidated by a tag.
func (x *filling) storeOrRelease(ctx context.Context, o *outcome, data []byte,
	note filllock.ReleaseNote) (ours bool, err error) {
	noted, valid, err := x.noteTags(ctx, o)
	switch {
	case client.Unreachable(err):
		o.StoreErr = err
		return false, err
	case err != nil:
		o.StoreErr = err
		x.backOff(&note)
	case !valid: // waiters in other processes load, as after a Delete
		o.Fenced, note = data != nil, filllock.ReleaseNote{}
	case data != nil:
		kept := x.store.KeptFor(o.life)
		ours, err = client.Retry(ctx, x.opts.redisTimeout, client.Again, func(within time.Duration) (bool, error) {
			return x.lock.Store(ctx, within, data, kept)
		})
		o.Stored, o.Fenced, o.StoreErr = ours, err == nil && !ours, err
		if ours && noted != nil {
			_ = x.tags.Stored(ctx, noted, true) // a failure is traced
		}
		if err == nil || client.Unreachable(err) {
			return ours, err
		}
		x.backOff(&note) // the server would refuse the next value, too
	}
	ours, err = client.Retry(ctx, x.opts.redisTimeout, client.Again, func(within time.Duration) (bool, error) {
		return x.lock.Release(ctx, within, note)
	})
	return ours && valid, err
}

// abandon gives up an attempt to lock of which a command was not answered, or whose release was
// refused. Otherwise it could keep the lock without a load. It tries until Redis answers; what Redis
// refuses, until the lock has expired. The first command is sent also while the breaker is open: a frozen
// server executes it as soon as it goes on. When the cache is closed it tries once more.
func (c *engine) abandon(ctx context.Context, lock filllock.Lock) {
	for end := time.Now().Add(c.opts.lockTTL); ; {
		closed := c.checkOpen() != nil
		switch _, err := lock.Abandon(ctx); {
		case err == nil || closed || errors.Is(err, redis.ErrClosed):
			return
		case client.Unreachable(err):
			end = time.Now().Add(c.opts.lockTTL)
		case time.Now().After(end):
			return
		}
		c.pauseUntilBack(lock.Keys.Lock)
	}
}

// pauseUntilBack pauses, at least for as long as the breaker of key's node is open. Close ends it, of the cache or
// of the client.
func (c *engine) pauseUntilBack(key string) {
	for away := true; away && c.checkOpen() == nil; away = c.client.Away(key) && !c.client.Gone() {
		select {
		case <-c.closing:
		case <-time.After(wait.MaxPause):
		}
	}
}

// A fleet limits the loads of all processes to MaxFleetLoads. While Redis does not answer there is no such
// limit: MaxLoads still bounds each process, and a read that the source could serve must not fail.
//
// A slot expires like the fill lock, and no load outlives LoadTimeout. A load acquires its slot
// before its fill lock, and releases it while another process loads the key. So no process holds
// one of the two and waits for the other.
type fleet struct {
	slots  fleetlock.Semaphore
	opts   settings
	client *client.Client
	fills  *flight.Fills[result]
	events *event.Sink
}

func (c *engine) newFleet(rdb redis.UniversalClient) (f *fleet, err error) {
	s := c.opts
	f = &fleet{opts: s, client: c.client, fills: c.fills, events: c.events}
	f.slots, err = fleetlock.New(rdb, fleetlock.Options{
		Name: c.namespace + ":loads",
		// No value key ends with ":loads", so this key is no key of a caller.
		Key:  c.namespace + ":{" + client.HashTag(c.namespace) + "}:loads",
		Size: s.maxFleetLoads, TTL: s.lockTTL, MaxHold: s.loadTimeout, RedisTimeout: s.redisTimeout,
		RedisError: func(ctx context.Context, _ string, err error) { c.events.RedisError(ctx, "fleet", err) },
	})
	return f, err
}

// Lease acquires a slot and returns a function to release it.
func (f *fleet) Lease(ctx context.Context, wait bool) (release func(), ok bool) {
	give, err := f.slots.Acquire(ctx, false)
	for wait && errors.Is(err, lock.ErrBusy) && ctx.Err() == nil {
		// Redis may stop answering during the wait. To try reports that sooner than to wait.
		bounded, cancel := context.WithTimeout(ctx, 4*f.opts.redisTimeout)
		give, err = f.slots.Acquire(bounded, true)
		cancel()
		if err != nil && ctx.Err() == nil {
			give, err = f.slots.Acquire(ctx, false)
		}
	}
	switch {
	case errors.Is(err, lock.ErrBusy) || err != nil && ctx.Err() != nil:
		return nil, false
	case err != nil:
		f.events.LoadUnlimited()
		f.refused(ctx, err)
		return nil, true
	}
	return func() {
		// A failed release has been reported as a RedisError, or the lease has ended: the load
		// was slower than LoadTimeout, or Redis has lost the lease.
		f.fills.Behind(func() { _ = give(ctx) })
	}, true
}

// refused reports an error of the semaphore. Errors of its commands have been reported already.
func (f *fleet) refused(ctx context.Context, err error) {
	var reply redis.Error
	if !errors.Is(err, lock.ErrUnavailable) && !errors.Is(err, lock.ErrAmbiguous) && !errors.As(err, &reply) {
		f.events.RedisError(ctx, "fleet", err)
	}
}

// Away reports that no slot can be acquired now.
func (f *fleet) Away() bool { return f.client.AnyAway() }

// Behind runs a function that Close waits for.
func (f *fleet) Behind(run func()) { f.fills.Behind(run) }

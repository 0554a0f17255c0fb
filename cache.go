package singlefill

import (
	"cmp"
	"context"
	"math"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/event"
	"github.com/singlefill/singlefill/internal/fill"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/near"
	"github.com/singlefill/singlefill/internal/read"
	"github.com/singlefill/singlefill/internal/revoke"
	"github.com/singlefill/singlefill/internal/tags"
	"github.com/singlefill/singlefill/internal/value"
)

// A Cache holds values of type T under one namespace: in Redis, or with [NewLocal] in the memory of
// this process. It is safe for concurrent use. Make one per namespace and process with [New], and keep
// it: the zero Cache is not usable.
//
// Each caller owns the value that it gets. The exception is a value that the codec cannot encode or
// decode again: the callers of this process that waited for it share it.
type Cache[T any] struct{ rooms *rooms }

// Rooms are a Cache without its type: they carry a value as a pointer to a T. So they are compiled once.
type rooms struct {
	namespace string
	events    *event.Sink
	client    *client.Client
	near      *near.Tier // nil: off
	fills     *flight.Fills[fill.Result]
	slots     *flight.Slots // MaxLoads and MaxFleetLoads
	reader    *read.Reader
	keys      *revoke.Keys
	sets      *revoke.Sets
	space     *revoke.Space
	tags      *revoke.Tags // nil: Options.Tags is
	check     check
	closing   chan struct{}
	closeOnce sync.Once
	free      func() // of NewLocal, or nil
}

// New returns a [Cache] for values of T under namespace, which live for ttl. It does no I/O.
//
// rdb may be a client of a single server, of Sentinel or of a Cluster, an auto-pipelining client,
// a Ring, or one with client-side caching. The caller closes it after the Cache. Each command takes a
// goroutine if ContextTimeoutEnabled is off, if the client has an OnConnect function or a credentials
// provider, and with a Ring or a type of your own. All caches and locks on one client together send no more commands
// at a time than its pool has connections.
//
// New returns an error that names the argument, its value and what is allowed: a namespace in
// UTF-8 without braces and control characters, a ttl of 1 ms or more, options that agree with each other, no
// pipeline, and a codec that can store values of T (see [MsgPack]).
func New[T any](rdb redis.UniversalClient, namespace string, ttl time.Duration, opts *Options[T]) (*Cache[T], error) {
	return newCache(rdb, namespace, ttl, opts, func(*settings) {})
}

// newCache is New with a change of the settings.
func newCache[T any](rdb redis.UniversalClient, namespace string, ttl time.Duration, opts *Options[T], change func(*settings)) (*Cache[T], error) {
	if opts == nil {
		opts = new(Options[T])
	}
	s, err := resolve(rdb, namespace, ttl, OptionsFor[any](opts))
	if err != nil {
		return nil, err
	}
	change(&s)
	typ, err := newType(namespace, s, opts)
	if err != nil {
		return nil, err
	}
	var refreshes fill.Loader
	if opts.LoadMany != nil {
		refreshes = loadMany[T](opts.LoadMany)
	}
	c, err := newRooms(rdb, namespace, s, typ, refreshes)
	if err != nil {
		return nil, err
	}
	return &Cache[T]{c}, nil
}

// newRooms assembles a cache bottom up: each room takes those below it.
func newRooms(rdb redis.UniversalClient, namespace string, s settings, typ *value.Type, refreshes fill.Loader) (*rooms, error) {
	clock, events, closing := new(flight.Clock), event.NewSink(), make(chan struct{})
	s.trace.addTo(events, namespace)
	fills := flight.NewFills[fill.Result](clock)
	background := func(run func(<-chan struct{})) { fills.Go(func() { run(closing) }) }
	redis := client.New(rdb, s.redisTimeout, events.RedisError, events.BreakerChanged, background)
	var tier *near.Tier
	var memory *value.Memory
	log := near.NewGuest(redis, logKey(namespace), background)
	if s.near != nil {
		tier = newTier(redis, namespace, s.near, background, events.NearDropped)
		log = &tier.Log
		memory = &value.Memory{Tier: tier, TTL: s.near.TTL, Share: s.near.Share}
	}
	store := value.New(typ, namespace, redis, memory, events)
	var index *tags.Index
	if typ.Tags != nil {
		index = tags.New(redis, namespace, 2*min(s.loadTimeout, math.MaxInt64/2), s.lockTTL)
	}
	keys := revoke.NewKeys(redis, store, log, fills, closing)
	space := revoke.NewSpace(keys, namespace, s.lockTTL, index, events)
	var tagged *revoke.Tags
	if index != nil {
		tagged = revoke.NewTags(space)
	}
	var leases flight.Leases
	var all *fleet
	if s.maxFleetLoads > 0 {
		var err error
		if all, err = newFleet(rdb, namespace, fleet{opts: s, client: redis, fills: fills, events: events}); err != nil {
			return nil, err
		}
		leases = all
	}
	slots, calls := flight.NewSlots(s.maxLoads, leases), user{namespace, store, s.errors}
	filler := fill.New(fill.Parts{
		Client: redis, Store: store, Tags: index, Fills: fills, Slots: slots, User: calls, Events: events, Keys: keys, Closing: closing,
		LockTTL: s.lockTTL, LoadTimeout: s.loadTimeout, RetryAfter: s.retryAfter, FailureTTL: s.failureTTL, LoadMany: refreshes, MaxBatch: s.maxBatch,
	})
	reader := read.New(read.Parts{
		Client: redis, Store: store, Fills: fills, Filler: filler, Slots: slots, User: calls, Events: events,
		Closing: closing, StaleAfter: s.staleAfter, LoadTimeout: s.loadTimeout, MaxBatch: s.maxBatch, Audit: s.audit,
	})
	return &rooms{
		namespace: namespace, events: events, client: redis, near: tier, fills: fills, slots: slots,
		reader: reader, keys: keys, sets: revoke.NewSets(keys, index), space: space, tags: tagged,
		check:   check{redis, namespace, s.lockTTL, space, tier, index, all},
		closing: closing,
	}, nil
}

// Namespace returns the namespace that was given to [New].
func (c *Cache[T]) Namespace() string { return c.rooms.namespace }

// Get returns the value under key if the cache has it, [ErrMiss] if it does not, and [ErrNotFound]
// if it remembers that the source has none. It returns a value within
// [Options.StaleWhileRevalidate], but not one within StaleIfError. It neither loads nor refreshes,
// waits for no load, and returns errors of Redis.
func (c *Cache[T]) Get(ctx context.Context, key string) (T, error) {
	v, err := c.rooms.get(ctx, key)
	return valueOf[T](v), err
}

func (c *rooms) get(ctx context.Context, key string) (v any, err error) {
	defer failed(&err)
	if err := c.checkKey(ctx, key); err != nil {
		return nil, err
	}
	return c.reader.Get(ctx, key)
}

// Set stores value under key, and supersedes a load of key that is in flight, in any process. If
// [Options.TTLFunc] returns less than 1 ms for value, Set deletes the key. Of two calls the later
// one wins, even if its value is the older state of the source.
//
// After an error the key may hold the new value or the old one, a load in flight may still be
// stored, and a command that was not answered may still be executed, even after a later Delete. Set
// is not sent again if its reply was lost: another process may have deleted the value since. It
// looks for the value. If it is not there, Set deletes the key and returns an error that says so.
func (c *Cache[T]) Set(ctx context.Context, key string, value T) error {
	return c.rooms.set(ctx, key, &value)
}

func (c *rooms) set(ctx context.Context, key string, v any) (err error) {
	defer failed(&err)
	if err := c.checkKey(ctx, key); err != nil {
		return err
	}
	return c.sets.Set(ctx, key, v)
}

// Delete removes the keys, and supersedes their loads that are in flight, in any process: their
// values are not stored, and no GetOrLoad that begins after Delete has returned gets them, in any
// process. With [Options.Near] other processes may return them for MaxLag. Calls already waiting may
// still get them, and so may calls in a process that cannot reach Redis. Each key is deleted together with its lock in
// one step; several keys are not.
//
// After an error some keys may not have been deleted: call Delete again, or accept the old values
// until they expire.
func (c *Cache[T]) Delete(ctx context.Context, keys ...string) error {
	return c.rooms.invalidate(ctx, keys, c.rooms.keys.Delete)
}

// Expire makes the values under keys stale without removing them, and supersedes loads in flight
// like Delete. The next GetOrLoad refreshes them, and serves them as [Options.StaleWhileRevalidate]
// and [Options.StaleIfError] allow; without these it loads as after a Delete. The windows begin
// now, and end no later than they would have ended.
//
// After Expire has returned, no process takes the old values for fresh, whatever its clock says.
// After an error some keys may not have been made stale.
func (c *Cache[T]) Expire(ctx context.Context, keys ...string) error {
	return c.rooms.invalidate(ctx, keys, c.rooms.keys.Expire)
}

// DeleteIf removes the value that info describes, as Delete does, but only if key still holds it:
// for a value that is seen to be wrong when it is used, such as a token that was refused. info comes
// from GetOrLoadInfo. However many callers in all processes have seen one value, one of them
// deletes it. The others get false, and their next GetOrLoad joins the load that replaces it.
//
// No GetOrLoad of this process that begins after DeleteIf has returned gets that value from the cache.
// A newer value stays, also an equal value that was loaded or set again, and its load goes on. What
// Expire has made stale since is another value.
//
// A value that was loaded while Redis did not answer is in no cache: DeleteIf then returns false and
// does nothing, as for the zero ValueInfo. After an error the value may not have been deleted.
func (c *Cache[T]) DeleteIf(ctx context.Context, key string, info ValueInfo) (deleted bool, err error) {
	return c.rooms.deleteIf(ctx, key, info.entry)
}

func (c *rooms) deleteIf(ctx context.Context, key string, entry uint64) (deleted bool, err error) {
	defer failed(&err)
	if err := c.checkKey(ctx, key); err != nil {
		return false, err
	}
	return c.keys.DeleteIf(ctx, key, entry)
}

// invalidate checks keys, and calls do.
func (c *rooms) invalidate(ctx context.Context, keys []string, do func(ctx context.Context, keys ...string) error) (err error) {
	defer failed(&err)
	if err := c.checkOpen(ctx); err != nil {
		return err
	}
	for _, key := range keys {
		if err := checkCall(ctx, key); err != nil {
			return err
		}
	}
	return do(ctx, keys...)
}

// Clear removes every value of the namespace, and supersedes every load that is in flight, in any
// process: no GetOrLoad that begins after Clear has returned gets a value that was loaded before
// Clear was called. What others store while Clear runs may stay.
//
// Its time grows with the number of keys in the database. After an error a part of the values may
// still be there: call Clear again. It is an error, too, if a server is restarted, slots of a Cluster
// move or the cache is closed while Clear runs, if rdb does not reach each server, or if SCAN does not
// find what rdb stores.
func (c *Cache[T]) Clear(ctx context.Context) (err error) {
	defer failed(&err)
	if err := cmp.Or(c.rooms.checkOpen(ctx), ctx.Err()); err != nil {
		return err
	}
	return value.Wrap(ctx, "clear", c.rooms.space.Clear(ctx))
}

// Check sends every command that the cache may ever send, on keys that no caller can use, in a
// Cluster to every master. It returns an error that names each purpose for which Redis refuses a
// command, or the first error if Redis does not answer. It removes its keys, which begin with the
// namespace and ":check:" or ":log:"; if it cannot, they expire, the last within a day.
//
// Without a right the cache goes on loading, and may store nothing: see Stats.Refused. A program
// that never calls Clear does not need what is refused for clear. Call Check when a process starts,
// not in a health check, which would take down all processes in an outage that the cache survives.
func (c *Cache[T]) Check(ctx context.Context) error {
	if err := c.rooms.checkOpen(ctx); err != nil {
		return err
	}
	return c.rooms.check.rights(ctx)
}

// AddTrace adds functions for what happens from now on. The functions of [Options.Trace] are called
// before them. They cannot be removed. Nil adds nothing.
func (c *Cache[T]) AddTrace(t *Trace) { t.addTo(c.rooms.events, c.rooms.namespace) }

// Stats returns the counts so far, also after Close.
func (c *Cache[T]) Stats() Stats { return c.rooms.stats() }

func (c *rooms) stats() Stats {
	s := Stats(c.events.Stats())
	s.BreakerOpen, s.CommandsQueued, s.Queued = c.client.AnyAway(), c.client.Queued(), int64(c.slots.Queued())
	if c.near != nil {
		s.NearAge = c.near.Age()
	}
	return s
}

// Close makes later calls return [ErrClosed], and also those that wait for other processes. It
// returns when the loads of this process have ended and have been stored: after LoadTimeout and
// their last commands at the latest. If Redis does not answer, slots of MaxFleetLoads are released
// in the background, for about LockTTL. Close does not close the client. A second Close does
// nothing. See also [Cache.Shutdown].
func (c *Cache[T]) Close() error {
	c.rooms.close()
	return nil
}

func (c *rooms) close() {
	c.closeOnce.Do(func() {
		close(c.closing)
		c.fills.WakeAll()
		c.reader.Drain() // calls that began before may still start a load
		c.fills.Close()
	})
	c.fills.Drain()
	c.client.Close()
	if c.near != nil {
		c.near.Close()
	}
	if c.free != nil {
		c.free()
	}
}

// Shutdown is Close that waits for loads only until ctx ends, such as with the time that an
// orchestrator leaves a process. Then the contexts of its loads are cancelled, and Loaders that ignore
// that are abandoned. Their locks are released, so that another process can load at once; their values are not
// stored; and callers that wait for them get [ErrClosed], or a value within [Options.StaleIfError].
//
// Shutdown returns nil, or ctx.Err() if ctx has ended first: after the last commands, for which it
// waits some RedisTimeouts at most. It may be called while Close waits, and ends that, too. Like
// Close it does not close the client. With many caches, call it for each in a goroutine, with one ctx.
func (c *Cache[T]) Shutdown(ctx context.Context) error { return c.rooms.shutdown(ctx) }

func (c *rooms) shutdown(ctx context.Context) error {
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		c.close()
	}()
	select {
	case <-closed:
		return nil
	case <-ctx.Done():
	}
	c.fills.Abort()
	c.fills.WakeAll() // also those in the queue that a load awaits
	<-closed
	return ctx.Err()
}

func (c *rooms) checkKey(ctx context.Context, key string) error {
	if err := c.checkOpen(ctx); err != nil {
		return err
	}
	return checkCall(ctx, key)
}

// checkLoad is checkOpen for a call that may load: Close waits for the load that makes it.
func (c *rooms) checkLoad(ctx context.Context) error {
	if err := c.checkOpen(ctx); err != nil && !c.fills.Inside(flight.LoadOf(ctx)) {
		return err
	}
	return nil
}

func (c *rooms) checkOpen(context.Context) error {
	select {
	case <-c.closing:
		return ErrClosed
	default:
		return nil
	}
}

func checkCall(ctx context.Context, key string) error {
	if key == "" {
		return ErrEmptyKey
	}
	return ctx.Err()
}

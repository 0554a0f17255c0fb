package singlefill

import (
	"cmp"
	"context"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/event"
	"github.com/singlefill/singlefill/internal/fill"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/near"
	"github.com/singlefill/singlefill/internal/revoke"
	"github.com/singlefill/singlefill/internal/tags"
	"github.com/singlefill/singlefill/internal/value"
)

// A Cache holds values of type T in Redis under one namespace. It is safe for concurrent use. Make
// one per namespace and process with [New], and keep it: the zero Cache is not usable.
//
// Each caller owns the value that it gets. The exception is a value that the codec cannot encode or
// decode again: the callers of this process that waited for it share it.
type Cache[T any] struct{ engine *engine }

// An engine is a Cache without its type: it carries a value as a pointer to a T, and hands it to
// values, which know T. So it is compiled once.
type engine struct {
	opts      settings
	values    *value.Type
	store     *value.Store
	namespace string
	client    *client.Client
	reads     *flight.Reads[value.Lookup]
	fills     *flight.Fills[fill.Result]
	fleet     *fleet        // nil: MaxFleetLoads is 0
	slots     *flight.Slots // MaxLoads and MaxFleetLoads
	filler    *fill.Filler
	events    *event.Sink
	near      *near.Tier  // nil: off
	tags      *tags.Index // nil: Options.Tags is
	keys      *revoke.Keys
	sets      *revoke.Sets
	space     *revoke.Space
	tagged    *revoke.Tags // nil: Options.Tags is
	audits    audits
	closing   chan struct{}
	closeOnce sync.Once
}

// New returns a [Cache] for values of T under namespace, which live for ttl. It does no I/O.
//
// rdb may be a client of a single server, of Sentinel or of a Cluster, an auto-pipelining client,
// or one with client-side caching. The caller closes it after the Cache. Without
// ContextTimeoutEnabled in its options, and with an OnConnect function or a credentials provider,
// each command takes a goroutine. All caches and locks on one client together send no more commands
// at a time than its pool has connections.
//
// New returns an error that names the argument, its value and what is allowed: a namespace without
// braces and control characters, a ttl of 1 ms or more, options that agree with each other, no
// pipeline, and a codec that can store values of T (see [MsgPack]).
func New[T any](rdb redis.UniversalClient, namespace string, ttl time.Duration, opts *Options[T]) (*Cache[T], error) {
	if opts == nil {
		opts = new(Options[T])
	}
	s, err := resolve(rdb, namespace, ttl, OptionsFor[any](opts))
	if err != nil {
		return nil, err
	}
	v, err := newValues(s, opts)
	if err != nil {
		return nil, err
	}
	e, err := newEngine(rdb, namespace, s, v)
	if err != nil {
		return nil, err
	}
	return &Cache[T]{e}, nil
}

func newEngine(rdb redis.UniversalClient, namespace string, s settings, v *value.Type) (_ *engine, err error) {
	clock := new(flight.Clock)
	c := &engine{
		opts:      s,
		values:    v,
		namespace: namespace,
		reads:     flight.NewReads[value.Lookup](clock),
		fills:     flight.NewFills[fill.Result](clock),
		events:    event.NewSink(),
		closing:   make(chan struct{}),
	}
	c.addTrace(&s.trace)
	c.client = client.New(rdb, s.redisTimeout, c.events.RedisError, c.events.BreakerChanged, func(run func(<-chan struct{})) {
		c.fills.Go(func() { run(c.closing) })
	})
	var memory *value.Memory
	if s.near != nil {
		c.near = c.newTier(*s.near)
		memory = &value.Memory{Tier: c.near, TTL: s.near.TTL, Share: s.near.Share, Headers: s.audit > 0}
	}
	c.store = value.New(v, namespace, c.client, memory, c.events)
	if v.Tags != nil {
		c.tags = tags.New(c.client, namespace, 2*s.loadTimeout, s.lockTTL)
	}
	c.keys = revoke.NewKeys(c.client, c.store, c.near, c.fills, c.closing)
	c.sets = revoke.NewSets(c.keys, c.tags)
	c.space = revoke.NewSpace(c.keys, namespace, s.lockTTL, c.tags, c.events)
	if c.tags != nil {
		c.tagged = revoke.NewTags(c.space)
	}
	var leases flight.Leases
	if s.maxFleetLoads > 0 {
		if c.fleet, err = c.newFleet(rdb); err != nil {
			return nil, err
		}
		leases = c.fleet
	}
	c.slots = flight.NewSlots(s.maxLoads, leases)
	c.filler = fill.New(fill.Parts{
		Client: c.client, Store: c.store, Tags: c.tags, Fills: c.fills, Slots: c.slots,
		User: user{c.store, s.errors}, Events: c.events, Closing: c.closing,
		LockTTL: s.lockTTL, LoadTimeout: s.loadTimeout, RetryAfter: s.retryAfter,
	})
	return c, nil
}

// Namespace returns the namespace that was given to [New].
func (c *Cache[T]) Namespace() string { return c.engine.namespace }

// Get returns the value under key if the cache has it, [ErrMiss] if it does not, and [ErrNotFound]
// if it remembers that the source has none. It returns a value within
// [Options.StaleWhileRevalidate], but not one within StaleIfError. It neither loads nor refreshes,
// waits for no load, and returns errors of Redis.
func (c *Cache[T]) Get(ctx context.Context, key string) (T, error) {
	v, err := c.engine.lookUp(ctx, key)
	return valueOf[T](v), err
}

func (c *engine) lookUp(ctx context.Context, key string) (any, error) {
	if err := c.check(ctx, key); err != nil {
		return nil, err
	}
	if served, ok := c.store.FromMemory(ctx, key); ok {
		return served.Value, served.Err
	}
	l := value.Lookup{Key: key}
	c.store.Get(ctx, &l)
	switch {
	case l.RedisErr != nil:
		return nil, value.Wrap(ctx, "get", l.RedisErr)
	case !l.Hit():
		c.events.Miss(ctx, key, event.ValueInfo{})
		return nil, ErrMiss
	}
	c.events.Hit(ctx, key, false, event.ValueInfo{Stale: l.Freshness == value.Revalidate, Age: l.Entry.Age(l.At)})
	return l.Value, l.Err
}

// Set stores value under key, and supersedes a load of key that is in flight, in any process. If
// [Options.TTLFunc] returns less than 1 ms for value, Set deletes the key. Of two calls the later
// wins, not that of the later change of the source.
//
// After an error the key may hold the new value or the old one, a load in flight may still be
// stored, and a command that was not answered may still be executed, even after a later Delete.
func (c *Cache[T]) Set(ctx context.Context, key string, value T) error {
	return c.engine.setValue(ctx, key, &value)
}

func (c *engine) setValue(ctx context.Context, key string, v any) error {
	if err := c.check(ctx, key); err != nil {
		return err
	}
	return c.sets.Set(ctx, key, v)
}

// Delete removes the keys, and supersedes their loads that are in flight, in any process: their
// values are not stored, and no GetOrLoad that begins after Delete has returned gets them, in any
// process. Calls already waiting may still get them, and so may calls in a process that cannot
// reach Redis. Each key is deleted together with its lock in one step; several keys are not.
//
// After an error some keys may not have been deleted: call Delete again, or accept the old values
// until they expire.
func (c *Cache[T]) Delete(ctx context.Context, keys ...string) error {
	return c.engine.invalidate(ctx, keys, c.engine.keys.Delete)
}

// Expire makes the values under keys stale without removing them, and supersedes loads in flight
// like Delete. The next GetOrLoad refreshes them, and serves them as [Options.StaleWhileRevalidate]
// and [Options.StaleIfError] allow; without these it loads as after a Delete. The windows begin
// now, and end no later than they would have ended.
//
// After Expire has returned, no process takes the old values for fresh, whatever its clock says.
// After an error some keys may not have been made stale.
func (c *Cache[T]) Expire(ctx context.Context, keys ...string) error {
	return c.engine.invalidate(ctx, keys, c.engine.keys.Expire)
}

// invalidate checks keys, and calls do.
func (c *engine) invalidate(ctx context.Context, keys []string, do func(ctx context.Context, keys ...string) error) error {
	if err := c.checkOpen(); err != nil {
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
func (c *Cache[T]) Clear(ctx context.Context) error { return c.engine.clear(ctx) }

func (c *engine) clear(ctx context.Context) error {
	if err := cmp.Or(c.checkOpen(), ctx.Err()); err != nil {
		return err
	}
	return value.Wrap(ctx, "clear", c.space.Clear(ctx))
}

// Close makes later calls return [ErrClosed], and also those that wait for other processes. It
// returns when the loads of this process have ended and have been stored: after LoadTimeout and
// their last commands at the latest. If Redis does not answer, slots of MaxFleetLoads are released
// in the background, for about LockTTL. Close does not close the client. A second Close does
// nothing.
func (c *Cache[T]) Close() error {
	c.engine.close()
	return nil
}

func (c *engine) close() {
	c.closeOnce.Do(func() {
		close(c.closing)
		c.fills.WakeAll()
		c.reads.Drain() // calls that began before may still start a load
		c.fills.Close()
	})
	c.fills.Drain()
	c.client.StopListening()
}

func (c *engine) check(ctx context.Context, key string) error {
	if err := c.checkOpen(); err != nil {
		return err
	}
	return checkCall(ctx, key)
}

func (c *engine) checkOpen() error {
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

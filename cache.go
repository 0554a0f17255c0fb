package singlefill

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/clone"
	"github.com/singlefill/singlefill/internal/codec"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/fill"
	"github.com/singlefill/singlefill/internal/flight"
)

// A Cache holds values of type T in Redis under one namespace. Most callers want [Cache.GetOrLoad] and [Cache.Delete]
// only.
// It is safe for concurrent use. Make one per namespace and process, and keep it.
//
// Values are copied: each caller of GetOrLoad and Get owns what it gets. (The one exception is a value that
// the codec cannot encode, or cannot read back: those who waited for it in this process share it.)
type Cache[T any] struct {
	opts      settings[T]
	namespace string
	client    *client.Client
	clock     *flight.Clock
	reads     *flight.Reads[lookup[T]]
	fills     *flight.Fills[result[T]]
	slots     *flight.Slots // MaxLoads and MaxFleetLoads
	loadTimes *loadTimes
	counters  *counters
	clone     func(T) T // nil: T is not plain, or the codec is the user's, who may link values, or share parts of them
	closing   chan struct{}
	closeOnce sync.Once
}

// New makes a [Cache] of the values of T under namespace, which live for ttl. It does no I/O.
//
// rdb may be a client of a single server, of Sentinel or of a Cluster, an auto-pipelining one, or one with
// client-side caching; it stays the caller's to close, after the Cache. With ContextTimeoutEnabled set in its
// options a hit is cheaper: only then can the client be held to [Options.RedisTimeout] without a goroutine per command
// (unless it has an OnConnect function or a credentials provider, which may ignore their context). All caches and locks
// on one client together send no more commands at a time than its pool has connections; the others wait in order.
// Processes that share a namespace must agree on T, on the codec and on what a key means. Give a changed T
// a new namespace.
//
// New returns an error that names the argument, its value and what is allowed when rdb is nil or a pipeline,
// namespace is empty or has braces or control characters, ttl is less than 1 ms, or opts are incoherent.
func New[T any](rdb redis.UniversalClient, namespace string, ttl time.Duration, opts *Options[T]) (*Cache[T], error) {
	s, err := resolve(rdb, namespace, ttl, opts)
	if err != nil {
		return nil, err
	}
	clock := new(flight.Clock)
	c := &Cache[T]{
		opts:      s,
		namespace: namespace,
		clock:     clock,
		reads:     flight.NewReads[lookup[T]](clock),
		fills:     flight.NewFills[result[T]](clock),
		slots:     flight.NewSlots(s.maxLoads),
		loadTimes: newLoadTimes(),
		counters:  new(counters),
		closing:   make(chan struct{}),
	}
	c.client = client.New(rdb, s.redisTimeout, c.redisFailed, c.breakerChanged, func(run func(<-chan struct{})) {
		c.fills.Go(func() { run(c.closing) })
	})
	if codec.Own(s.codec) {
		c.clone = clone.Func[T]()
	}
	c.slots.Behind, c.slots.NoLease = c.fills.Behind, c.client.AnyAway
	if s.maxFleetLoads > 0 {
		c.slots.Lease, err = c.fleet(rdb)
	}
	return c, err
}

// Get returns the value under key if the cache has it, [ErrMiss] if it has none, and [ErrNotFound] if it
// remembers that there is none. A value within [Options.StaleWhileRevalidate] is there, one within StaleIfError
// is not. Get loads nothing, refreshes nothing and waits for no load. A Redis that cannot be asked is
// an error of its own, since there is no source to ask instead.
func (c *Cache[T]) Get(ctx context.Context, key string) (T, error) {
	var zero T
	if err := c.check(ctx, key); err != nil {
		return zero, err
	}
	var l lookup[T]
	c.get(ctx, key, &l)
	switch {
	case l.redisErr != nil:
		return zero, wrap(ctx, "get", l.redisErr)
	case l.freshness < revalidate:
		c.noteMiss(ctx, key)
		return zero, ErrMiss
	}
	c.noteHit(ctx, key)
	if l.freshness == revalidate {
		c.noteStale(ctx, key, ValueInfo{Stale: true, Age: l.entry.Age(l.at)})
	}
	return l.value, l.err
}

// Set stores value under key and breaks a load of that key that is under way, here or in another process:
// what that load brings is not stored. If [Options.TTLFunc] says not to keep value, Set removes what was there.
//
// After an error the key may hold the new value or the old one, a load under way may still be stored, and a
// command that was not answered in time may still be carried out, even after a later Delete.
func (c *Cache[T]) Set(ctx context.Context, key string, value T) error {
	if err := c.check(ctx, key); err != nil {
		return err
	}
	life := c.lifeOf(key, value)
	if life < time.Millisecond {
		return c.Delete(ctx, key)
	}
	payload, err := c.marshal(value)
	if err != nil {
		return wrap(ctx, "set", err)
	}
	now := time.Now()
	data, err := entry.Entry{FreshUntil: now.Add(life), WrittenAt: now, Payload: payload}.Encode()
	if err != nil {
		return wrap(ctx, "set", err)
	}
	defer c.fills.Supersede(key) // after the command: a later caller then joins no fill that began before it
	_, err = client.Do(ctx, c.client, "set", c.valueKey(key), func(ctx context.Context) (struct{}, error) {
		return struct{}{}, client.Transaction(ctx, c.client.Redis, func(p redis.Pipeliner) {
			p.Set(ctx, c.valueKey(key), data, c.opts.keptFor(life))
			p.Del(ctx, lockKey(c.valueKey(key)))
		})
	})
	return wrap(ctx, "set", err)
}

// batch bounds the commands that one round trip, and so one RedisTimeout, has to carry.
const batch = 256

// Delete removes the keys and breaks the loads of them that are under way, here or in other processes: what
// they bring is not stored, and a GetOrLoad that begins after Delete has returned, anywhere, does not get it.
// Callers that came before may, and those of a process that cannot reach Redis. Each key is deleted in one step,
// together with its lock; several keys are not.
//
// After an error some of the keys may not have been deleted: try again, or live with the old values until
// their ttl.
func (c *Cache[T]) Delete(ctx context.Context, keys ...string) error {
	return c.inBatches(ctx, "delete", keys, func(pairs []fill.Pair) error {
		_, err := client.Do(ctx, c.client, "delete", pairs[0].Value, func(ctx context.Context) ([]redis.Cmder, error) {
			return c.client.Redis.Pipelined(ctx, func(p redis.Pipeliner) error {
				for _, pair := range pairs {
					p.Del(ctx, pair.Value, pair.Lock)
				}
				return nil
			})
		})
		return err
	})
}

// Expire makes the values under keys stale without removing them: the source has changed, but the old values
// can still be served. The next GetOrLoad refreshes them, and serves them as [Options.StaleWhileRevalidate] and
// [Options.StaleIfError] say; without these it loads as after a Delete. The windows begin now, and end no later than
// they would have done. Loads that are under way are broken as by Delete: what they bring is not stored.
//
// Once Expire has returned nobody takes the old values for fresh, whatever their clock says. After an error
// some keys may not have been made stale.
func (c *Cache[T]) Expire(ctx context.Context, keys ...string) error {
	return c.inBatches(ctx, "expire", keys, func(pairs []fill.Pair) error {
		return fill.Expire(ctx, c.client, pairs)
	})
}

// inBatches does something to keys that invalidates them, on all nodes at the same time.
func (c *Cache[T]) inBatches(ctx context.Context, op string, keys []string, do func(pairs []fill.Pair) error) error {
	if err := c.checkOpen(); err != nil || len(keys) == 0 {
		return err
	}
	values := make([]string, len(keys))
	for i, key := range keys {
		if err := checkCall(ctx, key); err != nil {
			return err
		}
		values[i] = c.valueKey(key)
	}
	defer func() { // after the command: a later caller then joins no fill that began before it
		for _, key := range keys {
			c.fills.Supersede(key)
		}
	}()
	groups := c.client.ByNode(values)
	errs := make([]error, len(groups))
	var nodes sync.WaitGroup
	for i, values := range groups {
		nodes.Go(func() { errs[i] = wrap(ctx, op, onNode(values, do)) })
	}
	nodes.Wait()
	if err := ctx.Err(); err != nil && slices.Contains(errs, err) {
		return err
	}
	return errors.Join(errs...)
}

// onNode is inBatches for keys of one node. If that does not answer one batch, it gets no other: a dead server costs one
// RedisTimeout, however many keys there are. It is asked even while the breaker is open, since it may just have come back,
// and an invalidation that is not tried is lost.
func onNode(values []string, do func(pairs []fill.Pair) error) error {
	var errs []error
	for values := range slices.Chunk(values, batch) {
		pairs := make([]fill.Pair, len(values))
		for i, value := range values {
			pairs[i] = fill.Pair{Value: value, Lock: lockKey(value)}
		}
		err := do(pairs)
		if errs = append(errs, err); client.Unreachable(err) {
			break
		}
	}
	if len(errs) == 1 {
		return errs[0]
	}
	return errors.Join(errs...)
}

// Close makes every later call return [ErrClosed], ends waiting for other processes with it too, and waits
// until the loads that run in this process have ended and been stored: LoadTimeout at most, and the commands
// after it. Giving back a place of MaxFleetLoads that Redis does not answer goes on behind it for about LockTTL.
// It does not close the client, which is to be closed after it. Closing twice is fine.
func (c *Cache[T]) Close() error {
	c.closeOnce.Do(func() {
		close(c.closing)
		c.reads.Drain() // calls that came before may still start a load
		c.fills.Close()
	})
	c.fills.Drain()
	return nil
}

func (c *Cache[T]) check(ctx context.Context, key string) error {
	if err := c.checkOpen(); err != nil {
		return err
	}
	return checkCall(ctx, key)
}

func (c *Cache[T]) checkOpen() error {
	select {
	case <-c.closing:
		return ErrClosed
	default:
		return nil
	}
}

func checkCall(ctx context.Context, key string) error {
	if key == "" {
		return errors.New("singlefill: key is empty")
	}
	return ctx.Err()
}

// valueKey and lockKey put both keys of a pair into one slot. Namespaces have no braces and no value key ends as a lock
// key does, so no two names meet.
func (c *Cache[T]) valueKey(key string) string { return c.namespace + ":{" + client.HashTag(key) + "}" }

func lockKey(valueKey string) string { return valueKey + ":lock" }

func (c *Cache[T]) newLock(key string) *fill.Lock {
	value := c.valueKey(key)
	return fill.New(c.client, value, lockKey(value), c.opts.lockTTL)
}

// lifeOf returns how long value is to be kept; less than 1 ms: not at all.
func (c *Cache[T]) lifeOf(key string, value T) time.Duration {
	if c.opts.ttlFunc == nil {
		return c.shorten(c.opts.ttl)
	}
	return c.shorten(c.opts.ttlFunc(key, value))
}

// shorten takes the jitter off a life, but never all of it.
func (c *Cache[T]) shorten(life time.Duration) time.Duration {
	if life < time.Millisecond {
		return 0
	}
	life -= time.Duration(rand.Float64() * c.opts.jitter * float64(life))
	return max(life, time.Millisecond).Truncate(time.Millisecond)
}

// decode looks at stored bytes. Those that are no entry, or not of T, are a miss, and counted.
func (c *Cache[T]) decode(ctx context.Context, key string, data []byte, l *lookup[T]) {
	l.data, l.at = data, time.Now()
	var err error
	if l.entry, err = entry.Parse(data); err == nil {
		if use := c.freshnessOf(&l.entry, l.at); use > expired {
			if l.entry.NotFound {
				l.err = ErrNotFound
			} else {
				l.value, err = c.unmarshal(l.entry.Payload)
			}
			if err == nil {
				l.freshness = use
			}
		}
	}
	if err != nil {
		c.badValue(ctx, key, err)
	}
}

// marshal and unmarshal turn a codec's panic into an error: it may be the user's, and the bytes hostile.
func (c *Cache[T]) marshal(value T) (payload []byte, err error) {
	defer recovered(&err)
	if payload, err = c.opts.codec.Marshal(value); err == nil && payload == nil {
		payload = []byte{}
	}
	return payload, err
}

func (c *Cache[T]) unmarshal(payload []byte) (_ T, err error) {
	defer recovered(&err)
	v := new(T) // not a result, which would be on the heap, and make defer slow
	err = c.opts.codec.Unmarshal(payload, v)
	return *v, err
}

func recovered(err *error) {
	if p := recover(); p != nil {
		*err = fmt.Errorf("codec panicked: %v", p)
	}
}

func (c *Cache[T]) badValue(ctx context.Context, key string, err error) {
	c.counters.badValues.Add(1)
	if c.opts.trace.BadValue != nil {
		c.opts.trace.BadValue(client.Detach(ctx), key, err)
	}
}

func (c *Cache[T]) redisFailed(ctx context.Context, op string, err error) {
	c.counters.redisErrors.Add(1)
	if c.opts.trace.RedisError != nil {
		c.opts.trace.RedisError(ctx, op, err)
	}
}

func (c *Cache[T]) breakerChanged(open bool) {
	if open {
		c.counters.breakerOpens.Add(1)
	}
	if c.opts.trace.Breaker != nil {
		c.opts.trace.Breaker(open)
	}
}

func (c *Cache[T]) noteHit(ctx context.Context, key string) {
	c.counters.hits.Add(1)
	if c.opts.trace.Hit != nil {
		c.opts.trace.Hit(ctx, key)
	}
}

func (c *Cache[T]) noteMiss(ctx context.Context, key string) {
	c.counters.misses.Add(1)
	if c.opts.trace.Miss != nil {
		c.opts.trace.Miss(ctx, key)
	}
}

// wrap names the operation of a Redis error. A caller's own end of context stays bare.
func wrap(ctx context.Context, op string, err error) error {
	if err == nil || err == ctx.Err() {
		return err
	}
	return fmt.Errorf("singlefill: %s: %w", op, err)
}

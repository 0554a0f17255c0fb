package singlefill

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/event"
	"github.com/singlefill/singlefill/internal/filllock"
	"github.com/singlefill/singlefill/internal/near"
)

// Near keeps decoded values in the memory of this process: see docs/near.md.
//
// What Delete, Set, Expire, DeleteTag and ExpireTag promise holds exactly in the process that calls
// them. In every other process a call that begins more than MaxLag after that call has returned never
// gets the old value; usually the lag is milliseconds. A process that cannot prove this asks Redis; if
// neither Redis nor the Loader answers, it returns what memory has within [Options.StaleIfError] in
// place of an error. If Redis loses an acknowledged write, the life of the value or TTL is the bound.
// Memory serves nothing that Redis has ended. The monotonic clock counts, which stands still while a
// machine is suspended.
//
// What a process without Near deletes stays in the memory of the others until it expires: turn it
// on first in those that only write.
type Near struct {
	// Size is how many values are kept at most (W-TinyLFU). Default: 10,000.
	Size int

	// TTL is how long a value is kept at most. At least 1 ms. Default: as long as it can be served.
	TTL time.Duration

	// MaxLag bounds how long after an invalidation in another process an old value is served. While
	// values are served, the process sends a command or two in each half of it. From 10 ms to an
	// hour. Default: 1 s.
	MaxLag time.Duration

	// Share makes all callers get the same value, which they must not change. Otherwise each owns
	// its value: that costs nothing for a T without pointers, slices and maps, a copy for other
	// plain types, and decoding for the rest and with a Codec of the user.
	Share bool
}

// checkNear reports the first setting of Near that makes no sense.
func checkNear(n *Near, rdb redis.UniversalClient) error {
	switch {
	case n.Size < 0:
		return fmt.Errorf("singlefill: Near.Size is %d: at least 1 is allowed, or 0 for 10,000", n.Size)
	case n.TTL != 0 && n.TTL < time.Millisecond:
		return fmt.Errorf("singlefill: Near.TTL is %v: at least 1ms is allowed, or 0 for the life of the value", n.TTL)
	case n.MaxLag != 0 && (n.MaxLag < 10*time.Millisecond || n.MaxLag > time.Hour):
		return fmt.Errorf("singlefill: Near.MaxLag is %v: 10ms to 1h is allowed, or 0 for 1s", n.MaxLag)
	}
	const old = "could bring an old value back into memory after a Delete"
	switch rdb := rdb.(type) { // types that embed a client, too
	case interface{ Options() *redis.Options }:
		if o := rdb.Options(); o.ClientSideCache != nil || o.ClientSideCacheConfig != nil {
			return fmt.Errorf("singlefill: Options.Near is set and rdb has client-side caching, which %s: turn one of them off", old)
		}
	case interface{ Options() *redis.ClusterOptions }:
		if o := rdb.Options(); o.ReadOnly || o.RouteByLatency || o.RouteRandomly {
			return fmt.Errorf("singlefill: Options.Near is set and rdb reads from replicas (ReadOnly, RouteByLatency or RouteRandomly), which %s: turn one of them off", old)
		}
	}
	return nil
}

// A nearTier is the memory of a cache with Near.
type nearTier struct {
	*near.Tier
	ttl   time.Duration
	share bool
}

// A nearValue is what memory has of an entry. Its times are those of the entry, by the clock of the
// tier.
type nearValue struct {
	end        time.Duration // kept until then, for times in which neither Redis nor the source answers
	writtenAt  int64         // of the entry, as in Redis: Unix time in ms
	freshUntil int64
	header     string // of the entry, with Options.Audit
	payload    []byte // to be decoded for each caller

	// All that a hit reads comes last, and the T behind it: see values.boxed.
	near.Item
	freshEnd  time.Duration // fresh until then
	staleEnd  time.Duration // served until then
	written   time.Duration
	refreshAt atomic.Int64 // when a hit next refreshes the entry
	form      form
	value     any // if whole
}

// A form says how memory has a value.
type form byte

const (
	notFound form = iota // there is none
	whole                // as a T
	encoded              // as a payload
)

// End implements near.Value.
func (n *nearValue) End() time.Duration { return n.end }

func (c *engine) newNear(n Near) *nearTier {
	c.client.ReadFromMasters()
	t := &nearTier{ttl: bounded(orDefault(n.TTL, forever)), share: n.Share}
	background := func(run func(<-chan struct{})) { c.fills.Go(func() { run(c.closing) }) }
	t.Tier = near.New(c.client, c.logKey(), orDefault(n.Size, 10_000), orDefault(n.MaxLag, time.Second), background, c.events.NearDropped)
	return t
}

// logKey returns the key of the log, which is no value key.
func (c *engine) logKey() string { return c.namespace + ":log" }

// nearHit serves key from memory. n is nil if memory has nothing to serve, or cannot prove that it is
// recent enough.
func (c *engine) nearHit(ctx context.Context, key string) (v any, info event.ValueInfo, n *nearValue, now time.Duration, err error) {
	kept, now, proven := c.near.Get(key)
	n, ok := kept.(*nearValue)
	if !ok || !proven || now >= n.staleEnd {
		return nil, info, nil, now, nil
	}
	if v, err = c.nearCopy(n); err != nil && err != ErrNotFound {
		return nil, info, nil, now, nil
	}
	info.Stale, info.Age = now >= n.freshEnd, max(0, now-n.written)
	c.events.Hit(ctx, key, true, info)
	return v, info, n, now, err
}

// takeRefresh reports whether the entry expires soon or is stale, and the caller has to refresh it.
func (n *nearValue) takeRefresh(now time.Duration) bool {
	at := n.refreshAt.Load()
	return int64(now) >= at && n.refreshAt.CompareAndSwap(at, int64(now+refreshRest))
}

// nearCopy returns a value that the caller owns, unless callers share it, or ErrNotFound.
func (c *engine) nearCopy(n *nearValue) (v any, err error) {
	switch {
	case n.form == notFound:
		return nil, ErrNotFound
	case n.form == encoded:
		return c.values.decode(n.payload)
	case c.near.share:
		return n.value, nil
	}
	return c.values.clone(n.value), nil
}

// refreshNear refreshes an entry that memory has, unless another process has refreshed it: then it
// only reads the new one.
func (c *engine) refreshNear(ctx context.Context, key string, load loader, n *nearValue) {
	c.fills.Go(func() {
		var l lookup
		c.read(ctx, key, &l)
		if n.refreshes(&l) {
			c.refresh(ctx, key, load, l.data)
		}
	})
}

// refreshes reports whether what is in Redis still has to be refreshed.
func (n *nearValue) refreshes(l *lookup) bool {
	newer := l.freshness == fresh && !l.early && l.entry.WrittenAt.UnixMilli() != n.writtenAt
	return l.redisErr == nil && !newer
}

// generation is to be taken before the command is sent whose reply is kept.
func (c *engine) generation(valueKey string) (g near.Generation) {
	if c.near != nil {
		g = c.near.Generation(valueKey)
	}
	return g
}

// keepFound keeps what a GET has found behind a PTTL. A load may have replaced the entry between the two:
// then the reply to PTTL is not about it, but Redis keeps it for its life at least, from then on. So
// memory serves it for the shorter of the two.
func (c *engine) keepFound(key string, g near.Generation, pttl *redis.DurationCmd, l *lookup) {
	const none = -2
	life := l.entry.FreshUntil.Sub(l.entry.WrittenAt)
	if l.kept = endless(pttl.Val()); pttl.Val() == none {
		l.kept = life
	}
	c.keep(key, g, l, min(l.kept, life))
}

// endless returns the reply to a PTTL, which is negative for a key without an end.
func endless(pttl time.Duration) time.Duration {
	if pttl < 0 {
		return forever
	}
	return pttl
}

// keep keeps what a command has found in memory, for l.kept at most, and serves it for served at most, both
// from when g was taken. So memory has nothing that Redis has ended, whatever the clocks and the windows of
// the processes are.
func (c *engine) keep(key string, g near.Generation, l *lookup, served time.Duration) {
	if l.freshness == expired {
		return
	}
	n := c.newNearValue(l)
	n.staleEnd, n.end = min(n.staleEnd, g.Taken+bounded(served)), min(n.end, g.Taken+bounded(l.kept))
	if n.end > c.near.At(l.at) {
		c.near.Put(key, g, n)
	}
}

// keepLoaded keeps the value of a load that has been stored: as it is in Redis, since the codec may
// drop a part of what was loaded.
func (c *engine) keepLoaded(key string, g near.Generation, data []byte, o *outcome) {
	if c.near == nil {
		return
	}
	l := lookup{result: result{entry: o.entry, at: time.Now(), freshness: fresh}, data: data}
	if !o.entry.NotFound && (c.near.share || c.values.clone != nil) {
		var err error
		if l.value, err = c.values.decode(o.entry.Payload); err != nil {
			return
		}
	}
	l.kept = c.opts.keptFor(o.life)
	c.keep(key, g, &l, l.kept)
}

// newNearValue returns a lookup for memory. It converts the times of the entry, which are those of the wall
// clock.
func (c *engine) newNearValue(l *lookup) *nearValue {
	e, at, now := &l.entry, l.at, c.near.At(l.at)
	n := c.inForm(l)
	n.written = now - bounded(at.Sub(e.WrittenAt))
	n.writtenAt, n.freshUntil = e.WrittenAt.UnixMilli(), e.FreshUntil.UnixMilli()
	fresh := bounded(e.FreshUntil.Sub(at))
	n.freshEnd = now + fresh
	n.staleEnd = now + min(fresh+bounded(c.opts.staleWhileRevalidate), c.near.ttl)
	n.end = now + min(fresh+bounded(c.opts.window()), c.near.ttl)
	if e.Expired {
		n.freshEnd = min(n.freshEnd, now)
	}
	refreshAt := n.freshEnd - c.opts.earlyBy(e, rand.ExpFloat64)
	n.refreshAt.Store(int64(refreshAt))
	l.early = refreshAt <= now
	return n
}

// inForm returns the value of a lookup in the form in which callers are to get it.
func (c *engine) inForm(l *lookup) *nearValue {
	n, value := new(nearValue), l.value
	switch {
	case l.entry.NotFound:
	case c.near.share:
		n = c.values.boxed(value)
	case c.values.clone != nil:
		n = c.values.boxed(c.values.clone(value))
	default:
		n.form, n.payload = encoded, l.entry.Payload
	}
	if c.opts.audit > 0 {
		n.header = entry.Header(l.data)
	}
	return n
}

// forever is as long as a Duration can be without a sum of several exceeding it.
const forever = math.MaxInt64 / 8

func bounded(d time.Duration) time.Duration { return max(-forever, min(d, forever)) }

// recall is for times in which Redis does not answer: what memory has may be older than MaxLag, but
// if the load fails as well, it is the old value to fall back to.
func (c *engine) recall(key string, l *lookup) {
	if c.near == nil {
		return
	}
	kept, now, _ := c.near.Get(key)
	n, ok := kept.(*nearValue)
	if !ok || now >= n.end {
		return
	}
	v, err := c.nearCopy(n)
	if err != nil && err != ErrNotFound {
		return
	}
	old := result{value: v, at: time.Now(), freshness: ifError, err: err}
	old.entry = entry.Entry{
		NotFound: n.form == notFound, Expired: true, // for all that is known
		FreshUntil: time.UnixMilli(n.freshUntil), WrittenAt: time.UnixMilli(n.writtenAt),
	}
	if err == nil {
		if old.entry.Payload, err = c.values.encode(v); err != nil { // the other callers decode it
			return
		}
	}
	if c.servable(&old) {
		l.result = old
	}
}

// recorded says what is known of the records of an invalidation when it has been answered.
type recorded struct {
	sent    bool // in the pipeline of the invalidation
	refused bool // the server has executed the invalidation, and refused them
}

// recordRefused reports whether the server has executed all of the commands that invalidate, and
// has refused one of those behind them. err is the error of the pipeline. Commands that the server
// refuses for the same reason have equal errors, so err alone does not tell which of them it is of.
func recordRefused(invalidating []redis.Cmder, err error) bool {
	return err != nil && !client.Unreachable(err) &&
		!slices.ContainsFunc(invalidating, func(cmd redis.Cmder) bool { return cmd.Err() != nil })
}

// record tells the memory of other processes that keys have been invalidated, by records in the log.
// The invalidation has been answered with err. It returns err, or why they cannot be told.
func (c *engine) record(ctx context.Context, pairs []filllock.Pair, r recorded, err error) error {
	if c.near == nil {
		return err
	}
	switch {
	case r.refused:
		err = c.near.Reset(ctx)
	case r.sent:
	case err == nil:
		if err = c.near.Append(ctx, valuesOf(pairs)); err != nil && ctx.Err() != nil {
			c.recordLater(ctx, pairs)
		}
	case client.Unreachable(err): // it may have been executed, and err says that it may not have been
		c.recordLater(ctx, pairs)
	}
	c.near.WakeOthers(client.Detach(ctx))
	return err
}

// recordLater tries to append the records of a call that fails anyway.
func (c *engine) recordLater(ctx context.Context, pairs []filllock.Pair) {
	c.fills.Go(func() { _ = c.near.Append(client.Detach(ctx), valuesOf(pairs)) }) // failures are traced
}

func valuesOf(pairs []filllock.Pair) []string {
	values := make([]string, len(pairs))
	for i, pair := range pairs {
		values[i] = pair.Value
	}
	return values
}

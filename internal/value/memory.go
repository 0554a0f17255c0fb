package value

import (
	"cmp"
	"context"
	"math"
	"math/rand/v2"
	"time"

	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/event"
	"github.com/singlefill/singlefill/internal/near"
)

// Memory is what a store needs for Near.
type Memory struct {
	Tier  *near.Tier
	TTL   time.Duration // 0: the life of the value
	Share bool          // all callers get the same value
}

// Box returns a copy for memory of the T that v points to.
func Box[T any](v any) *near.Copy {
	b := &box[T]{value: *v.(*T)}
	b.Value = &b.value
	return &b.Copy
}

// A box has a T right behind its copy: a hit in memory reads one object.
type box[T any] struct {
	near.Copy
	value T
}

// A payload is in memory where a T cannot be copied: it is decoded for each caller.
type payload []byte

// Served is a copy that memory has served. It has few fields, so that it stays in registers.
type Served struct {
	Copy *near.Copy
	now  time.Duration
}

// Err returns ErrNotFound if there is no value.
func (h Served) Err() error {
	if h.Copy.Value == nil {
		return ErrNotFound
	}
	return nil
}

// Stale reports whether the value is stale.
func (h Served) Stale() bool { return h.now >= h.Copy.FreshEnd }

// Info describes the value. It reads more memory than a hit does.
func (h Served) Info() event.ValueInfo {
	c := h.Copy
	info := event.ValueInfo{Stale: h.Stale(), Age: max(0, h.now-c.Written), Expires: time.UnixMilli(c.FreshUntil), Entry: c.ID}
	if info.Stale {
		info.Expires = past(info.Expires, time.Now())
	}
	return info
}

// FromMemory returns the value of key from memory. It returns false without Near, if memory has nothing to serve, or if
// it cannot prove that it is recent enough.
func (s *Store) FromMemory(ctx context.Context, key string) (v any, h Served, ok bool) {
	if s.memory == nil {
		return nil, h, false
	}
	c, now, proven := s.memory.Tier.Get(key)
	if c == nil || !proven || now >= c.FreshEnd && now >= c.StaleEnd {
		return nil, h, false
	}
	v, err := s.ValueOf(key, c)
	if err != nil && err != ErrNotFound {
		return nil, h, false
	}
	if h = (Served{c, now}); h.Stale() {
		info := h.Info()
		s.events.Hit(ctx, key, true, &info)
	} else {
		s.events.Hit(ctx, key, true, nil)
	}
	return v, h, true
}

// ValueOf returns the value of a copy under key, or ErrNotFound. The caller owns the value, unless callers share it.
func (s *Store) ValueOf(key string, c *near.Copy) (v any, err error) {
	encoded, is := c.Value.(*payload)
	switch {
	case c.Value == nil:
		return nil, ErrNotFound
	case is:
		return s.Type.Decode(key, *encoded)
	case s.memory.Share:
		return c.Value, nil
	}
	return s.Type.Clone(c.Value), nil
}

// RefreshRest is how long after a refresh this process does not refresh the same entry again: a
// replica, or the client's own cache, may still return it.
const RefreshRest = 100 * time.Millisecond

// TakeRefresh reports whether the entry expires soon or is stale, and the caller has to refresh it.
func (h Served) TakeRefresh() bool {
	c, now := h.Copy, h.now
	at := c.RefreshAt.Load()
	return int64(now) >= at && c.RefreshAt.CompareAndSwap(at, int64(now+RefreshRest))
}

// Outlives reports whether Redis has a newer entry than c, which needs no refresh, or did not answer.
func (l *Lookup) Outlives(c *near.Copy) bool {
	newer := l.Freshness == Fresh && !l.early && l.Entry.WrittenAt.UnixMilli() != c.WrittenAt
	return l.RedisErr != nil || newer
}

// Generation returns the generation of a key, which is given as it is in Redis. It is taken before a command that reads
// or writes the key, and is for [Store.Keep]. If the key is invalidated during the command, its generation changes, and
// what the command has seen is never served.
func (s *Store) Generation(valueKey string) (g near.Generation) {
	if s.memory != nil {
		g = s.memory.Tier.Generation(valueKey)
	}
	return g
}

// Kept records how long Redis keeps the entry that a single step on the server has found or stored, as PTTL
// has it.
func (l *Lookup) Kept(pttl time.Duration) {
	l.kept = endless(pttl)
	l.served = l.kept
}

// keptBehind notes the reply to a PTTL ahead of the GET. A load may have replaced the entry between the two:
// then the reply is not about it, but Redis keeps it for its life at least, from then on. So
// memory serves it for the shorter of the two.
func (l *Lookup) keptBehind(pttl time.Duration) {
	const none = -2
	life := l.Entry.FreshUntil.Sub(l.Entry.WrittenAt)
	if l.kept = endless(pttl); pttl == none {
		l.kept = life
	}
	l.served = min(l.kept, life)
}

// endless returns the reply to a PTTL, which is negative for a key without an end.
func endless(pttl time.Duration) time.Duration {
	if pttl < 0 {
		return forever
	}
	return pttl
}

// Stored returns what a key holds under which an entry has been stored that is fresh for life. Its value is as it is in
// Redis, since the codec may drop a part of what was loaded. Stored returns nil if memory cannot keep it.
func (s *Store) Stored(key string, data []byte, e entry.Entry, life time.Duration) *Lookup {
	if s.memory == nil {
		return nil
	}
	l := &Lookup{Key: key, Found: Found{Entry: e, At: time.Now(), Freshness: Fresh}, Data: data}
	if !e.NotFound && (s.memory.Share || s.Type.Clone != nil) {
		var err error
		if l.Value, err = s.Type.Decode(key, e.Payload); err != nil {
			return nil
		}
	}
	l.Kept(s.policy.KeptFor(life))
	return l
}

// Forget forgets what memory has of a key.
func (s *Store) Forget(key string) {
	if s.memory != nil {
		s.memory.Tier.Forget(s.Key(key))
	}
}

// ForgetAll is Forget for all keys.
func (s *Store) ForgetAll() {
	if s.memory != nil {
		s.memory.Tier.ForgetAll()
	}
}

// Keep keeps in memory what a command has found or stored, for l.kept at most, and serves it for l.served at most, both
// from when g was taken, before the command. So memory has nothing that Redis has ended, whatever the clocks and the
// windows of the processes are. Nothing else keeps values in memory.
func (s *Store) Keep(l *Lookup, g near.Generation) {
	if s.memory == nil || l.kept <= 0 || l.Freshness <= Expired {
		return
	}
	c := s.copyOf(l)
	c.StaleEnd, c.End = min(c.StaleEnd, g.Taken+bounded(l.served)), min(c.End, g.Taken+bounded(l.kept))
	c.FreshEnd = min(c.FreshEnd, c.StaleEnd)
	if c.End > s.memory.Tier.At(l.At) {
		s.memory.Tier.Put(l.Key, g, c)
	}
}

// copyOf returns a lookup for memory. It converts the times of the entry, which are by the wall clock.
func (s *Store) copyOf(l *Lookup) *near.Copy {
	e, at, now := &l.Entry, l.At, s.memory.Tier.At(l.At)
	ttl := bounded(cmp.Or(s.memory.TTL, forever))
	c := s.inForm(l)
	c.Written, c.ID, c.Bytes = now-bounded(at.Sub(e.WrittenAt)), e.ID, uint32(min(len(l.Data), math.MaxUint32))
	c.WrittenAt, c.FreshUntil = e.WrittenAt.UnixMilli(), e.FreshUntil.UnixMilli()
	fresh := bounded(e.FreshUntil.Sub(at))
	c.FreshEnd = now + fresh
	c.StaleEnd = now + min(fresh+bounded(s.policy.StaleWhileRevalidate), ttl)
	c.End = now + min(fresh+bounded(s.policy.window()), ttl)
	if e.Expired {
		c.FreshEnd = min(c.FreshEnd, now)
	}
	refreshAt := c.FreshEnd - s.policy.EarlyBy(e, rand.ExpFloat64)
	c.RefreshAt.Store(int64(refreshAt))
	l.early = refreshAt <= now
	return c
}

// inForm returns the value of a lookup in the form in which callers are to get it.
func (s *Store) inForm(l *Lookup) *near.Copy {
	switch {
	case l.Entry.NotFound:
		return new(near.Copy)
	case s.memory.Share:
		return s.Type.Boxed(l.Value)
	case s.Type.Clone != nil:
		return s.Type.Boxed(s.Type.Clone(l.Value))
	}
	return Box[payload]((*payload)(&l.Entry.Payload))
}

// Recall is for times in which Redis does not answer: what memory has may be older than MaxLag, but
// if the load fails as well, it is the old value to fall back to.
func (s *Store) Recall(l *Lookup) {
	if s.memory == nil {
		return
	}
	c, now, _ := s.memory.Tier.Get(l.Key)
	if c == nil || now >= c.End {
		return
	}
	v, err := s.ValueOf(l.Key, c)
	if err != nil && err != ErrNotFound {
		return
	}
	old := Found{Value: v, At: time.Now(), Freshness: IfError, Err: err}
	old.Entry = entry.Entry{
		NotFound: c.Value == nil, Expired: true, Version: s.policy.Version, // for all that is known
		FreshUntil: time.UnixMilli(c.FreshUntil), WrittenAt: time.UnixMilli(c.WrittenAt), ID: c.ID,
	}
	if err == nil {
		if old.Entry.Payload, err = s.Type.Encode(l.Key, v); err != nil { // the other callers decode it
			return
		}
	}
	if s.Servable(&old, time.Now()) {
		l.Found = old
	}
}

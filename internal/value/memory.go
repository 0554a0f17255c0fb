package value

import (
	"cmp"
	"context"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/event"
	"github.com/singlefill/singlefill/internal/near"
)

// Memory is what a store needs for Near.
type Memory struct {
	Tier    *near.Tier
	TTL     time.Duration // 0: the life of the value
	Share   bool          // all callers get the same value
	Headers bool          // keep the headers of the entries, for audits
}

// A Copy is an entry in memory. Its times are the times of the entry, by the clock of the tier.
type Copy struct {
	end        time.Duration // kept until then, for times in which neither Redis nor the source answers
	writtenAt  int64         // of the entry, as in Redis: Unix time in ms
	freshUntil int64
	header     string // of the entry, with Memory.Headers
	payload    []byte // to be decoded for each caller

	// All that a hit reads comes last, and the T behind it: see Box.
	near.Item
	freshEnd  time.Duration // fresh until then
	staleEnd  time.Duration // served until then
	written   time.Duration
	id        uint64       // of the entry
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

// Box returns a copy for memory whose T is v.
func Box[T any](v T) *Copy {
	b := &box[T]{value: v}
	b.form, b.Copy.value = whole, &b.value
	return &b.Copy
}

// A box has a T right behind the times of its entry: a hit in memory reads one object.
type box[T any] struct {
	Copy
	value T
}

// End implements near.Value.
func (c *Copy) End() time.Duration { return c.end }

// Served is a value that memory has served. Err, which is nil or ErrNotFound, comes in its place.
type Served struct {
	Value any
	Err   error
	Info  event.ValueInfo
	Copy  *Copy
	now   time.Duration
}

// FromMemory serves key from memory. It returns false without Near, if memory has nothing to serve, or if it
// cannot prove that it is recent enough.
func (s *Store) FromMemory(ctx context.Context, key string) (h Served, ok bool) {
	if s.memory == nil {
		return h, false
	}
	kept, now, proven := s.memory.Tier.Get(key)
	c, ok := kept.(*Copy)
	if !ok || !proven || now >= c.staleEnd {
		return h, false
	}
	if h.Value, h.Err = s.ValueOf(key, c); h.Err != nil && h.Err != ErrNotFound {
		return h, false
	}
	h.Copy, h.now = c, now
	h.Info.Stale, h.Info.Age, h.Info.Entry = now >= c.freshEnd, max(0, now-c.written), c.id
	if h.Info.Expires = time.UnixMilli(c.freshUntil); h.Info.Stale {
		h.Info.Expires = past(h.Info.Expires, time.Now())
	}
	s.events.Hit(ctx, key, true, h.Info)
	return h, true
}

// ValueOf returns the value of a copy under key, or ErrNotFound. The caller owns the value, unless callers share it.
func (s *Store) ValueOf(key string, c *Copy) (v any, err error) {
	switch {
	case c.form == notFound:
		return nil, ErrNotFound
	case c.form == encoded:
		return s.Type.Decode(key, c.payload)
	case s.memory.Share:
		return c.value, nil
	}
	return s.Type.Clone(c.value), nil
}

// RefreshRest is how long after a refresh this process does not refresh the same entry again: a
// replica, or the client's own cache, may still return it.
const RefreshRest = 100 * time.Millisecond

// TakeRefresh reports whether the entry expires soon or is stale, and the caller has to refresh it.
func (h *Served) TakeRefresh() bool {
	c, now := h.Copy, h.now
	at := c.refreshAt.Load()
	return int64(now) >= at && c.refreshAt.CompareAndSwap(at, int64(now+RefreshRest))
}

// Outlived reports whether Redis has a newer entry, which needs no refresh, or did not answer.
func (c *Copy) Outlived(by *Lookup) bool {
	newer := by.Freshness == Fresh && !by.early && by.Entry.WrittenAt.UnixMilli() != c.writtenAt
	return by.RedisErr != nil || newer
}

// Header returns the header of the entry, with Memory.Headers.
func (c *Copy) Header() string { return c.header }

// During runs a command that reads or writes keys in Redis. Of the lookups in now, it then keeps in memory those
// whose entry Redis keeps. It takes the generations of the keys before the command. If a key is invalidated
// during the command, its generation changes, and what the command has seen is never served. Nothing else keeps
// values in memory.
func (s *Store) During(now []*Lookup, command func()) {
	if s.memory == nil {
		command()
		return
	}
	generations := make([]near.Generation, 0, 1) // one needs no allocation
	for _, l := range now {
		generations = append(generations, s.memory.Tier.Generation(s.Key(l.Key)))
	}
	command()
	for i, l := range now {
		if l.kept > 0 && l.Freshness > Expired {
			s.keep(l, generations[i])
		}
	}
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

// Stored notes that an entry has been stored under a key, which is fresh for life. Its value is as it is in Redis,
// since the codec may drop a part of what was loaded.
func (s *Store) Stored(l *Lookup, data []byte, e entry.Entry, life time.Duration) {
	if s.memory == nil {
		return
	}
	l.Found, l.Data = Found{Entry: e, At: time.Now(), Freshness: Fresh}, data
	if !e.NotFound && (s.memory.Share || s.Type.Clone != nil) {
		var err error
		if l.Value, err = s.Type.Decode(l.Key, e.Payload); err != nil {
			return
		}
	}
	l.Kept(s.policy.KeptFor(life))
}

// Forget forgets what memory has of a key.
func (s *Store) Forget(key string) {
	if s.memory != nil {
		s.memory.Tier.Forget(s.Key(key))
	}
}

// keep keeps what a command has found in memory, for l.kept at most, and serves it for l.served at most, both
// from when g was taken. So memory has nothing that Redis has ended, whatever the clocks and the windows of
// the processes are.
func (s *Store) keep(l *Lookup, g near.Generation) {
	c := s.copyOf(l)
	c.staleEnd, c.end = min(c.staleEnd, g.Taken+bounded(l.served)), min(c.end, g.Taken+bounded(l.kept))
	if c.end > s.memory.Tier.At(l.At) {
		s.memory.Tier.Put(l.Key, g, c)
	}
}

// copyOf returns a lookup for memory. It converts the times of the entry, which are by the wall clock.
func (s *Store) copyOf(l *Lookup) *Copy {
	e, at, now := &l.Entry, l.At, s.memory.Tier.At(l.At)
	ttl := bounded(cmp.Or(s.memory.TTL, forever))
	c := s.inForm(l)
	c.written, c.id = now-bounded(at.Sub(e.WrittenAt)), e.ID
	c.writtenAt, c.freshUntil = e.WrittenAt.UnixMilli(), e.FreshUntil.UnixMilli()
	fresh := bounded(e.FreshUntil.Sub(at))
	c.freshEnd = now + fresh
	c.staleEnd = now + min(fresh+bounded(s.policy.StaleWhileRevalidate), ttl)
	c.end = now + min(fresh+bounded(s.policy.window()), ttl)
	if e.Expired {
		c.freshEnd = min(c.freshEnd, now)
	}
	refreshAt := c.freshEnd - s.policy.EarlyBy(e, rand.ExpFloat64)
	c.refreshAt.Store(int64(refreshAt))
	l.early = refreshAt <= now
	return c
}

// inForm returns the value of a lookup in the form in which callers are to get it.
func (s *Store) inForm(l *Lookup) *Copy {
	c, value := new(Copy), l.Value
	switch {
	case l.Entry.NotFound:
	case s.memory.Share:
		c = s.Type.Boxed(value)
	case s.Type.Clone != nil:
		c = s.Type.Boxed(s.Type.Clone(value))
	default:
		c.form, c.payload = encoded, l.Entry.Payload
	}
	if s.memory.Headers {
		c.header = entry.Header(l.Data)
	}
	return c
}

// Recall is for times in which Redis does not answer: what memory has may be older than MaxLag, but
// if the load fails as well, it is the old value to fall back to.
func (s *Store) Recall(l *Lookup) {
	if s.memory == nil {
		return
	}
	kept, now, _ := s.memory.Tier.Get(l.Key)
	c, ok := kept.(*Copy)
	if !ok || now >= c.end {
		return
	}
	v, err := s.ValueOf(l.Key, c)
	if err != nil && err != ErrNotFound {
		return
	}
	old := Found{Value: v, At: time.Now(), Freshness: IfError, Err: err}
	old.Entry = entry.Entry{
		NotFound: c.form == notFound, Expired: true, // for all that is known
		FreshUntil: time.UnixMilli(c.freshUntil), WrittenAt: time.UnixMilli(c.writtenAt), ID: c.id,
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

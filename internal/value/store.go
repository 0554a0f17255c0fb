// Package value knows what a key holds: an entry in Redis, a copy of its value in memory, how fresh both are.
//
// A Store reads a key from Redis ([Store.Read]), decodes its entry and judges it ([Store.Decode]), and with Near
// keeps a copy of the value ([Store.Keep]), which it then serves from memory ([Store.FromMemory]).
package value

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/event"
	"github.com/singlefill/singlefill/internal/near"
	"github.com/singlefill/singlefill/internal/wait"
)

// ErrNotFound is the public error of this name.
var ErrNotFound = errors.New("singlefill: not found")

// Wrap adds the operation to an error of Redis. The error of the caller's context stays bare.
func Wrap(ctx context.Context, op string, err error) error {
	if err == nil || err == ctx.Err() {
		return err
	}
	return fmt.Errorf("singlefill: %s: %w", op, err)
}

// A Store is what a cache has of its values. Nothing of it is set after New.
type Store struct {
	Type      *Type
	policy    *Policy // of Type
	namespace string
	client    *client.Client
	memory    *Memory // nil: off
	events    *event.Sink
}

// New returns a store for a namespace. memory is nil without Near.
func New(typ *Type, namespace string, c *client.Client, memory *Memory, events *event.Sink) *Store {
	return &Store{typ, &typ.Policy, namespace, c, memory, events}
}

// Key returns the key in Redis of the value under key, which is in one slot with its lock: see HashTag.
func (s *Store) Key(key string) string { return Key(s.namespace, key) }

// Key returns the key in Redis of a value. Namespaces have no braces, and no value key ends as a lock key does, so
// the keys of two pairs differ.
func Key(namespace, key string) string { return namespace + ":{" + client.HashTag(key) + "}" }

// Found is a value that a key holds, or has held.
type Found struct {
	Value     any         // one caller owns it; it is shared only if it cannot be copied
	Entry     entry.Entry // of Value; the other callers decode its payload. Zero: there is none
	At        time.Time   // of the judgement of Entry
	Freshness Freshness   // of Entry, at that time
	Err       error       // in place of Value
}

// A Lookup is what one command has found under a key.
type Lookup struct {
	Key      string
	Found                  // its value is decoded unless it is expired
	Data     []byte        // the bytes found
	RedisErr error         // Redis did not answer
	Asked    time.Duration // time spent without an answer

	// With Near.
	early  bool          // a hit refreshes the entry before it expires
	kept   time.Duration // how long Redis keeps the entry, from when its generation was taken
	served time.Duration // how long memory serves it at most, from then
}

// Hit reports whether the first read of a call ends the call with this lookup.
func (l *Lookup) Hit() bool { return l.RedisErr == nil && l.Freshness >= Revalidate }

// Read gets keys of one server until Redis answers, for the client's timeout in all: a connection may have broken.
// For those that Redis does not answer, it finds what memory has.
func (s *Store) Read(ctx context.Context, all []*Lookup) {
	for pause := wait.MinPause; ; pause *= 2 {
		s.Get(ctx, all)
		if all = unanswered(all); len(all) == 0 {
			return
		}
		if !s.readAgain(ctx, all, pause) {
			for _, l := range all {
				s.Recall(l)
			}
			return
		}
	}
}

func unanswered(all []*Lookup) (left []*Lookup) {
	for _, l := range all {
		if l.RedisErr != nil {
			left = append(left, l)
		}
	}
	return left
}

// readAgain pauses before a read is repeated that Redis did not answer. It reports whether to repeat it.
func (s *Store) readAgain(ctx context.Context, all []*Lookup, pause time.Duration) bool {
	first := all[0]
	left := s.client.Timeout - first.Asked - pause
	again := left >= s.client.Timeout/10 && client.Unreachable(first.RedisErr) && !errors.Is(first.RedisErr, redis.ErrClosed) &&
		!s.client.Away(s.Key(first.Key)) && client.Sleep(ctx, pause)
	if again {
		first.Asked += pause
	}
	for _, l := range all {
		l.Asked = first.Asked
	}
	return again
}

// Get sends a plain GET for each key, which a replica or the client's own cache may answer. With Near it sends
// a PTTL ahead. Keys must be on one server: the commands for several go in one pipeline.
func (s *Store) Get(ctx context.Context, all []*Lookup) {
	switch {
	case s.client.Local != nil:
		for _, l := range all {
			s.getLocal(ctx, l)
		}
	case len(all) > 1:
		s.getMany(ctx, all)
	case s.memory == nil:
		l := all[0]
		data, asked, err := s.client.Get(ctx, nil, s.Key(l.Key))
		if s.replied(ctx, l, data, time.Now(), err); l.RedisErr != nil {
			l.Asked += asked
		}
	default:
		l := all[0]
		valueKey := s.Key(l.Key)
		g := s.Generation(valueKey)
		pttl := redis.NewDurationCmd(ctx, time.Millisecond, "pttl", valueKey)
		data, asked, err := s.client.Get(ctx, pttl, valueKey)
		if s.replied(ctx, l, data, time.Now(), err) {
			l.keptBehind(pttl.Val())
			s.Keep(l, g)
		} else if l.RedisErr != nil {
			l.Asked += asked
		}
	}
}

// getLocal is Get without Redis: of a key and of how long it is kept in one step.
func (s *Store) getLocal(ctx context.Context, l *Lookup) {
	valueKey := s.Key(l.Key)
	g := s.Generation(valueKey)
	step, err := s.client.Local.Begin(valueKey), ctx.Err()
	text, _ := step.Get(valueKey)
	left, _ := step.PTTL(valueKey)
	if step.End(); text == "" && err == nil {
		err = redis.Nil
	}
	if s.replied(ctx, l, []byte(text), time.Now(), err) {
		l.Kept(left)
		s.Keep(l, g)
	}
}

func (s *Store) getMany(ctx context.Context, all []*Lookup) {
	keys, generations := make([]string, len(all)), make([]near.Generation, len(all))
	var pttls []redis.Cmder
	for i, l := range all {
		keys[i] = s.Key(l.Key)
		generations[i] = s.Generation(keys[i])
		if s.memory != nil {
			pttls = append(pttls, redis.NewDurationCmd(ctx, time.Millisecond, "pttl", keys[i]))
		}
	}
	replies, asked, err := s.client.GetMany(ctx, pttls, keys)
	now := time.Now()
	for i, l := range all {
		if err != nil {
			l.RedisErr = err
			l.Asked += asked
			continue
		}
		if data, err := replies[i].Bytes(); s.replied(ctx, l, data, now, err) && s.memory != nil {
			l.keptBehind(pttls[i].(*redis.DurationCmd).Val())
			s.Keep(l, generations[i])
		}
	}
}

// replied takes the reply to a GET, which came at a time. It reports whether there is an entry, or bytes that are none.
func (s *Store) replied(ctx context.Context, l *Lookup, data []byte, at time.Time, err error) bool {
	l.RedisErr = nil
	switch {
	case err == nil:
		s.Decode(ctx, l, data, at)
		return true
	case client.WrongType(err):
		s.events.BadValue(ctx, l.Key, err)
	case !errors.Is(err, redis.Nil):
		l.RedisErr = err
	}
	return false
}

// Decode reads an entry and judges its freshness at a time. Bytes that are not an entry, or not of a T, are a
// miss; they are counted.
//
// Each caller decodes again, or copies. One caller may change its map while another one reads. The
// payload kept for that is part of the encoded entry: what the codec returned may be memory of the
// value itself. See TestGetOrLoad_CallersOwnTheirValues and TestCodec_AliasedBytes.
func (s *Store) Decode(ctx context.Context, l *Lookup, data []byte, at time.Time) {
	l.Data, l.At = data, at
	var err error
	if l.Entry, err = entry.Parse(data); err == nil {
		if use := s.policy.freshnessOf(&l.Entry, l.At); use > Expired {
			if l.Entry.NotFound {
				l.Err = ErrNotFound
			} else {
				l.Value, err = s.Type.DecodeEntry(l.Key, &l.Entry)
			}
			if err == nil {
				l.Freshness = use
			}
		}
	}
	if err != nil {
		s.events.BadValue(ctx, l.Key, err)
	}
}

// Due reports whether a hit refreshes its entry: if it is stale, or early.
func (s *Store) Due(l *Lookup) bool {
	switch {
	case !l.Hit() || l.Freshness == Revalidate:
		return l.Hit()
	case s.memory != nil: // one draw decides for all hits in memory
		return l.early
	}
	by := s.policy.EarlyBy(&l.Entry, rand.ExpFloat64)
	return by > 0 && by >= l.Entry.FreshUntil.Sub(l.At)
}

// Servable reports whether an old value may still be served at a time.
func (s *Store) Servable(f *Found, at time.Time) bool {
	return f.Freshness > Expired && s.policy.freshnessOf(&f.Entry, at) > Expired
}

// Info describes what was found. failure is the failure of the load in whose place f is served, as of a time, or nil:
// if f had become too old by then, Info returns it.
func (s *Store) Info(f *Found, failure error, at time.Time) (info event.ValueInfo, err error) {
	if f.Entry.WrittenAt.IsZero() {
		return info, nil
	}
	now, use := f.At, f.Freshness
	if failure != nil { // f was judged before the load
		now, use = at, s.policy.freshnessOf(&f.Entry, at)
	}
	info.Entry, info.Expires = f.Entry.ID, f.Entry.FreshUntil
	info.Age = max(0, now.Sub(f.Entry.WrittenAt)) // the clocks of writer and reader may disagree
	switch {
	case use == Expired:
		return event.ValueInfo{}, failure
	case use < Fresh:
		info.Stale, info.Err, info.Expires = true, failure, past(info.Expires, now)
	}
	return info, nil
}

// past returns when a stale entry ceased to be fresh. By the clock of its writer, or of Expire, it may not have
// done so yet.
func past(at, now time.Time) time.Time {
	if at.After(now) {
		return now
	}
	return at
}

// InfoOf describes the entry that a load replaces.
func InfoOf(e *entry.Entry, now time.Time) event.ValueInfo {
	info := event.ValueInfo{Stale: e.Expired || !now.Before(e.FreshUntil), Age: e.Age(now), Expires: e.FreshUntil, Entry: e.ID}
	if info.Stale {
		info.Expires = past(info.Expires, now)
	}
	return info
}

// LifeOf returns how long value is fresh. With less than 1 ms it is not stored.
func (s *Store) LifeOf(key string, value any) time.Duration {
	if s.Type.Life == nil {
		return s.policy.shorten(s.policy.TTL)
	}
	return s.policy.shorten(s.Type.Life(key, value))
}

// TagsOf returns the tags of a value, or nil without Options.Tags. A nil value stands for ErrNotFound.
func (s *Store) TagsOf(key string, value any) ([]string, error) {
	if s.Type.Tags == nil {
		return nil, nil
	}
	return s.Type.Tags(key, value)
}

// LifeOfNotFound returns how long ErrNotFound is fresh.
func (s *Store) LifeOfNotFound() time.Duration { return s.policy.shorten(s.policy.NotFoundTTL) }

// KeptFor returns how long Redis keeps an entry that is fresh for life.
func (s *Store) KeptFor(life time.Duration) time.Duration { return s.policy.KeptFor(life) }

package revoke

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/filllock"
	"github.com/singlefill/singlefill/internal/foreign"
	"github.com/singlefill/singlefill/internal/tags"
	"github.com/singlefill/singlefill/internal/value"
)

// Sets stores values that supersede loads.
type Sets struct {
	keys *Keys
	tags *tags.Index // nil: no value has tags
}

func NewSets(keys *Keys, index *tags.Index) *Sets { return &Sets{keys, index} }

// Set stores a value. It deletes the key if the value is not to be stored.
func (x *Sets) Set(ctx context.Context, key string, v any) error {
	s, err := x.newSet(key, v)
	if err != nil {
		return value.Wrap(ctx, "set", err)
	}
	if s.Data == nil {
		return x.keys.Delete(ctx, key)
	}
	defer x.keys.invalidated([]string{key}, true)
	return value.Wrap(ctx, "set", x.set(ctx, s))
}

func (x *Sets) set(ctx context.Context, s filllock.Set) (unnoted error) {
	if x.keys.client.Local != nil { // which knows its tags, and has no log
		_, err := s.Do(ctx, x.keys.client)
		return err
	}
	noted, err := x.note(ctx, []filllock.Set{s})
	if err != nil {
		return err
	}
	superseded, err := s.Do(ctx, x.keys.client)
	if superseded {
		x.keys.Wake(ctx, s.Lock)
	}
	if err == nil {
		unnoted = x.tags.Stored(ctx, noted, false)
	}
	return cmp.Or(x.keys.Record(ctx, []filllock.Pair{s.Pair}, err), unnoted)
}

// newSet returns what Set stores. Data is nil if v is not to be stored.
func (x *Sets) newSet(key string, v any) (s filllock.Set, err error) {
	store := x.keys.store
	s.Pair = filllock.PairOf(store.Key(key))
	life := store.LifeOf(key, v)
	if life < time.Millisecond {
		return s, nil
	}
	payload, err := store.Type.Encode(key, v)
	if err != nil {
		return s, err
	}
	tags, err := store.TagsOf(key, v)
	if err != nil {
		return s, err
	}
	s.Tagging = x.tags.Tagging(key, tags, nil)
	now := time.Now()
	s.Life = store.KeptFor(life)
	s.Data, err = entry.Entry{
		FreshUntil: now.Add(life), WrittenAt: now, Format: store.Type.Formats.Written, Version: store.Type.Policy.Version,
		Payload: payload,
	}.Encode()
	return s, err
}

// SetMany stores values, in few round trips, and returns the errors of keys that may not have been stored.
func (x *Sets) SetMany(ctx context.Context, keys []string, valueOf func(key string) any) map[string]error {
	defer x.keys.invalidated(keys, true)
	errs := make(map[string]error)
	var sets []filllock.Set
	var gone []string // their values are not to be stored
	for _, key := range keys {
		s, err := x.newSet(key, valueOf(key))
		switch {
		case err != nil:
			errs[key] = value.Wrap(ctx, "set", err)
		case s.Data == nil:
			gone = append(gone, key)
		default:
			sets = append(sets, s)
		}
	}
	x.setAll(ctx, sets, errs)
	if err := x.keys.Delete(ctx, gone...); err != nil {
		for _, key := range gone {
			errs[key] = err
		}
	}
	return errs
}

// setAll stores values, on all nodes at the same time.
func (x *Sets) setAll(ctx context.Context, sets []filllock.Set, into map[string]error) {
	groups := client.ByNode(x.keys.client, sets, func(s filllock.Set) string { return s.Value })
	errs := make([][]error, len(groups))
	left := foreign.Each(len(groups), func(i int) error {
		errs[i] = x.setOnNode(ctx, groups[i])
		return nil
	})
	for i, group := range groups {
		for j, s := range group {
			err := left[i]
			if err == nil {
				err = errs[i][j]
			}
			if err != nil {
				into[s.Key] = value.Wrap(ctx, "set", err)
			}
		}
	}
}

// setOnNode stores the values of one node, and returns the error of each. A dead node costs one
// RedisTimeout, however many keys there are.
func (x *Sets) setOnNode(ctx context.Context, sets []filllock.Set) (errs []error) {
	var away error                                         // why nothing is sent any more
	for some := range slices.Chunk(sets, 4*client.Batch) { // to note a few more at once is cheaper
		var noted *tags.Noted
		unnoted := away
		if away == nil {
			noted, unnoted = x.note(ctx, some)
		}
		for n := 0; len(some) > 0; some = some[n:] {
			n = client.Carried(len(some), func(i int) int { return len(some[i].Data) })
			why := cmp.Or(unnoted, away)
			if why == nil {
				var each []error
				each, why = x.setNoted(ctx, some[:n], noted)
				errs = append(errs, each...)
			} else {
				errs = append(errs, slices.Repeat([]error{why}, n)...)
			}
			if client.Unreachable(why) {
				away = why
			}
		}
	}
	return errs
}

// setNoted stores values in one round trip. It returns the error of each, and a failure that may be the node's.
func (x *Sets) setNoted(ctx context.Context, sets []filllock.Set, noted *tags.Noted) (errs []error, failed error) {
	pairs := make([]filllock.Pair, len(sets))
	for i, s := range sets {
		pairs[i] = s.Pair
	}
	errs, failed = filllock.SetMany(ctx, x.keys.client, sets)
	lost := x.tags.Stored(ctx, noted, false)
	told := cmp.Or(x.keys.Record(ctx, pairs, nil), lost)
	for i, err := range errs {
		errs[i] = cmp.Or(err, told)
	}
	return errs, cmp.Or(failed, told)
}

// note notes the tags of values that are about to be stored. They need no proof: a Set at the same time
// as a DeleteTag may come before or after it.
func (x *Sets) note(ctx context.Context, sets []filllock.Set) (*tags.Noted, error) {
	var notes []tags.Note
	for _, s := range sets {
		if len(s.Tags) > 0 {
			notes = append(notes, tags.Note{Key: s.Key, Tags: s.Tags, Life: s.Life})
		}
	}
	if len(notes) == 0 {
		return nil, nil
	}
	return x.tags.Note(ctx, notes)
}

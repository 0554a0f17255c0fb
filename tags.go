package singlefill

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/singlefill/singlefill/internal/event"
	"github.com/singlefill/singlefill/internal/filllock"
	"github.com/singlefill/singlefill/internal/foreign"
	"github.com/singlefill/singlefill/internal/tags"
	"github.com/singlefill/singlefill/internal/value"
)

// DeleteTag is [Cache.Delete] of each key whose value has one of the tags: see [Options.Tags]. It
// finds values that are being loaded, too, in any process, also under keys that were never stored.
// A key whose value had the tag before it was replaced may be deleted as well, until that value
// would have ended.
//
// If what is known of the tags may have been lost in Redis, DeleteTag notices, and finds it out again
// from all values of the namespace: one process does, and the others wait for it. So does the first
// DeleteTag of a namespace, unless Clear was called before, and one for a tag of which the eighth of
// all tags to which it belongs was not used for a day. That supersedes all loads in flight, and
// removes values that cannot be decoded, whose tags Options.Tags does not tell, or that have tags and no
// TTL. It takes its time ([docs/figures.md]): if ctx ends first, it goes on in the background, and the
// next call waits for it.
// Values in a slot of a Cluster that moves at that time may be missed, as by Clear.
//
// After an error some of the values may not have been deleted: call it again.
//
// [docs/figures.md]: https://github.com/singlefill/singlefill/blob/main/docs/figures.md#many-keys-at-once
func (c *Cache[T]) DeleteTag(ctx context.Context, tags ...string) error {
	e := c.engine
	return e.invalidateTags(ctx, tags, event.TagInfo{}, func(ctx context.Context, keys []string) error {
		return e.space.Delete(ctx, keys...)
	})
}

// ExpireTag is [Cache.Expire] of each key whose value has one of the tags: see DeleteTag.
func (c *Cache[T]) ExpireTag(ctx context.Context, tags ...string) error {
	e := c.engine
	return e.invalidateTags(ctx, tags, event.TagInfo{Expire: true}, func(ctx context.Context, keys []string) error {
		return e.space.Expire(ctx, keys...)
	})
}

func (c *engine) invalidateTags(ctx context.Context, names []string, info event.TagInfo,
	invalidate func(ctx context.Context, keys []string) error) error {
	if err := c.checkOpen(); err != nil {
		return err
	}
	if c.tags == nil {
		return errors.New("singlefill: Options.Tags is nil: DeleteTag and ExpireTag are allowed with Tags only")
	}
	names, err := checkTags(names)
	if err == nil {
		err = ctx.Err()
	}
	if err != nil || len(names) == 0 {
		return err
	}
	info.Tags = names
	info.Err = c.invalidateTagged(ctx, &info, invalidate)
	c.events.TagDone(ctx, info)
	return info.Err
}

// invalidateTagged marks the tags, so that what is being loaded is not stored, and then invalidates what
// is stored: again if what is known of the tags is lost meanwhile.
func (c *engine) invalidateTagged(ctx context.Context, info *event.TagInfo, invalidate func(ctx context.Context, keys []string) error) error {
	for intact := false; !intact && !info.Rebuilt; {
		marked, err := c.tags.Mark(ctx, info.Tags)
		switch {
		case err != nil:
		case !marked.Complete:
			err = c.rebuild(ctx, info, invalidate)
		default:
			intact, err = c.invalidateNoted(ctx, marked, info, invalidate)
		}
		if err != nil {
			return value.Wrap(ctx, "tag", err)
		}
	}
	return nil
}

// invalidateNoted invalidates what is in the indexes. It reports whether they were intact, and read in one order: a
// server that was restarted meanwhile goes on from a cursor of its former process in another order.
func (c *engine) invalidateNoted(ctx context.Context, marked tags.Marked, info *event.TagInfo,
	invalidate func(ctx context.Context, keys []string) error) (bool, error) {
	c.forgetUnindexed(marked)
	before, err := c.tags.Process(ctx)
	if err != nil {
		return false, err
	}
	for _, tag := range marked.Tags {
		err := c.tags.Keys(ctx, tag, func(keys []string) error {
			info.Keys += len(keys)
			return invalidate(ctx, keys)
		})
		if err != nil {
			return false, err
		}
	}
	if after, err := c.tags.Process(ctx); err != nil || after != before {
		return false, err
	}
	return c.tags.Intact(ctx, marked)
}

// forgetUnindexed forgets what memory has if the indexes have been made anew since this process last saw
// them, by whichever process: they do not have the keys of values that Redis had lost by then.
func (c *engine) forgetUnindexed(marked tags.Marked) {
	if c.near != nil && !c.tags.Seen(marked) {
		c.near.ForgetAll()
		c.tags.SetSeen(marked)
	}
}

const (
	maxTags   = 32  // of a value
	maxTagLen = 256 // bytes
)

// checkTags returns tags without duplicates.
func checkTags(names []string) ([]string, error) {
	for _, name := range names {
		if name == "" || len(name) > maxTagLen {
			return nil, fmt.Errorf("singlefill: tag is %.100q, of %d bytes: 1 to %d bytes are allowed", name, len(name), maxTagLen)
		}
	}
	if len(names) < 2 {
		return names, nil
	}
	names = slices.Clone(names)
	slices.Sort(names)
	return slices.Compact(names), nil
}

// tagsOf returns the tags of a value, or nil without Options.Tags. A nil value stands for ErrNotFound.
func (c *engine) tagsOf(key string, value any) (names []string, err error) {
	if c.tags == nil {
		return nil, nil
	}
	defer func() {
		if p := recover(); p != nil {
			err = errors.New("singlefill: Options.Tags panicked: " + foreign.Text(p))
		}
	}()
	names, err = checkTags(c.values.Tags(key, value))
	if err == nil && len(names) > maxTags {
		err = fmt.Errorf("singlefill: Options.Tags returned %d tags for the key %.100q: at most %d are allowed", len(names), key, maxTags)
	}
	return names, err
}

// takeTags takes the tags of what a load has brought.
func (x *filling) takeTags(o *outcome) (err error) {
	if x.tags == nil || o.failed() {
		return nil
	}
	if o.tags, err = x.tagsOf(x.fill.Key, o.value); err != nil {
		return err
	}
	return x.since.Missing(o.tags)
}

// noteTags notes the tags of what a load has brought, also if it is not to be stored: a DeleteTag that comes
// later then finds the key, and the lock that this fill still holds. It returns false if a tag has been
// invalidated since the load began, or may have been.
func (x *filling) noteTags(ctx context.Context, o *outcome) (noted *tags.Noted, valid bool, err error) {
	if o.untagged || len(o.tags) == 0 {
		return nil, !o.untagged, nil
	}
	note := tags.Note{Key: x.fill.Key, Tags: o.tags, Life: x.store.KeptFor(o.life)}
	noted, err = x.tags.Note(ctx, []tags.Note{note}, x.since)
	return noted, noted != nil, err
}

// A set is what Set stores.
type set struct {
	filllock.Set
	key  string
	tags []string
}

// noteSets notes the tags of values that Set is about to store. They need no proof: a Set at the same time
// as a DeleteTag may come before or after it.
func (c *engine) noteSets(ctx context.Context, sets []set) (*tags.Noted, error) {
	var notes []tags.Note
	for _, s := range sets {
		if len(s.tags) > 0 {
			notes = append(notes, tags.Note{Key: s.key, Tags: s.tags, Life: s.Life})
		}
	}
	if len(notes) == 0 {
		return nil, nil
	}
	return c.tags.Note(ctx, notes, nil)
}

// storedNoted is called when Set has stored values, or some of them.
func (c *engine) storedNoted(ctx context.Context, noted *tags.Noted) error {
	if noted == nil {
		return nil
	}
	return c.tags.Stored(ctx, noted, false)
}

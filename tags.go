package singlefill

import (
	"cmp"
	"context"
	"errors"

	"github.com/singlefill/singlefill/internal/tags"
)

// DeleteTag is [Cache.Delete] of each key whose value has one of the tags: see [Options.Tags]. It
// finds values that are being loaded, too, in any process, also under keys that were never stored.
// A key whose value had the tag before it was replaced may be deleted as well, until that value
// would have ended, and for a while longer.
//
// If what is known of the tags may have been lost in Redis, DeleteTag notices, and finds it out again
// from all values of the namespace: one process does, and the others wait for it. The first DeleteTag of
// a namespace does the same, unless Clear was called before. The cache keeps the tags of a namespace in
// eight groups: DeleteTag also reads all values if no tag of the group was used for a day. Reading all
// values supersedes all loads in flight, and
// removes values that cannot be decoded, whose tags Options.Tags does not return, or that have tags and
// no TTL. It takes its time ([docs/figures.md]): if ctx ends first, it goes on in the background, and
// the next call waits for it. Values in a slot of a Cluster that moves at that time may be missed, as by
// Clear.
//
// After an error some of the values may not have been deleted: call it again.
//
// [docs/figures.md]: https://github.com/singlefill/singlefill/blob/main/docs/figures.md#many-keys-at-once
func (c *Cache[T]) DeleteTag(ctx context.Context, tags ...string) (err error) {
	defer failed(&err)
	names, err := c.rooms.checkTags(ctx, tags)
	if err != nil || len(names) == 0 {
		return err
	}
	return c.rooms.tags.Delete(ctx, names)
}

// ExpireTag is [Cache.Expire] of each key whose value has one of the tags: see DeleteTag.
func (c *Cache[T]) ExpireTag(ctx context.Context, tags ...string) (err error) {
	defer failed(&err)
	names, err := c.rooms.checkTags(ctx, tags)
	if err != nil || len(names) == 0 {
		return err
	}
	return c.rooms.tags.Expire(ctx, names)
}

// checkTags checks a call, and returns its tags without duplicates.
func (c *rooms) checkTags(ctx context.Context, names []string) ([]string, error) {
	if err := c.checkOpen(ctx); err != nil {
		return nil, err
	}
	if c.tags == nil {
		return nil, errors.New("singlefill: Options.Tags is nil: DeleteTag and ExpireTag are allowed with Tags only")
	}
	names, err := tags.Names(names)
	return names, cmp.Or(err, ctx.Err())
}

package revoke

import (
	"context"

	"github.com/singlefill/singlefill/internal/event"
	"github.com/singlefill/singlefill/internal/tags"
	"github.com/singlefill/singlefill/internal/value"
)

// Tags are the tags of the values of a namespace.
type Tags struct {
	keys       *Keys
	space      *Space
	rebuilding chan struct{} // has an element while a rebuild runs
}

// NewTags returns the tags of a space that has an index of them.
func NewTags(space *Space) *Tags {
	return &Tags{keys: space.keys, space: space, rebuilding: make(chan struct{}, 1)}
}

// Delete deletes the keys whose values have one of the tags.
func (t *Tags) Delete(ctx context.Context, names []string) error {
	return t.invalidate(ctx, event.TagInfo{Tags: names}, t.keys.Delete)
}

// Expire expires the keys whose values have one of the tags.
func (t *Tags) Expire(ctx context.Context, names []string) error {
	return t.invalidate(ctx, event.TagInfo{Tags: names, Expire: true}, t.keys.Expire)
}

func (t *Tags) invalidate(ctx context.Context, info event.TagInfo, do func(ctx context.Context, keys ...string) error) error {
	info.Err = t.invalidateTagged(ctx, &info, do)
	t.space.events.TagDone(ctx, info)
	return info.Err
}

func (t *Tags) invalidateTagged(ctx context.Context, info *event.TagInfo, do func(ctx context.Context, keys ...string) error) error {
	for intact := false; !intact && !info.Rebuilt; {
		marked, err := t.space.tags.Mark(ctx, info.Tags)
		switch {
		case err != nil:
		case !marked.Complete:
			err = t.rebuild(ctx, info, do)
		default:
			t.forgetUnindexed(marked)
			intact, err = t.space.tags.KeysOf(ctx, marked, func(keys []string) error {
				info.Keys += len(keys)
				return do(ctx, keys...)
			})
		}
		if err != nil {
			return value.Wrap(ctx, "tag", err)
		}
	}
	return nil
}

// forgetUnindexed empties memory if any process has rebuilt the indexes since this process last saw
// them: they do not have the keys of values that Redis had lost by then.
func (t *Tags) forgetUnindexed(marked tags.Marked) {
	if !t.space.tags.Seen(marked) {
		t.keys.store.ForgetAll()
		t.space.tags.SetSeen(marked)
	}
}

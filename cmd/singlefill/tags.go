package main

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/tags"
)

func prepareTags(x *execution, _ *flag.FlagSet) func(ctx context.Context, args []string) error {
	return func(ctx context.Context, args []string) error { return x.tags(ctx, args[0]) }
}

// index returns the tags of a namespace. Its marks live as long as those of a program with the default LoadTimeout.
func (x *execution) index(namespace string) *tags.Index {
	c := client.New(x.rdb, x.timeout, func(context.Context, string, error) {}, func(error) {}, nil)
	return tags.New(c, namespace, time.Minute, 0)
}

// tags prints the tags of a namespace.
func (x *execution) tags(ctx context.Context, namespace string) error {
	keys := make(map[string]int64)
	err := x.index(namespace).Each(ctx, func(tag string, n int64) {
		keys[tag] = n
		x.showProgress("%d tags found", len(keys))
	})
	x.clearProgress()
	if err != nil {
		return err
	}
	type row struct {
		Tag  string `json:"tag"`
		Keys int64  `json:"keys"`
	}
	rows := []row{}
	for _, tag := range slices.Sorted(maps.Keys(keys)) {
		rows = append(rows, row{tag, keys[tag]})
	}
	if x.json {
		return x.printJSON(map[string]any{"namespace": namespace, "tags": rows})
	}
	if len(rows) == 0 {
		return fmt.Errorf("no value of the namespace %s has a tag", printable(namespace))
	}
	t := x.table("TAG", "KEYS")
	for _, r := range rows {
		t.add(printable(r.Tag), r.Keys)
	}
	_ = t.Flush()
	return nil
}

// clearTags deletes the keys of tags as Cache.DeleteTag does. But if not all tags are known it deletes nothing:
// DeleteTag finds them out from the values, and removes each value whose tags it cannot tell. This program cannot.
func (x *execution) clearTags(ctx context.Context, namespace string, names []string) error {
	names, err := tags.Names(names)
	if err != nil {
		return err
	}
	c, err := x.cache(namespace, nil)
	if err != nil {
		return err
	}
	defer c.Close()
	defer x.clearProgress()
	index, keys := x.index(namespace), 0
	for intact := false; !intact; {
		marked, err := index.Mark(ctx, names)
		if err == nil && !marked.Complete {
			err = fmt.Errorf("not all tags of the namespace %s are known, and %d values were deleted: "+
				"call DeleteTag with these tags in a program that has Options.Tags, or clear without -tag", printable(namespace), keys)
		}
		if err == nil {
			intact, err = index.KeysOf(ctx, marked, func(found []string) error {
				err := c.Delete(ctx, found...)
				keys += len(found)
				x.showProgress("%d values deleted", keys)
				return err
			})
		}
		if err != nil {
			return err
		}
	}
	if x.json {
		return x.printJSON(map[string]any{"namespace": namespace, "tags": names, "keys": keys})
	}
	fmt.Fprintf(x.stdout, "%d values deleted\n", keys)
	return nil
}

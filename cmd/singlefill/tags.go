package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"slices"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/tags"
)

func prepareTags(x *execution, _ *flag.FlagSet) func(ctx context.Context, args []string) error {
	return func(ctx context.Context, args []string) error { return x.tags(ctx, args[0]) }
}

// tags prints the tags of a namespace.
func (x *execution) tags(ctx context.Context, namespace string) error {
	c := client.New(x.rdb, x.timeout, func(context.Context, string, error) {}, func(error) {}, nil)
	keys := make(map[string]int64)
	if err := tags.New(c, namespace, 0, 0).Each(ctx, func(tag string, n int64) { keys[tag] = n }); err != nil {
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
	t.print()
	return nil
}

// clearTags deletes the keys of tags.
func (x *execution) clearTags(ctx context.Context, namespace string, names []string) error {
	var done singlefill.TagInfo
	c, err := x.cache(namespace, &singlefill.Trace{TagDone: func(_ context.Context, info singlefill.TagInfo) { done = info }},
		func(string, any) []string { panic("unknown to this program") }) // if a rebuild is needed it removes all values, as Clear does
	if err != nil {
		return err
	}
	if err := errors.Join(c.DeleteTag(ctx, names...), c.Close()); err != nil {
		return err
	}
	if x.json {
		return x.printJSON(map[string]any{"namespace": namespace, "tags": done.Tags, "keys": done.Keys, "cleared": done.Cleared})
	}
	if done.Cleared {
		fmt.Fprintln(x.stdout, "what is known of the tags may have been lost: every value of the namespace deleted")
		return nil
	}
	fmt.Fprintf(x.stdout, "%d values deleted\n", done.Keys)
	return nil
}

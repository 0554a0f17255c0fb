package singlefilltest

import (
	"reflect"
	"slices"
	"testing"

	"github.com/singlefill/singlefill"
)

// Tags returns a function for Options.Tags in a test: tags, which must return the same for a value before it is
// encoded by c, or by MsgPack if c is nil, and after it is decoded. Otherwise the function reports by t.Errorf
// what tags returned, in any order. A value that c cannot encode or decode is not checked: see [Codec].
func Tags[T any](t testing.TB, c singlefill.Codec, tags func(key string, v T) []string) func(key string, v T) []string {
	if c == nil {
		c = singlefill.MsgPack
	}
	return func(key string, v T) []string {
		before, c := tags(key, v), c
		if k, ok := c.(keyed); ok {
			c = k.ForKey("", key)
		}
		data, err := c.Marshal(v)
		var decoded T
		if err != nil || c.Unmarshal(data, &decoded) != nil {
			return before
		}
		if after := tags(key, decoded); !slices.Equal(slices.Sorted(slices.Values(before)), slices.Sorted(slices.Values(after))) {
			t.Errorf("singlefilltest: Tags of %v are %q before it is encoded and %q after it is decoded", reflect.TypeFor[T](), before, after)
		}
		return before
	}
}

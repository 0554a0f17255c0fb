package singlefilltest_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
	"github.com/singlefill/singlefill/singlefilltest"
)

// Tags that depend on what the codec drops are reported, and no others.
func TestTags(t *testing.T) {
	t.Parallel()
	type item struct {
		Region string
		Draft  bool `msgpack:"-"`
	}
	for _, codec := range []singlefill.Codec{nil, cachetest.KeyedCodec{Codec: singlefill.MsgPack}} {
		f := new(fakeTB)
		tags := singlefilltest.Tags(f, codec, func(key string, v item) []string {
			return []string{"region:" + v.Region, fmt.Sprint("draft:", v.Draft)}
		})
		for _, v := range []item{{"eu", false}, {"eu", true}} {
			if got := tags("k", v); !slices.Equal(got, []string{"region:eu", fmt.Sprint("draft:", v.Draft)}) {
				t.Errorf("the tags are %q", got)
			}
		}
		want := `singlefilltest: Tags of singlefilltest_test.item are ["region:eu" "draft:true"] before it is encoded and ["region:eu" "draft:false"] after it is decoded`
		if len(f.errors) != 1 || f.errors[0] != want {
			t.Errorf("told %q, want %s", f.errors, want)
		}
	}
}

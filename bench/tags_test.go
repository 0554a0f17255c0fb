package bench

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/redistest"
)

// BenchmarkTagsLost deletes a tag of every tenth value, of values of 100 B with two tags each: when what is known of
// the tags has been lost, so that all values are read; when it is known; and by Clear, which removes all values. At the
// same time other clients read.
func BenchmarkTagsLost(b *testing.B) {
	for _, keys := range []int{100_000, 1_000_000} {
		b.Run(fmt.Sprint(keys), func(b *testing.B) {
			if quick {
				keys = 2000
			}
			removeTagged(b, keys, func(i int) []string {
				return []string{fmt.Sprint("deleted:", i%10 == 0), fmt.Sprint("fifty:", i/50)}
			})
		})
	}
}

// BenchmarkTagsLarge does the same with one tag, which all of 200,000 values have.
func BenchmarkTagsLarge(b *testing.B) {
	keys := 200_000
	if quick {
		keys = 2000
	}
	removeTagged(b, keys, func(int) []string { return []string{"deleted:true"} })
}

func removeTagged(b *testing.B, keys int, tagsOf func(i int) []string) {
	s := redistest.Start(b)
	ctx := b.Context()
	rdb, namespace := open(b, s.Addr), redistest.Namespace(b)
	c := must(singlefill.New(rdb, namespace, time.Hour, &singlefill.Options[string]{
		Tags: func(key, _ string) []string { return tagsOf(must(strconv.Atoi(key))) },
	}))
	b.Cleanup(func() { _ = c.Close() })
	payload := must(singlefill.MsgPack.Marshal(strings.Repeat("x", 100)))
	now := time.Now()
	value := string(must(entry.Entry{FreshUntil: now.Add(time.Hour), WrittenAt: now, Payload: payload}.Encode()))
	left := 0
	for i := range keys {
		if tagsOf(i)[0] != "deleted:true" {
			left++
		}
	}
	store := func() {
		redistest.Must(b, c.Clear(ctx))
		if known := must(s.Admin().Keys(ctx, namespace+":tags:*").Result()); len(known) > 0 {
			redistest.Must(b, s.Admin().Unlink(ctx, known...).Err()) // the books, and the indexes
		}
		populate(b, s, namespace, keys, value)
	}
	storeNoted := func() { store(); redistest.Must(b, c.DeleteTag(ctx, "none")) }
	deleteTag := func() error { return c.DeleteTag(ctx, "deleted:true") }
	compareRemovals(b, s, namespace, []removal{
		{name: "DeleteTag, tags lost", store: store, remove: deleteTag, left: left},
		{name: "DeleteTag, tags known", store: storeNoted, remove: deleteTag, left: left},
		{name: "Clear", store: store, remove: func() error { return c.Clear(ctx) }},
	})
}

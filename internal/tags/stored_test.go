package tags

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/redistest"
)

// A note is written again if it may end before its value, however the value was stored; and if it is lost, unless
// the value was stored under a lock.
func TestStored(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name               string
		late, lost, locked bool
		again              bool
	}{
		{name: "in time"},
		{name: "late", late: true, again: true},
		{name: "lost", lost: true, again: true},
		{name: "in time, under a lock", locked: true},
		{name: "late, under a lock", late: true, locked: true, again: true},
		{name: "lost, under a lock", lost: true, locked: true},
	} {
		synctest.Test(t, func(t *testing.T) {
			_, rdb := redistest.StartMini(t)
			ctx := t.Context()
			c := client.New(rdb, time.Second, func(context.Context, string, error) {}, func(error) {}, nil)
			const storing, life = 3 * time.Second, time.Minute
			x := New(c, "ns", time.Hour, storing)
			n, err := x.Note(ctx, []Note{{Key: "k", Tags: []string{"a"}, Life: life}})
			redistest.Must(t, err)
			if time.Sleep(storing); test.late {
				time.Sleep(time.Second)
			}
			if test.lost {
				redistest.Must(t, rdb.Del(ctx, x.book(bookOf("a")), x.index("a")).Err())
			}
			redistest.Must(t, x.Stored(ctx, n, test.locked))
			ends := time.UnixMilli(int64(rdb.ZScore(ctx, x.index("a"), "k").Val()))
			if again := ends.Equal(time.Now().Add(life + storing)); again != test.again {
				t.Errorf("%s: noted again: %t, want %t", test.name, again, test.again)
			}
		})
	}
}

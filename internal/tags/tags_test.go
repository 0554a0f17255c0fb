package tags

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/redistest"
)

// However much a call notes, no command for it takes the server long, and each key is noted under each tag once.
func TestPages_AreBounded(t *testing.T) {
	t.Parallel()
	var notes []Note
	for i := range 1000 {
		n := Note{Key: fmt.Sprint("k", i), Tags: []string{"all"}}
		for j := range i % 32 {
			n.Tags = append(n.Tags, fmt.Sprint("t", i*j%300))
		}
		notes = append(notes, n)
	}
	left := make(map[[2]string]int)
	for _, n := range notes {
		for _, tag := range n.Tags {
			left[[2]string{tag, n.Key}]++
		}
	}
	for _, p := range pagesOf(notes) {
		pairs := 0
		for _, tag := range p.tags {
			if bookOf(tag.tag) != p.book {
				t.Fatalf("tag %s is on a page of book %d", tag.tag, p.book)
			}
			for _, key := range tag.keys {
				left[[2]string{tag.tag, key.Key}]--
				pairs++
			}
		}
		if pairs > pageLen {
			t.Errorf("a page has %d pairs", pairs)
		}
	}
	for pair, n := range left {
		if n != 0 {
			t.Errorf("%q is missing %d times", pair, n)
		}
	}
}

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

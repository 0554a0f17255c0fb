package tags

import (
	"fmt"
	"testing"
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

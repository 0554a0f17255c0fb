package flight

import (
	"testing"
)

// A refresh is a fill that callers may join; a key has one at most, and none while it has another
// fill.
func TestFills_Refresh(t *testing.T) {
	t.Parallel()
	g := newFills()
	begun := make(chan *Fill[string], 10)
	run := starts(g, func(f *Fill[string], _ *Load, over func()) { begun <- f; over() })
	refresh := func(entry string) { g.Refresh([]string{"k"}, []string{entry}, run) }
	refresh("e1")
	refresh("e1")
	refresh("e2")
	f := <-begun
	w := mustJoin(t, g, "k", &Caller{})
	if w.Fill != f || !f.Refresh || w.First {
		t.Fatal("a caller does not join the refresh")
	}
	endWith(g, f, "v", Always)
	wantWait(t, g, w, "v", Owned)
	g.Drain()
	if len(begun) > 0 {
		t.Errorf("%d more refreshes have begun", len(begun))
	}
	mustJoin(t, g, "k", &Caller{})
	refresh("e1")
	g.Drain()
	if len(begun) > 0 {
		t.Error("a refresh begins although the key has a fill")
	}
}

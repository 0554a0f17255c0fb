package flight

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// inLoader makes this goroutine run the Loaders of loads.
func inLoader(loads ...*Load) {
	for _, l := range loads {
		l.Begin()
	}
}

// A call in the Loader's goroutine is refused if its wait could never end.
func TestGraph_CircleIsRefused(t *testing.T) {
	t.Parallel()
	a, b, c := aLoad(), aLoad(), aLoad()
	inLoader(a, b, c)
	if a.waitFor(itsFill(a)) {
		t.Error("a load may wait for itself")
	}
	if !a.waitFor(itsFill(b)) || !b.waitFor(itsFill(c)) {
		t.Fatal("a chain is refused")
	}
	if c.waitFor(itsFill(a)) || c.waitFor(itsFill(b)) || b.waitFor(itsFill(a)) {
		t.Error("a circle is allowed")
	}
	if !a.waitFor(itsFill(c)) {
		t.Error("two ways to one load are refused")
	}
	b.leave(itsFill(c))
	if c.waitFor(itsFill(a)) {
		t.Error("a circle is allowed by the way that is left")
	}
	a.leave(itsFill(c))
	if !c.waitFor(itsFill(a)) {
		t.Error("refused although c is not waited for any more")
	}
}

// A graph is searched in linear time: a ladder of 60 steps has 2^60 ways down.
func TestGraph_ManyWays(t *testing.T) {
	t.Parallel()
	steps := make([][2]*Load, 60)
	for i := range steps {
		steps[i] = [2]*Load{aLoad(), aLoad()}
		inLoader(steps[i][0], steps[i][1])
	}
	for i := range steps[1:] {
		for above := range 2 {
			for below := range 2 {
				if !steps[i][above].waitFor(itsFill(steps[i+1][below])) {
					t.Fatal("a ladder is refused")
				}
			}
		}
	}
	top, stranger := aLoad(), aLoad()
	inLoader(top, stranger)
	if !top.waitFor(itsFill(steps[0][0])) || !stranger.waitFor(itsFill(steps[0][0])) {
		t.Error("a load without waiters is refused")
	}
	if steps[59][1].waitFor(itsFill(top)) {
		t.Error("a circle through the ladder is allowed")
	}
}

// A load has exactly the fills that it has taken, that no other load has taken since, and that have not ended.
func TestLoad_Fills(t *testing.T) {
	loads := []*Load{newLoad(nil, nil), newLoad(nil, nil)}
	of, fills := make(map[*member]*Load), make([]*member, 6)
	for i := range fills {
		fills[i] = new(member)
		loads[0].take(fills[i])
		of[fills[i]] = loads[0]
	}
	for range 1000 {
		f, l := fills[rand.IntN(len(fills))], loads[rand.IntN(len(loads))]
		if rand.IntN(2) == 0 {
			l.take(f)
			of[f] = l
		} else {
			f.finish()
			delete(of, f)
		}
		for _, f := range fills {
			if in := of[f]; f.open() != (in != nil) || in != nil && in != f.load {
				t.Fatalf("open: %v, want %v, of its load", f.open(), in != nil)
			}
			for _, l := range loads {
				if slices.Contains(l.fills, f) != (of[f] == l) {
					t.Fatalf("a load has %v, want of it: %v", l.fills, of[f] == l)
				}
			}
		}
	}
}

package flight

import (
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

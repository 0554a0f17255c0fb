package flight

import (
	"context"
	"testing"
)

func TestACircleOfWaitsIsRefused(t *testing.T) {
	t.Parallel()
	var a, b, c Load
	if a.waitFor(&a) {
		t.Error("a load may wait for itself")
	}
	if !a.waitFor(&b) || !b.waitFor(&c) {
		t.Fatal("a chain is refused")
	}
	if c.waitFor(&a) || c.waitFor(&b) || b.waitFor(&a) {
		t.Error("a circle is allowed")
	}
	if !a.waitFor(&c) {
		t.Error("two ways to one load are refused")
	}
	b.leave(&c)
	if c.waitFor(&a) {
		t.Error("a circle is allowed by the way that is left")
	}
	a.leave(&c)
	if !c.waitFor(&a) {
		t.Error("refused although nobody waits for c any more")
	}
}

func TestAWaitCountsOnceForEachCall(t *testing.T) {
	t.Parallel()
	var a, b Load
	for range 2 { // goroutines of one load
		if !a.waitFor(&b) {
			t.Fatal("waiting is refused")
		}
	}
	a.leave(&b)
	if b.waitFor(&a) {
		t.Error("a circle is allowed while one of two calls still waits")
	}
	a.leave(&b)
	if len(a.waits) != 0 {
		t.Errorf("waits %v, want none", a.waits)
	}
	if !b.waitFor(&a) {
		t.Error("refused although nobody waits")
	}
}

// TestManyWaysToOneLoadAreJudgedOnce: a ladder of 60 steps has 2^60 ways down.
func TestManyWaysToOneLoadAreJudgedOnce(t *testing.T) {
	t.Parallel()
	steps := make([][2]Load, 60)
	for i := range steps[1:] {
		for above := range 2 {
			for below := range 2 {
				if !steps[i][above].waitFor(&steps[i+1][below]) {
					t.Fatal("a ladder is refused")
				}
			}
		}
	}
	var top, stranger Load
	if !top.waitFor(&steps[0][0]) || !stranger.waitFor(&steps[0][0]) {
		t.Error("a load that nobody waits for is refused")
	}
	if steps[59][1].waitFor(&top) {
		t.Error("a circle through the ladder is allowed")
	}
}

func TestNoLoadWaitsForNothing(t *testing.T) {
	t.Parallel()
	var none *Load
	var a Load
	if !none.waitFor(&a) {
		t.Error("a call from outside of every load is refused")
	}
	none.leave(&a)
	if none.inside(nil) || none.inside(&a) {
		t.Error("no load is inside something")
	}
}

func TestALoadIsKnownByItsContext(t *testing.T) {
	t.Parallel()
	type key struct{}
	if l := LoadOf(t.Context()); l != nil {
		t.Errorf("%v without a load", l)
	}
	var outer, inner Load
	ctx := outer.Inside(context.WithValue(t.Context(), key{}, "kept"))
	within := inner.Inside(ctx)
	if LoadOf(ctx) != &outer || LoadOf(within) != &inner || LoadOf(context.WithoutCancel(within)) != &inner {
		t.Error("the context does not name the innermost load")
	}
	if within.Value(key{}) != "kept" {
		t.Error("the context has lost its values")
	}
}

func TestBoardRefusesACircleAndTakesNoSeat(t *testing.T) {
	t.Parallel()
	g, h := NewGroup[string](), NewGroup[string]()
	a, b := board(t, g, "a", nil, nil), board(t, h, "b", nil, nil)
	g.BeginFill(a.Flight, true)
	h.BeginFill(b.Flight, true)
	if _, err := g.Board("a", nil, &a.Load); err != ErrRecursive {
		t.Errorf("a load boards its own flight: %v", err)
	}
	waits := board(t, h, "b", nil, &a.Load)
	if _, err := g.Board("a", nil, &b.Load); err != ErrRecursive {
		t.Errorf("two loads board each other's flights: %v", err)
	}
	if a.callers != 1 || len(b.Load.waits) != 0 {
		t.Errorf("%d callers, waits %v: a refused one counts", a.callers, b.Load.waits)
	}
	land(h, b.Flight, "v", Always)
	wantResult(t, h, waits, &a.Load, "v", false, true)
	if len(a.Load.waits) != 0 {
		t.Errorf("waits %v after the end, want none", a.Load.waits)
	}
	land(g, a.Flight, "", Always)
}

package flight

import (
	"context"
	"testing"
)

// inLoader makes this goroutine run the Loaders of loads.
func inLoader(loads ...*Load) {
	for _, l := range loads {
		l.Begin()
	}
}

// elsewhere runs f in another goroutine.
func elsewhere(f func() bool) bool {
	done := make(chan bool)
	go func() { done <- f() }()
	return <-done
}

// A call in the Loader's goroutine is refused if its wait could never end.
func TestGraph_CircleIsRefused(t *testing.T) {
	t.Parallel()
	var a, b, c Load
	inLoader(&a, &b, &c)
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
		t.Error("refused although c is not waited for any more")
	}
}

// A call in another goroutine is not refused, since the Loader need not wait for it.
func TestGraph_CallsInOtherGoroutines(t *testing.T) {
	t.Parallel()
	var a, b Load
	inLoader(&a, &b)
	if !elsewhere(func() bool { return a.waitFor(&b) }) || !b.waitFor(&a) {
		t.Error("a circle through a prefetch is refused")
	}
	b.leave(&a)
	if !a.waitFor(&b) {
		t.Fatal("the Loader may not wait for its own prefetch")
	}
	if b.waitFor(&a) {
		t.Error("a circle is allowed because one of two calls is a prefetch")
	}
	if !elsewhere(func() bool { return b.waitFor(&a) }) {
		t.Error("a prefetch is refused")
	}
	elsewhere(func() bool { b.leave(&a); return true })
	a.leave(&b)
	if !b.waitFor(&a) {
		t.Error("refused although only a prefetch is left")
	}
}

// Calls are counted: a load waits for another until its last call has left.
func TestGraph_Counts(t *testing.T) {
	t.Parallel()
	var a, b Load
	inLoader(&a, &b)
	for range 2 {
		if !a.waitFor(&b) {
			t.Fatal("waiting is refused")
		}
	}
	if a.waits[&b] != (calls{all: 2, blocking: 2}) || b.waiters[&a] != 2 {
		t.Errorf("waits %v, waiters %v, want two", a.waits, b.waiters)
	}
	a.leave(&b)
	if b.waitFor(&a) {
		t.Error("a circle is allowed while one of two calls still waits")
	}
	if len(b.waits) != 0 || len(a.waiters) != 0 {
		t.Error("a refused call counts")
	}
	a.leave(&b)
	if len(a.waits) != 0 || len(b.waiters) != 0 {
		t.Errorf("waits %v, waiters %v, want none", a.waits, b.waiters)
	}
	if !b.waitFor(&a) {
		t.Error("refused although no call waits")
	}
}

// A graph is searched in linear time: a ladder of 60 steps has 2^60 ways down.
func TestGraph_ManyWays(t *testing.T) {
	t.Parallel()
	steps := make([][2]Load, 60)
	for i := range steps {
		inLoader(&steps[i][0], &steps[i][1])
	}
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
	inLoader(&top, &stranger)
	if !top.waitFor(&steps[0][0]) || !stranger.waitFor(&steps[0][0]) {
		t.Error("a load without waiters is refused")
	}
	if steps[59][1].waitFor(&top) {
		t.Error("a circle through the ladder is allowed")
	}
}

// A call that comes from no load waits freely.
func TestGraph_NoLoad(t *testing.T) {
	t.Parallel()
	var none *Load
	var a Load
	if !none.waitFor(&a) {
		t.Error("a call from outside of all loads is refused")
	}
	none.leave(&a)
	if len(a.waiters) != 0 || none.inside(nil) || none.inside(&a) {
		t.Error("no load waits, or is inside something")
	}
}

// A context marks the innermost load, and keeps its values.
func TestGraph_Context(t *testing.T) {
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

// A load is inside a cache while it, or a load around it, is a running load of the cache.
func TestGraph_Inside(t *testing.T) {
	t.Parallel()
	one, two := new(int), new(int)
	outer := &Load{cache: one, fills: 1}
	inner := &Load{cache: two, outer: outer, fills: 1}
	if !inner.inside(one) || !inner.inside(two) || !outer.inside(one) || outer.inside(two) {
		t.Error("want inner inside both caches, outer inside its own")
	}
	outer.finish()
	if inner.inside(one) || !inner.inside(two) {
		t.Error("a load that is over counts")
	}
}

// The numbers of goroutines are read whole, also where an int has 32 bits.
func TestGraph_GoroutineNumber(t *testing.T) {
	for text, want := range map[string]uint64{
		"goroutine 42 [running]:\nmain.main()": 42,
		"goroutine 5000000001 [running]:\nmai": 5000000001,
		"goroutine 18446744073709551615 [runn": 1<<64 - 1,
	} {
		if got := goroutineNumber([]byte(text)); got != want {
			t.Errorf("the number in %q is read as %d, want %d", text, got, want)
		}
	}
}

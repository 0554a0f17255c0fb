package flight

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// A refresh is a fill that callers may join; a key has one at most, and none while it has another
// fill.
func TestFills_Refresh(t *testing.T) {
	t.Parallel()
	g := newFills()
	begun := make(chan *Fill[string], 10)
	run := func(f *Fill[string], over func()) { begun <- f; over() }
	g.Refresh("k", "e1", nil, run)
	g.Refresh("k", "e1", nil, run)
	g.Refresh("k", "e2", nil, run)
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
	g.Refresh("k", "e1", nil, run)
	g.Drain()
	if len(begun) > 0 {
		t.Error("a refresh begins although the key has a fill")
	}
}

// An entry whose refresh has ended is not refreshed again for a while; other entries of the key
// are, and callers are served.
func TestFills_Rest(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		g := newFills()
		refreshes := 0
		refresh := func(entry string) (begun bool) {
			before := refreshes
			g.Refresh("k", entry, nil, func(f *Fill[string], over func()) {
				refreshes++
				g.End(f, nil, 0, time.Second)
				over()
			})
			g.Drain()
			return refreshes > before
		}
		if !refresh("e1") || refresh("e1") {
			t.Error("want one refresh of the entry")
		}
		time.Sleep(time.Second - 1)
		if refresh("e1") {
			t.Error("the entry does not rest for a second")
		}
		if !refresh("e2") || refresh("e2") {
			t.Error("want one refresh of another entry")
		}
		time.Sleep(2 * time.Nanosecond)
		if refresh("e2") {
			t.Error("the end of an earlier rest ends that of another entry")
		}
		w := mustJoin(t, g, "k", &Caller{})
		g.End(w.Fill, nil, 0, 0)
		time.Sleep(time.Second)
		if !refresh("e2") {
			t.Error("the entry rests for longer than a second")
		}
		time.Sleep(time.Second + 1)
		g.mu.Lock()
		defer g.mu.Unlock()
		if len(g.resting) != 0 {
			t.Errorf("%d entries are remembered", len(g.resting))
		}
	})
}

// A refresh that ends because no caller wants it rests from the moment at which another may begin.
func TestFills_RestOfDeserted(t *testing.T) {
	t.Parallel()
	for range 100 {
		g := newFills()
		var refreshes atomic.Int64
		var readers sync.WaitGroup
		for range 8 {
			readers.Go(func() {
				for range 100 {
					g.Refresh("k", "e", nil, func(f *Fill[string], over func()) {
						defer over()
						refreshes.Add(1)
						g.EndIfDeserted(f, time.Hour)
					})
				}
			})
		}
		readers.Wait()
		g.Drain()
		if n := refreshes.Load(); n != 1 {
			t.Fatalf("%d refreshes of one entry, want 1", n)
		}
	}
}

// After Close callers only join existing fills; only calls from inside a running load start new
// ones.
func TestFills_Close(t *testing.T) {
	t.Parallel()
	g, other := newFills(), newFills()
	a := mustJoin(t, g, "k", &Caller{})
	g.Close()
	ran := false
	g.Go(func() { ran = true })
	g.Refresh("r", "e", nil, func(f *Fill[string], over func()) { ran = true; over() })
	if _, err := g.Join("l", &Caller{}, byHand); err != ErrClosed {
		t.Errorf("Join after Close: %v, want ErrClosed", err)
	}
	mustJoin(t, g, "k", &Caller{})
	nested := mustJoin(t, other, "n", &Caller{Outer: a.Load})
	if !g.Inside(a.Load) || !g.Inside(nested.Load) || g.Inside(nil) || other.Inside(a.Load) {
		t.Error("want calls from inside the load, and from a load inside it, inside")
	}
	inner := mustJoin(t, g, "l", &Caller{Outer: nested.Load})
	if !inner.First {
		t.Error("a call from inside a load starts no fill")
	}
	endWith(g, a.Fill, "v", Always)
	if g.Inside(a.Load) || g.Inside(nested.Load) {
		t.Error("a load that is over counts")
	}
	if _, err := g.Join("m", &Caller{Outer: nested.Load}, byHand); err != ErrClosed {
		t.Errorf("Join from inside a load that is over: %v, want ErrClosed", err)
	}
	g.Drain()
	if ran {
		t.Error("something has begun after Close")
	}
}

// Drain waits for fills and for the functions of Behind, Go and Later, except those stopped.
func TestFills_Drain(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		g := newFills()
		begun := time.Now()
		later := false
		if _, err := g.Join("k", &Caller{}, func(f *Fill[string], over func()) {
			time.Sleep(time.Second)
			g.Behind(func() { time.Sleep(time.Second) })
			stop := g.Later(time.Hour, func() { t.Error("what is stopped runs") })
			g.Later(3*time.Second, func() { later = true })
			stop()
			g.End(f, nil, 0, 0)
			over()
		}); err != nil {
			t.Fatal(err)
		}
		g.Go(func() { time.Sleep(3 * time.Second) })
		g.Drain()
		if d := time.Since(begun); d != 4*time.Second || !later {
			t.Errorf("Drain returns after %v, want 4s; the last function has run: %t", d, later)
		}
	})
}

// Join refuses a circle of blocking calls, and does not count the refused call.
func TestFills_Recursive(t *testing.T) {
	t.Parallel()
	g, h := newFills(), newFills()
	a, b := mustJoin(t, g, "a", &Caller{}), mustJoin(t, h, "b", &Caller{})
	inLoader(a.Load, b.Load)
	if _, err := g.Join("a", &Caller{Outer: a.Load}, byHand); err != ErrRecursive {
		t.Errorf("a load joins its own fill: %v", err)
	}
	waits := mustJoin(t, h, "b", &Caller{Outer: a.Load})
	if _, err := g.Join("a", &Caller{Outer: b.Load}, byHand); err != ErrRecursive {
		t.Errorf("two loads join each other's fills: %v", err)
	}
	if a.callers.all != 1 || len(b.Load.waits) != 0 {
		t.Errorf("%d callers, waits %v: a refused call counts", a.callers.all, b.Load.waits)
	}
	endWith(h, b.Fill, "v", Always)
	wantWait(t, h, waits, "v", Owned)
	if len(a.Load.waits) != 0 || len(b.Load.waiters) != 0 {
		t.Errorf("waits %v, waiters %v after the end, want none", a.Load.waits, b.Load.waiters)
	}
}

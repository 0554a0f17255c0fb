package flight

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
)

func newFills() *Fills[string] { return NewFills[string](new(Clock)) }

// byHand is the run function of a fill that the test itself ends.
func byHand(_ *Fill[string], over func()) { over() }

func mustJoin(t *testing.T, g *Fills[string], key string, call *Caller) Waiter[string] {
	t.Helper()
	w, err := g.Join(key, call, byHand)
	if err != nil {
		t.Fatalf("Join(%q): %v", key, err)
	}
	return w
}

func endWith(g *Fills[string], f *Fill[string], value string, validFrom Stamp) {
	g.End(f, &value, validFrom, 0)
}

// wantWait checks what Wait returns for a fill that has ended, or is void for the caller.
func wantWait(t *testing.T, g *Fills[string], w Waiter[string], want string, verdict Verdict) {
	t.Helper()
	r, got := g.Wait(t.Context(), w)
	value := ""
	if r != nil {
		value = *r
	}
	if got != verdict || value != want {
		t.Errorf("got %q, verdict %d; want %q, %d", value, got, want, verdict)
	}
}

// A key has one fill at a time.
func TestFills_OnePerKey(t *testing.T) {
	t.Parallel()
	g := newFills()
	a, b, other := mustJoin(t, g, "k", &Caller{}), mustJoin(t, g, "k", &Caller{}), mustJoin(t, g, "l", &Caller{})
	if a.Fill != b.Fill || a.Fill == other.Fill || !a.First || b.First || !other.First || a.Key != "k" {
		t.Error("want one fill for two callers of k, and another one for l")
	}
	endWith(g, a.Fill, "v", Always)
	if c := mustJoin(t, g, "k", &Caller{}); !c.First || c.Fill == a.Fill {
		t.Error("a caller joins a fill that has ended")
	}
}

// The caller that starts a fill may take all that the fill finds out, however soon the fill runs.
func TestFills_FirstCallerIsEarly(t *testing.T) {
	t.Parallel()
	g := newFills()
	for range 10_000 {
		stamps := make(chan Stamp, 1)
		w, err := g.Join("k", &Caller{}, func(_ *Fill[string], over func()) {
			stamps <- g.clock.Now()
			over()
		})
		redistest.Must(t, err)
		if s := <-stamps; !w.Before(s) {
			t.Fatalf("the caller has stamp %d, its fill asks with stamp %d", w.Stamp, s)
		}
		g.End(w.Fill, nil, Always, 0)
	}
}

// A caller takes a result only if it joined before the stamp from which the result is valid.
func TestFills_StampsDecide(t *testing.T) {
	t.Parallel()
	const last = 7
	for validFrom := range last + 2 {
		g := newFills()
		var callers []Waiter[string]
		join := func() { callers = append(callers, mustJoin(t, g, "k", &Caller{})) }
		join()        // 1
		g.clock.Now() // 2
		join()        // 3
		if s := g.BeginLoad(callers[0].Fill, func() { t.Error("cancelled") }); s != 4 {
			t.Fatalf("the load begins at stamp %d, want 4", s)
		}
		join()        // 5
		g.clock.Now() // 6
		join()        // 7
		from := Stamp(validFrom)
		if validFrom > last {
			from = Always
		}
		endWith(g, callers[0].Fill, "v", from)
		taken := false
		for i, w := range callers {
			switch {
			case Stamp(2*i+1) != w.Stamp:
				t.Errorf("caller %d has the stamp %d", i, w.Stamp)
			case w.Stamp >= from:
				wantWait(t, g, w, "v", Outdated)
			case taken:
				wantWait(t, g, w, "v", Shared)
			default:
				wantWait(t, g, w, "v", Owned)
				taken = true
			}
		}
	}
}

// A caller keeps the stamp of its first join, and so may take the result of a fill that began after
// it.
func TestFills_CallerKeepsItsStamp(t *testing.T) {
	t.Parallel()
	g := newFills()
	a := mustJoin(t, g, "k", &Caller{})
	began := g.BeginLoad(a.Fill, func() {})
	call := &Caller{}
	late := mustJoin(t, g, "k", call)
	endWith(g, a.Fill, "old", began)
	wantWait(t, g, late, "old", Outdated)
	other := mustJoin(t, g, "k", &Caller{})
	began = g.BeginLoad(other.Fill, func() {})
	again := mustJoin(t, g, "k", call)
	if again.Stamp != late.Stamp || again.late {
		t.Error("a caller that joins again counts as one that came after the load began")
	}
	endWith(g, other.Fill, "new", began)
	wantWait(t, g, again, "new", Owned)
	wantWait(t, g, other, "new", Shared)
}

// Only the first End counts.
func TestFills_FirstEndCounts(t *testing.T) {
	t.Parallel()
	g := newFills()
	a := mustJoin(t, g, "k", &Caller{})
	endWith(g, a.Fill, "v", Always)
	newer := mustJoin(t, g, "k", &Caller{})
	g.End(a.Fill, nil, 0, 0)
	wantWait(t, g, a, "v", Owned)
	if g.byKey["k"] != newer.Fill {
		t.Error("the second End has taken another fill out of the map")
	}
}

// A fill that ends without a result makes its callers join another fill.
func TestFills_EndWithoutResult(t *testing.T) {
	t.Parallel()
	g := newFills()
	a := mustJoin(t, g, "k", &Caller{})
	g.End(a.Fill, nil, 0, 0)
	wantWait(t, g, a, "", Outdated)
}

// Callers that joined after a superseded load began leave it at once; earlier ones get its result, also if it
// is valid for all.
func TestFills_SupersededLoad(t *testing.T) {
	t.Parallel()
	for how, supersede := range map[string]func(g *Fills[string], f *Fill[string]){
		"Supersede": func(g *Fills[string], f *Fill[string]) { g.Supersede("other"); g.Supersede("k"); g.Supersede("k") },
		"LockLost":  func(g *Fills[string], f *Fill[string]) { g.LockLost(f); g.LockLost(f) },
	} {
		runInBubble(t, how, func(t *testing.T) {
			g := newFills()
			early := mustJoin(t, g, "k", &Caller{})
			g.BeginLoad(early.Fill, func() { t.Error("the load is cancelled although a caller may have its result") })
			call := &Caller{}
			late, sleeper := mustJoin(t, g, "k", call), mustJoin(t, g, "k", &Caller{})

			var earlyDone, lateDone sync.WaitGroup
			earlyDone.Go(func() { wantWait(t, g, early, "v1", Owned) })
			lateDone.Go(func() { wantWait(t, g, late, "", Outdated) })
			synctest.Wait()
			supersede(g, early.Fill)
			lateDone.Wait() // the load goes on
			newcomer, again := mustJoin(t, g, "k", &Caller{}), mustJoin(t, g, "k", call)
			if !newcomer.First || again.Fill != newcomer.Fill {
				t.Error("want a new fill for a newcomer and the callers that have left")
			}
			endWith(g, early.Fill, "v1", Always)
			earlyDone.Wait()
			wantWait(t, g, sleeper, "", Outdated)
			if g.byKey["k"] != newcomer.Fill {
				t.Error("the end of the superseded load has taken the new fill out of the map")
			}
			endWith(g, newcomer.Fill, "v2", Always)
			wantWait(t, g, again, "v2", Owned)
		})
	}
}

// A load is cancelled once it is superseded and has no early callers, and not before.
func TestFills_VoidLoadIsCancelled(t *testing.T) {
	t.Parallel()
	gone, leave := context.WithCancel(t.Context())
	leave()
	for name, test := range map[string]struct {
		do        func(g *Fills[string], early, late Waiter[string])
		cancelled bool
	}{
		"nothing":         {func(g *Fills[string], early, late Waiter[string]) {}, false},
		"callers leave":   {func(g *Fills[string], early, late Waiter[string]) { g.Wait(gone, early); g.Wait(gone, late) }, false},
		"superseded":      {func(g *Fills[string], early, late Waiter[string]) { g.Supersede("k") }, false},
		"late one leaves": {func(g *Fills[string], early, late Waiter[string]) { g.Supersede("k"); g.Wait(gone, late) }, false},
		"left, then superseded": {func(g *Fills[string], early, late Waiter[string]) {
			g.Wait(gone, early)
			g.Supersede("k")
		}, true},
		"superseded, then left": {func(g *Fills[string], early, late Waiter[string]) {
			g.Supersede("k")
			g.Wait(gone, early)
		}, true},
		"the lock lost": {func(g *Fills[string], early, late Waiter[string]) {
			g.LockLost(early.Fill)
			g.Wait(gone, early)
		}, true},
		"over": {func(g *Fills[string], early, late Waiter[string]) {
			g.Supersede("k")
			endWith(g, early.Fill, "v", Always)
			g.Wait(gone, early)
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			g := newFills()
			early := mustJoin(t, g, "k", &Caller{})
			cancelled := false
			g.BeginLoad(early.Fill, func() { cancelled = true })
			late := mustJoin(t, g, "k", &Caller{})
			test.do(g, early, late)
			if cancelled != test.cancelled {
				t.Errorf("the load is cancelled: %t, want %t", cancelled, test.cancelled)
			}
		})
	}
}

// A fill that is not loading is woken by Supersede, and keeps its callers.
func TestFills_SupersededBeforeTheLoad(t *testing.T) {
	t.Parallel()
	g := newFills()
	a := mustJoin(t, g, "k", &Caller{})
	g.Supersede("k")
	if len(a.Wake) != 1 {
		t.Error("the fill is not woken")
	}
	if b := mustJoin(t, g, "k", &Caller{}); b.Fill != a.Fill {
		t.Error("a caller does not join a fill that has not begun to load")
	}
	endWith(g, a.Fill, "v", Always)
	wantWait(t, g, a, "v", Owned)
}

// A fill is woken when a caller joins and when the last one leaves.
func TestFills_Wake(t *testing.T) {
	t.Parallel()
	g := newFills()
	gone, leave := context.WithCancel(t.Context())
	leave()
	woken := func(what string, w Waiter[string], want int) {
		t.Helper()
		if len(w.Wake) != want {
			t.Errorf("after %s %d values wake the fill, want %d", what, len(w.Wake), want)
		}
		for len(w.Wake) > 0 {
			<-w.Wake
		}
	}
	a := mustJoin(t, g, "k", &Caller{})
	woken("the first join", a, 0)
	b := mustJoin(t, g, "k", &Caller{})
	mustJoin(t, g, "k", &Caller{})
	woken("joins", a, 1)
	c := b
	g.Wait(gone, a)
	g.Wait(gone, b)
	woken("two of three have left", a, 0)
	if !g.Wanted(a.Fill) {
		t.Error("the fill is not wanted")
	}
	g.Wait(gone, c)
	woken("the last one has left", a, 1)
	if g.Wanted(a.Fill) {
		t.Error("the fill is wanted")
	}
}

// Whatever wakes a fill that queues continues it once, also if it came just before.
func TestFills_Queue(t *testing.T) {
	t.Parallel()
	gone, leave := context.WithCancel(t.Context())
	leave()
	for name, wake := range map[string]func(g *Fills[string], w Waiter[string]){
		"a slot":          func(g *Fills[string], w Waiter[string]) { g.Wake(w.Fill) },
		"Supersede":       func(g *Fills[string], _ Waiter[string]) { g.Supersede("k") },
		"the last caller": func(g *Fills[string], w Waiter[string]) { g.Wait(gone, w) },
		"WakeAll":         func(g *Fills[string], _ Waiter[string]) { g.WakeAll() },
	} {
		for _, before := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/before %t", name, before), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					g := newFills()
					w := mustJoin(t, g, "k", &Caller{})
					runs := 0
					if before {
						wake(g, w)
					}
					g.Queue(w.Fill, time.Hour, func() { runs++ })
					if !before {
						if synctest.Wait(); runs != 0 {
							t.Error("the fill goes on although nothing has woken it")
						}
						wake(g, w)
					}
					if synctest.Wait(); runs != 1 {
						t.Errorf("the fill goes on %d times, want once", runs)
					}
					if time.Sleep(2 * time.Hour); runs != 1 {
						t.Error("the fill polls although it goes on")
					}
				})
			})
		}
	}
}

// A fill that queues goes on when it is time to poll. Until then it does not ask Redis, and callers that
// join do not wake it.
func TestFills_QueuePolls(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := newFills()
		f := mustJoin(t, g, "k", &Caller{Empty: true}).Fill
		for range 3 {
			runs := 0
			g.Queue(f, time.Second, func() { runs++ })
			mustJoin(t, g, "k", &Caller{})
			if time.Sleep(time.Second - 1); runs != 0 || g.Filling("k") {
				t.Errorf("before it is time the fill goes on %d times; it asks Redis: %t", runs, g.Filling("k"))
			}
			time.Sleep(2 * time.Nanosecond)
			if synctest.Wait(); runs != 1 || !g.Filling("k") {
				t.Errorf("the fill goes on %d times; it asks Redis: %t", runs, g.Filling("k"))
			}
		}
	})
}

// A caller leaves at the end of its context; the fill goes on.
func TestFills_CallerLeaves(t *testing.T) {
	t.Parallel()
	g := newFills()
	a, b := mustJoin(t, g, "k", &Caller{}), mustJoin(t, g, "k", &Caller{})
	gone, leave := context.WithCancel(t.Context())
	leave()
	if r, verdict := g.Wait(gone, a); r != nil || verdict != Left {
		t.Errorf("got %v, verdict %d, want Left", r, verdict)
	}
	endWith(g, a.Fill, "v", Always)
	wantWait(t, g, b, "v", Owned)
}

// A fill that ends for want of callers loses no caller that joins at the same time.
func TestFills_EndIfDesertedAgainstJoin(t *testing.T) {
	t.Parallel()
	g := newFills()
	var fills atomic.Int64
	work := func(f *Fill[string], over func()) {
		defer over()
		fills.Add(1)
		for range 10 {
			if g.EndIfDeserted(f, 0) {
				return
			}
		}
		endWith(g, f, "v", Always)
	}
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			for n := range 200 {
				call := &Caller{}
				for {
					w, err := g.Join("k", call, work)
					if err != nil {
						t.Errorf("Join: %v", err)
						return
					}
					ctx, cancel := context.WithCancel(context.Background())
					if (i+n)%3 == 0 {
						cancel()
					}
					r, verdict := g.Wait(ctx, w)
					cancel()
					if verdict == Left || r != nil {
						break
					}
				}
			}
		})
	}
	wg.Wait()
	g.Drain()
	if len(g.byKey) != 0 {
		t.Errorf("%d fills are left", len(g.byKey))
	}
}

// EndIfDeserted ends a fill without callers, and no other fill.
func TestFills_EndIfDeserted(t *testing.T) {
	t.Parallel()
	g := newFills()
	a := mustJoin(t, g, "k", &Caller{})
	if g.EndIfDeserted(a.Fill, 0) {
		t.Error("a fill with a caller is ended")
	}
	gone, leave := context.WithCancel(t.Context())
	leave()
	g.Wait(gone, a)
	for range 2 { // the second call reports the same
		if !g.EndIfDeserted(a.Fill, 0) {
			t.Error("a fill without callers is not ended")
		}
	}
	if b := mustJoin(t, g, "k", &Caller{}); !b.First {
		t.Error("a caller joins a fill that has ended")
	}
}

// Filling reports fills that found their key empty, while callers can join them.
func TestFills_Filling(t *testing.T) {
	t.Parallel()
	g := newFills()
	want := func(when string, k, l bool) {
		t.Helper()
		if g.Filling("k") != k || g.Filling("l") != l {
			t.Errorf("%s: filling %t and %t, want %t and %t", when, g.Filling("k"), g.Filling("l"), k, l)
		}
	}
	want("at first", false, false)
	a := mustJoin(t, g, "k", &Caller{Empty: true})
	b := mustJoin(t, g, "l", &Caller{})
	want("one found its key empty", true, false)
	g.BeginLoad(a.Fill, func() {})
	want("during the load", true, false)
	g.Supersede("k")
	want("superseded", false, false)
	endWith(g, a.Fill, "v", Always)
	endWith(g, b.Fill, "v", Always)
	c := mustJoin(t, g, "k", &Caller{Empty: true})
	endWith(g, c.Fill, "v", Always)
	want("over", false, false)
	if n := g.empty.Load(); n != 0 {
		t.Errorf("%d fills of empty keys are counted, want 0", n)
	}
}

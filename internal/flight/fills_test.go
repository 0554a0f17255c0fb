package flight

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func newFills() *Fills[string] { return NewFills[string](new(Clock)) }

// byHand is the run function of a fill that the test itself ends.
func byHand(_ *Fill[string], _ *Load, over func()) { over() }

// join has a call join the fill of key. Its first join gives it a stamp.
func join(g *Fills[string], key string, call *Caller, run func(f *Fill[string], l *Load, over func())) *Waiter[string] {
	if call.Stamp == 0 {
		call.Stamp = g.clock.Now()
	}
	w := &Waiter[string]{Key: key}
	g.Join(call, []*Waiter[string]{w}, starts(g, run))
	return w
}

// starts is the start of Join and Refresh for one key.
func starts(g *Fills[string], run func(f *Fill[string], l *Load, over func())) func(of []int, fills []*Fill[string]) func(l *Load) {
	return func(_ []int, fills []*Fill[string]) func(l *Load) {
		return func(l *Load) { run(fills[0], l, g.Over) }
	}
}

func mustJoin(t *testing.T, g *Fills[string], key string, call *Caller) *Waiter[string] {
	t.Helper()
	w := join(g, key, call, byHand)
	if w.Err != nil {
		t.Fatalf("Join(%q): %v", key, w.Err)
	}
	return w
}

func wait(ctx context.Context, g *Fills[string], w *Waiter[string]) {
	g.Wait(ctx, w.caller, []*Waiter[string]{w})
}

func endWith(g *Fills[string], f *Fill[string], value string, validFrom Stamp) {
	g.End(f, &value, validFrom, 0)
}

// wantWait checks what Wait returns for a fill that has ended, or is void for the caller.
func wantWait(t *testing.T, g *Fills[string], w *Waiter[string], want string, verdict Verdict) {
	t.Helper()
	wait(t.Context(), g, w)
	value := ""
	if w.Result != nil {
		value = *w.Result
	}
	if w.Verdict != verdict || value != want {
		t.Errorf("got %q, verdict %d; want %q, %d", value, w.Verdict, want, verdict)
	}
}

// A caller takes a result only if it joined before the stamp from which the result is valid.
func TestFills_StampsDecide(t *testing.T) {
	t.Parallel()
	const last = 7
	for validFrom := range last + 2 {
		g := newFills()
		var callers []*Waiter[string]
		arrive := func() { callers = append(callers, mustJoin(t, g, "k", &Caller{})) }
		arrive()      // 1
		g.clock.Now() // 2
		arrive()      // 3
		if s := g.BeginLoad(callers[0].Fill, func() { t.Error("cancelled") }); s != 4 {
			t.Fatalf("the load begins at stamp %d, want 4", s)
		}
		arrive()      // 5
		g.clock.Now() // 6
		arrive()      // 7
		from := Stamp(validFrom)
		if validFrom > last {
			from = Always
		}
		endWith(g, callers[0].Fill, "v", from)
		for i, w := range callers {
			switch {
			case Stamp(2*i+1) != w.caller.Stamp:
				t.Errorf("caller %d has the stamp %d", i, w.caller.Stamp)
			case w.caller.Stamp >= from:
				wantWait(t, g, w, "v", Outdated)
			case w.First:
				wantWait(t, g, w, "v", Owned)
			default:
				wantWait(t, g, w, "v", Shared)
			}
		}
	}
}

// Callers that joined after a superseded load began leave it at once; earlier ones get its result, also if it
// is valid for all.
func TestFills_SupersededLoad(t *testing.T) {
	t.Parallel()
	for how, supersede := range map[string]func(g *Fills[string], f *Fill[string]){
		"Supersede": func(g *Fills[string], f *Fill[string]) {
			g.Supersede("other", false)
			g.Supersede("k", false)
			g.Supersede("k", false)
		},
		"LockLost": func(g *Fills[string], f *Fill[string]) { g.LockLost(f); g.LockLost(f) },
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
			wantWait(t, g, again, "v2", Shared)
		})
	}
}

// A call learns at once of a key for which it has to ask again, whatever its other keys wait for, and waits for these
// later.
func TestFills_OneOfSeveralKeys(t *testing.T) {
	t.Parallel()
	for how, row := range map[string]struct {
		end     func(g *Fills[string], f *Fill[string])
		verdict Verdict
	}{
		"superseded":   {func(g *Fills[string], _ *Fill[string]) { g.Supersede("k", false) }, Outdated},
		"too old":      {func(g *Fills[string], f *Fill[string]) { endWith(g, f, "v", 1) }, Outdated},
		"will not do":  {func(g *Fills[string], f *Fill[string]) { endWith(g, f, "bad", Always) }, Outdated},
		"no patience":  {func(*Fills[string], *Fill[string]) { time.Sleep(time.Minute) }, Impatient},
		"has a result": {func(g *Fills[string], f *Fill[string]) { endWith(g, f, "v", Always) }, Waiting},
	} {
		runInBubble(t, how, func(t *testing.T) {
			g := newFills()
			g.BeginLoad(mustJoin(t, g, "k", &Caller{}).Fill, func() {})
			mustJoin(t, g, "slow", &Caller{})
			outer := aLoad()
			call := &Caller{Outer: outer, Stamp: g.Now()}
			slow := &Waiter[string]{Key: "slow"}
			k := &Waiter[string]{Key: "k", Patience: time.Minute, Takes: func(r *string) bool { return *r != "bad" }}
			g.Join(call, []*Waiter[string]{slow, k}, nil)
			var waits sync.WaitGroup
			waits.Go(func() { g.Wait(t.Context(), call, []*Waiter[string]{slow, k}) })
			synctest.Wait()
			row.end(g, k.Fill)
			synctest.Wait()
			if k.Verdict != row.verdict || slow.Verdict != Waiting {
				t.Errorf("verdicts %d and %d, want %d and that the other waits", k.Verdict, slow.Verdict, row.verdict)
			}
			if row.verdict != Waiting {
				waits.Wait()
				if len(outer.waits) != 1 {
					t.Errorf("the call waits for %d fills, want one", len(outer.waits))
				}
				waits.Go(func() { g.Wait(t.Context(), call, []*Waiter[string]{slow}) })
			}
			endWith(g, slow.Fill, "v", Always)
			waits.Wait()
			if slow.Verdict != Shared || len(outer.waits) != 0 || call.open != 0 {
				t.Errorf("verdict %d, %d waits, %d open; want the result, and none", slow.Verdict, len(outer.waits), call.open)
			}
		})
	}
}

// Whatever wakes a fill that queues continues it once, also if it came just before.
func TestFills_Queue(t *testing.T) {
	t.Parallel()
	gone, leave := context.WithCancel(t.Context())
	leave()
	for name, wake := range map[string]func(g *Fills[string], w *Waiter[string]){
		"a slot":          func(g *Fills[string], w *Waiter[string]) { g.Wake(w.Fill.load) },
		"Set":             func(g *Fills[string], _ *Waiter[string]) { g.Supersede("k", true) },
		"the last caller": func(g *Fills[string], w *Waiter[string]) { wait(gone, g, w) },
		"WakeAll":         func(g *Fills[string], _ *Waiter[string]) { g.WakeAll() },
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
					g.Queue(w.Fill.load, time.Hour, func(*Load) { runs++ })
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

// A fill that ends for want of callers loses no caller that joins at the same time.
func TestFills_EndIfDesertedAgainstJoin(t *testing.T) {
	t.Parallel()
	g := newFills()
	var fills atomic.Int64
	work := func(f *Fill[string], _ *Load, over func()) {
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
					w := join(g, "k", call, work)
					if w.Err != nil {
						t.Errorf("Join: %v", w.Err)
						return
					}
					ctx, cancel := context.WithCancel(context.Background())
					if (i+n)%3 == 0 {
						cancel()
					}
					wait(ctx, g, w)
					cancel()
					if w.Verdict == Left || w.Result != nil {
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
	wantWait(t, g, w, "v", Shared)
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

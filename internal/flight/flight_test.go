package flight

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"weak"

	"github.com/singlefill/singlefill/internal/redistest"
)

// board takes a seat that must be free.
func board(t *testing.T, g *Group[string], key string, prev *Flight[string], outer *Load) Seat[string] {
	t.Helper()
	s, err := g.Board(key, prev, outer)
	if err != nil {
		t.Fatalf("Board(%q): %v", key, err)
	}
	return s
}

// land ends a flight as its own goroutine would.
func land(g *Group[string], f *Flight[string], r string, asOf int) {
	g.End(f, r, asOf)
	g.Running.Done()
}

func wantFirst(t *testing.T, s Seat[string], first bool) {
	t.Helper()
	if s.First != first {
		t.Errorf("First is %t, want %t", s.First, first)
	}
}

// wait is Wait with the result itself.
func wait[R any](ctx context.Context, g *Group[R], s Seat[R], outer *Load) (r R, hold Hold, ok bool, err error) {
	p, hold, ok, err := g.Wait(ctx, s, outer)
	if ok {
		r = *p
	}
	return r, hold, ok, err
}

// wantResult waits in a seat of a flight that has ended, or is over for this seat.
func wantResult(t *testing.T, g *Group[string], s Seat[string], outer *Load, want string, wantShared, wantOK bool) {
	t.Helper()
	r, hold, ok, err := wait(t.Context(), g, s, outer)
	shared := hold == Shared
	if r != want || shared != wantShared || ok != wantOK || err != nil {
		t.Errorf("got %q, shared %t, ok %t, %v; want %q, %t, %t", r, shared, ok, err, want, wantShared, wantOK)
	}
}

func TestOneFlightForAKeyAtATime(t *testing.T) {
	t.Parallel()
	g := NewGroup[string]()
	a := board(t, g, "k", nil, nil)
	wantFirst(t, a, true)
	g.BeginFill(a.Flight, true)
	b := board(t, g, "k", nil, nil)
	wantFirst(t, b, false)
	if a.Flight != b.Flight || a.Key != "k" {
		t.Error("two callers of a key are in two flights")
	}
	other := board(t, g, "l", nil, nil)
	wantFirst(t, other, true)
	land(g, other.Flight, "", 1)
	land(g, a.Flight, "v", Always)
	c := board(t, g, "k", nil, nil)
	wantFirst(t, c, true)
	if c.Flight == a.Flight {
		t.Error("a flight that has ended is boarded")
	}
	land(g, c.Flight, "", 1)
	g.Running.Wait()
}

func TestOneOwnerAndManySharers(t *testing.T) {
	t.Parallel()
	g := NewGroup[string]()
	a := board(t, g, "k", nil, nil)
	g.BeginFill(a.Flight, true)
	b, c := board(t, g, "k", nil, nil), board(t, g, "k", nil, nil)
	land(g, a.Flight, "v", Always)
	wantResult(t, g, b, nil, "v", false, true)
	wantResult(t, g, a, nil, "v", true, true)
	wantResult(t, g, c, nil, "v", true, true)
}

// TestACommonResultIsNobodysOwn: not even of the first who takes it, while those who come round later may find one
// who owned it.
func TestACommonResultIsNobodysOwn(t *testing.T) {
	t.Parallel()
	for _, callers := range []int{1, 3} {
		g := NewGroup[string]()
		a := board(t, g, "k", nil, nil)
		late := board(t, g, "k", nil, nil)
		for range callers - 1 {
			board(t, g, "k", nil, nil)
		}
		land(g, a.Flight, "old", FirstTurn)
		late.Common = true
		runsAfter(g, late, "v")
		want := []Hold{Owned, Shared}
		if callers > 1 {
			want = []Hold{Common, Common}
		}
		for i, s := range []Seat[string]{late, board(t, g, "k", nil, nil)} {
			s.Flight, s.boarded = late.Flight, 0 // the second one goes round
			if i > 0 {
				s.callers++
			}
			if _, hold, ok, err := g.Wait(t.Context(), s, nil); hold != want[i] || !ok || err != nil {
				t.Errorf("%d callers: the %d. has hold %d, %t, %v; want %d", callers, i+1, hold, ok, err, want[i])
			}
		}
	}
}

// TestTheTurnDecidesWhoTakesTheResult goes through every turn at which a caller can come and every turn as of
// which a result can be true.
func TestTheTurnDecidesWhoTakesTheResult(t *testing.T) {
	t.Parallel()
	const turns = 5
	for asOf := range turns + 2 {
		g := NewGroup[string]()
		seats := []Seat[string]{board(t, g, "k", nil, nil)}
		f := seats[0].Flight
		g.BeginFill(f, true)
		for turn := FirstTurn; turn <= turns; turn++ {
			seats = append(seats, board(t, g, "k", nil, nil)) // during the turn
			next := turn + 1
			if turn == 3 {
				if got := g.BeginLoad(f); got != next {
					t.Errorf("the load begins at turn %d, want %d", got, next)
				}
			} else if got := g.Tick(f); got != next {
				t.Errorf("turn %d, want %d", got, next)
			}
		}
		land(g, f, "v", asOf)
		taken := false
		for came, s := range seats { // the first at 0, the others at 1 to 5
			takes := came < asOf
			want := ""
			if takes {
				want = "v"
			}
			wantResult(t, g, s, nil, want, takes && taken, takes)
			taken = taken || takes
		}
	}
}

func TestTheFirstEndOfAFlightCounts(t *testing.T) {
	t.Parallel()
	g := NewGroup[string]()
	a := board(t, g, "k", nil, nil)
	g.BeginFill(a.Flight, true)
	b := board(t, g, "k", nil, nil)
	land(g, a.Flight, "v", Always)
	newer := board(t, g, "k", nil, nil)
	g.End(a.Flight, "", 0)
	wantResult(t, g, b, nil, "v", false, true)
	if g.flights["k"] != newer.Flight {
		t.Error("the second End has taken another flight out of the map")
	}
	land(g, newer.Flight, "", 1)
}

// TestALoadBrokenOffIsNotTakenLate: not even a result that is true for everybody.
func TestALoadBrokenOffIsNotTakenLate(t *testing.T) {
	t.Parallel()
	g := NewGroup[string]()
	early := board(t, g, "k", nil, nil)
	g.BeginFill(early.Flight, true)
	g.BeginLoad(early.Flight)
	late := board(t, g, "k", nil, nil)
	g.Supersede("k")
	land(g, early.Flight, "v", Always)
	wantResult(t, g, late, nil, "", false, false)
	wantResult(t, g, early, nil, "v", false, true)
}

// runsAfter makes a flight that is after another one end as a read does, as soon as it may.
func runsAfter(g *Group[string], s Seat[string], r string) {
	g.RunAfter(s.Flight, func() { land(g, s.Flight, r, FirstTurn) })
}

func TestWhoComesDuringAReadSharesTheNextOne(t *testing.T) {
	t.Parallel()
	for _, said := range []string{"before", "after"} {
		t.Run(said, func(t *testing.T) {
			t.Parallel()
			g := NewGroup[string]()
			a := board(t, g, "k", nil, nil)
			late1, late2 := board(t, g, "k", nil, nil), board(t, g, "k", nil, nil)
			if !late1.First || !late1.After || late2.First || late1.Flight != late2.Flight {
				t.Fatalf("two who come during a read have the seats %+v and %+v", late1, late2)
			}
			if said == "before" {
				runsAfter(g, late1, "new")
			}
			if late1.ended {
				t.Fatal("the next read has begun before the end of the first")
			}
			land(g, a.Flight, "old", FirstTurn)
			if said == "after" {
				runsAfter(g, late1, "new")
			}
			wantResult(t, g, a, nil, "old", false, true)
			wantResult(t, g, late1, nil, "new", false, true)
			wantResult(t, g, late2, nil, "new", true, true)
			g.Running.Wait()
			if len(g.flights) > 0 {
				t.Errorf("%d flights are left", len(g.flights))
			}
		})
	}
}

// TestWhoComesDuringAReadThatMissesIsHandedOver: to the flight that goes on, as somebody who came before its next turn.
func TestWhoComesDuringAReadThatMissesIsHandedOver(t *testing.T) {
	t.Parallel()
	for asOf := range 4 {
		g := NewGroup[string]()
		a := board(t, g, "k", nil, nil)
		late := board(t, g, "k", nil, nil)
		g.RunAfter(late.Flight, func() { t.Error("a second read begins") })
		g.BeginFill(a.Flight, true)
		g.Tick(a.Flight)
		wantResult(t, g, late, nil, "", false, false)
		again := board(t, g, "k", late.Flight, nil)
		if again.Flight != a.Flight {
			t.Fatal("who came during the read is not in the flight that goes on")
		}
		land(g, a.Flight, "v", asOf)
		want := ""
		if asOf > FirstTurn {
			want = "v"
		}
		wantResult(t, g, again, nil, want, false, asOf > FirstTurn)
		g.Running.Wait()
	}
}

// TestNoReadIsMadeForThoseWhoHaveLeft: a read that all who waited for it have left is not begun.
func TestNoReadIsMadeForThoseWhoHaveLeft(t *testing.T) {
	t.Parallel()
	g := NewGroup[string]()
	a := board(t, g, "k", nil, nil)
	late := board(t, g, "k", nil, nil)
	g.RunAfter(late.Flight, func() { t.Error("the read begins") })
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, ok, err := g.Wait(ctx, late, nil); ok || err != context.Canceled {
		t.Errorf("ok is %t, %v", ok, err)
	}
	land(g, a.Flight, "old", FirstTurn)
	g.Running.Wait()
	wantFirst(t, board(t, g, "k", nil, nil), true)
}

// TestWhoGoesRoundTakesTheNextFlightEvenIfItHasEnded: it began after the caller came, so that a third one
// would be in vain.
func TestWhoGoesRoundTakesTheNextFlightEvenIfItHasEnded(t *testing.T) {
	t.Parallel()
	g := NewGroup[string]()
	a := board(t, g, "k", nil, nil)
	g.BeginFill(a.Flight, true)
	slow, quick := board(t, g, "k", nil, nil), board(t, g, "k", nil, nil)
	land(g, a.Flight, "old", FirstTurn)
	wantResult(t, g, quick, nil, "", false, false)
	next := board(t, g, "k", quick.Flight, nil)
	land(g, next.Flight, "new", FirstTurn)
	third := board(t, g, "k", nil, nil)

	wantResult(t, g, slow, nil, "", false, false)
	s := board(t, g, "k", slow.Flight, nil)
	if s.First || s.Flight != next.Flight {
		t.Fatal("who goes round is not in the next flight")
	}
	wantResult(t, g, s, nil, "new", false, true)
	land(g, third.Flight, "", 1)
}

func TestABrokenLoadIsLeftByThoseWhoCameAfterItBegan(t *testing.T) {
	t.Parallel()
	for _, breakOff := range []string{"Supersede", "BreakOff"} {
		t.Run(breakOff, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := NewGroup[string]()
				early := board(t, g, "k", nil, nil)
				f := early.Flight
				g.BeginFill(f, true)
				loading := g.BeginLoad(f)
				late := board(t, g, "k", nil, nil)
				lateSleeper := board(t, g, "k", nil, nil) // who will wait only after the news

				var earlyDone, lateDone sync.WaitGroup
				earlyDone.Go(func() { wantResult(t, g, early, nil, "v1", false, true) })
				lateDone.Go(func() { wantResult(t, g, late, nil, "", false, false) })
				synctest.Wait()
				if breakOff == "Supersede" {
					g.Supersede("other")
					g.Supersede("k")
					g.Supersede("k")
				} else {
					g.BreakOff(f)
					g.BreakOff(f)
				}
				lateDone.Wait() // the flight goes on
				wantResult(t, g, lateSleeper, nil, "", false, false)
				newcomer := board(t, g, "k", nil, nil)
				wantFirst(t, newcomer, true)
				again := board(t, g, "k", late.Flight, nil)
				if again.Flight != newcomer.Flight {
					t.Error("who left the broken flight is not in the new one")
				}
				g.End(f, "v1", loading)
				g.Running.Done()
				earlyDone.Wait()
				if g.flights["k"] != newcomer.Flight {
					t.Error("the end of the broken flight has taken the new one out of the map")
				}
				land(g, newcomer.Flight, "v2", 2)
				wantResult(t, g, again, nil, "v2", false, true)
				wantResult(t, g, newcomer, nil, "v2", true, true)
				g.Running.Wait()
			})
		})
	}
}

func TestNewsBeforeTheLoadOnlyNudge(t *testing.T) {
	t.Parallel()
	g := NewGroup[string]()
	s := board(t, g, "k", nil, nil)
	g.Supersede("k") // nobody listens yet, and nothing happens
	g.BeginFill(s.Flight, true)
	nudged := func() bool {
		select {
		case <-s.Nudge:
			return true
		default:
			return false
		}
	}
	if nudged() {
		t.Error("a nudge without news")
	}
	g.Supersede("k")
	g.Supersede("k")
	if !nudged() || nudged() {
		t.Error("Supersede before the load: want one nudge")
	}
	if joins := board(t, g, "k", nil, nil); joins.Flight != s.Flight {
		t.Error("the flight is not boarded any more")
	}
	g.BeginLoad(s.Flight)
	nudged()
	if joins := board(t, g, "k", nil, nil); joins.Flight != s.Flight {
		t.Error("the flight is not boarded any more")
	}
	if !nudged() {
		t.Error("a caller during the load: is it still worth waiting for? Want a nudge")
	}
	land(g, s.Flight, "", 3)
}

func TestACallerLeavesWithItsContext(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := NewGroup[string]()
		s := board(t, g, "k", nil, nil)
		g.BeginFill(s.Flight, true)
		other := board(t, g, "k", nil, nil)
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, _, ok, err := g.Wait(ctx, s, nil); ok || err != context.Canceled {
				t.Errorf("got %t, %v; want context.Canceled itself", ok, err)
			}
		})
		synctest.Wait()
		cancel()
		wg.Wait()
		if g.EndIfDeserted(s.Flight) {
			t.Error("a flight with a caller is deserted")
		}
		// A result that is there already is better than the end of a context.
		land(g, s.Flight, "v", Always)
		if r, _, ok, err := wait(ctx, g, other, nil); r != "v" || !ok || err != nil {
			t.Errorf("got %q, %t, %v; want the result", r, ok, err)
		}
	})
}

// TestTheFlightAfterIsBegunByWhoMadeIt: or, if that one has left, in a goroutine of its own, as long as anybody waits.
func TestTheFlightAfterIsBegunByWhoMadeIt(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		leaves, isLate bool // who made it; only when the read has ended
		goesOn         bool // the flight that reads
		begins, ran    bool
	}{
		"the read is all":                       {begins: true},
		"it leaves":                             {leaves: true, ran: true},
		"it leaves when the flight is due":      {leaves: true, isLate: true, ran: true},
		"the flight that reads goes on":         {goesOn: true},
		"it leaves, and the flight goes on":     {leaves: true, goesOn: true},
		"it leaves when the flight has gone on": {leaves: true, isLate: true, goesOn: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := NewGroup[string]()
				reads := board(t, g, "k", nil, nil)
				made := board(t, g, "k", nil, nil)
				joins := board(t, g, "k", nil, nil)
				if !made.First || !made.After || joins.First || joins.Flight != made.Flight {
					t.Fatalf("made %+v, joins %+v", made, joins)
				}
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				awaited, begins, ran := false, false, false
				go func() {
					begins, awaited = g.AwaitTurn(ctx, made.Flight), true
				}()
				synctest.Wait()
				if awaited {
					t.Fatal("it begins during the read")
				}
				noted := func() {
					g.RunAfter(made.Flight, func() { ran = true; land(g, made.Flight, "new", FirstTurn) })
				}
				if test.leaves {
					cancel()
					synctest.Wait()
				}
				if test.leaves && !test.isLate {
					noted()
				}
				if test.goesOn {
					g.BeginFill(reads.Flight, true)
				} else {
					land(g, reads.Flight, "old", FirstTurn)
				}
				synctest.Wait()
				if test.leaves && test.isLate || test.goesOn && !test.leaves {
					noted()
					synctest.Wait()
				}
				if !awaited || begins != test.begins || ran != test.ran {
					t.Errorf("awaited %t, begins %t, ran %t; want %t, %t", awaited, begins, ran, test.begins, test.ran)
				}
				switch {
				case begins:
					if hold := g.Land(made, new("new"), nil); hold != Owned {
						t.Errorf("who landed has hold %d", hold)
					}
					g.Running.Done()
					wantResult(t, g, joins, nil, "new", true, true)
				case ran:
					wantResult(t, g, joins, nil, "new", false, true)
				default:
					wantResult(t, g, joins, nil, "", false, false)
					land(g, reads.Flight, "", 0)
				}
				g.Running.Wait()
			})
		})
	}
}

func TestWhoHasLeftBeginsNoRead(t *testing.T) {
	t.Parallel()
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	for range 100 { // select takes either of two that are ready
		g := NewGroup[string]()
		reads, made := board(t, g, "k", nil, nil), board(t, g, "k", nil, nil)
		land(g, reads.Flight, "old", FirstTurn)
		if g.AwaitTurn(gone, made.Flight) {
			t.Fatal("it is to begin although its context has ended")
		}
		runsAfter(g, made, "new")
		g.Running.Wait()
	}
}

// TestWhoLandsTakesTheResultLikeOthers: those who board it too have it, even if they come when it has ended.
func TestWhoLandsTakesTheResultLikeOthers(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		early  int // others who have come when it lands
		common bool
		want   []Hold // of all, and then of one who comes late
	}{
		{0, false, []Hold{Owned, Shared}},
		{0, true, []Hold{Owned, Shared}},
		{1, false, []Hold{Owned, Shared, Shared}},
		{1, true, []Hold{Common, Common, Common}},
	} {
		g := NewGroup[string]()
		prev := board(t, g, "k", nil, nil)
		g.BeginFill(prev.Flight, true)
		land(g, prev.Flight, "", 0)
		s := board(t, g, "k", prev.Flight, nil)
		wantFirst(t, s, true)
		var others []Seat[string]
		for range test.early {
			others = append(others, board(t, g, "k", prev.Flight, nil))
		}
		s.Common = test.common
		holds := []Hold{g.Land(s, new("v"), nil)}
		g.Running.Done()
		for _, other := range append(others, board(t, g, "k", prev.Flight, nil)) {
			r, hold, ok, err := wait(t.Context(), g, other, nil)
			if r != "v" || !ok || err != nil {
				t.Errorf("another caller got %q, %t, %v", r, ok, err)
			}
			holds = append(holds, hold)
		}
		if !slices.Equal(holds, test.want) {
			t.Errorf("%+v: holds %v", test, holds)
		}
	}
	g := NewGroup[string]()
	s := board(t, g, "k", nil, nil)
	s.Common = true
	if hold := g.Land(s, new("v"), nil); hold != Owned {
		t.Errorf("who is alone has hold %d", hold)
	}
	if s.result != nil {
		t.Error("a result is kept for nobody")
	}
}

func TestADesertedFlightEndsWithoutAResult(t *testing.T) {
	t.Parallel()
	g := NewGroup[string]()
	s := board(t, g, "k", nil, nil)
	g.BeginFill(s.Flight, true)
	other := board(t, g, "k", nil, nil)
	<-s.Nudge
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	for i, seat := range []Seat[string]{s, other} {
		if _, _, ok, err := g.Wait(gone, seat, nil); ok || err != context.Canceled {
			t.Errorf("got %t, %v; want context.Canceled", ok, err)
		}
		select {
		case <-s.Nudge:
			if i == 0 {
				t.Error("nudged although one is left")
			}
		default:
			if i == 1 {
				t.Error("not nudged when the last has left")
			}
		}
	}
	if !g.EndIfDeserted(s.Flight) {
		t.Error("a flight without callers is not deserted")
	}
	g.Running.Done()
	wantFirst(t, board(t, g, "k", nil, nil), true)
}

func TestAFlightForALoadsCallIsExempt(t *testing.T) {
	t.Parallel()
	g, h := NewGroup[string](), NewGroup[string]()
	outer := board(t, g, "outer", nil, nil)
	for name, test := range map[string]struct {
		group *Group[string]
		outer *Load
		want  bool
	}{
		"from outside":            {g, nil, false},
		"from a load of this":     {g, &outer.Load, true},
		"from a load of another":  {h, &outer.Load, true},
		"from a load within this": {g, &Load{cache: h, outer: &outer.Load}, true},
	} {
		first := board(t, test.group, name, nil, nil)
		test.group.BeginFill(first.Flight, true)
		if test.group.Exempt(first.Flight) {
			t.Errorf("%s: exempt before the call", name)
		}
		s := board(t, test.group, name, nil, test.outer)
		if got := test.group.Exempt(s.Flight); got != test.want {
			t.Errorf("%s: exempt %t, want %t", name, got, test.want)
		}
		if test.want && len(s.Nudge) == 0 {
			t.Errorf("%s: not nudged", name)
		}
		board(t, test.group, name, nil, nil)
		if got := test.group.Exempt(s.Flight); got != test.want {
			t.Errorf("%s, and one more from outside: exempt %t, want %t", name, got, test.want)
		}
	}
}

// TestAFlightHoldsNoneAfterIt: who is slow to take a result must not keep those of all reads since.
func TestAFlightHoldsNoneAfterIt(t *testing.T) {
	t.Parallel()
	g := NewGroup[string]()
	a := board(t, g, "k", nil, nil)
	later := func() weak.Pointer[Flight[string]] {
		s := board(t, g, "k", nil, nil)
		land(g, a.Flight, "old", FirstTurn)
		runsAfter(g, s, "new")
		wantResult(t, g, s, nil, "new", false, true)
		return weak.Make(s.Flight)
	}()
	g.Running.Wait()
	redistest.Await(t, "the flight after is collected", func() bool {
		runtime.GC()
		return later.Value() == nil
	})
	wantResult(t, g, a, nil, "old", false, true)
}

// TestWhoCameBeforeCloseGoesOnToAFlightThatIsThere: but to no new one.
func TestWhoCameBeforeCloseGoesOnToAFlightThatIsThere(t *testing.T) {
	t.Parallel()
	g := NewGroup[string]()
	a := board(t, g, "k", nil, nil)
	late := board(t, g, "k", nil, nil)
	runsAfter(g, late, "never")
	g.Close()
	g.BeginFill(a.Flight, true)
	wantResult(t, g, late, nil, "", false, false)
	again := board(t, g, "k", late.Flight, nil)
	if again.Flight != a.Flight {
		t.Error("handed over to another flight")
	}
	land(g, a.Flight, "v", FirstTurn) // too old for who came late
	wantResult(t, g, again, nil, "", false, false)
	if _, err := g.Board("k", again.Flight, nil); err != ErrClosed {
		t.Errorf("Board: %v, want ErrClosed", err)
	}
	wantResult(t, g, a, nil, "v", false, true)
	g.Running.Wait()
}

func TestAClosedGroupIsNotBoarded(t *testing.T) {
	t.Parallel()
	g := NewGroup[string]()
	s := board(t, g, "k", nil, nil)
	ran := make(chan bool, 2)
	g.Go(func() { ran <- true })
	if !g.Close() || g.Close() {
		t.Error("Close is to report that it is the first, once")
	}
	g.Go(func() { t.Error("a closed group runs something") })
	for _, key := range []string{"k", "l"} {
		if _, err := g.Board(key, nil, nil); err != ErrClosed {
			t.Errorf("Board(%q): %v, want ErrClosed", key, err)
		}
	}
	within := board(t, g, "l", nil, &s.Load) // a load that Close waits for may need another one
	land(g, within.Flight, "", Always)
	wantResult(t, g, within, &s.Load, "", false, true)
	land(g, s.Flight, "v", Always)
	wantResult(t, g, s, nil, "v", false, true)
	g.Running.Wait()
	if len(ran) != 1 {
		t.Error("Running does not count what Go runs")
	}
}

// TestNobodyIsGivenWhatWasTrueOnlyBeforeItCame lets flights begin, end and break under many callers. Each
// result is the count of ends so far at the turn that it is true as of, so that age can be told.
func TestNobodyIsGivenWhatWasTrueOnlyBeforeItCame(t *testing.T) {
	t.Parallel()
	g := NewGroup[int64]()
	var mu sync.Mutex
	var clock int64
	now := func() int64 {
		mu.Lock()
		defer mu.Unlock()
		clock++
		return clock
	}
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for n := range 2000 {
				key := fmt.Sprint(n % 2)
				came, landed := now(), false
				var prev *Flight[int64]
				for {
					s, err := g.Board(key, prev, nil)
					if err != nil {
						t.Error(err)
						return
					}
					if s.First {
						run := func() {
							defer g.Running.Done()
							if n%5 == 0 {
								g.End(s.Flight, now(), FirstTurn)
								return
							}
							g.BeginFill(s.Flight, true)
							turn := g.Tick(s.Flight)
							read := now() // the turn has begun
							if n%3 == 0 {
								turn = g.BeginLoad(s.Flight)
								read = now()
								g.Supersede(key)
							}
							g.End(s.Flight, read, turn)
						}
						itself := n%7 < 4 // it runs the flight in its own goroutine, if that may begin
						switch {
						case s.After && !(itself && g.AwaitTurn(context.Background(), s.Flight)):
							g.RunAfter(s.Flight, run)
						case itself && n%5 == 0:
							read := now()
							g.Land(s, &read, nil)
							g.Running.Done()
							if read < came {
								t.Errorf("caller %d came at %d and read at %d", i, came, read)
							}
							landed = true
						case itself:
							run()
						default:
							go run()
						}
					}
					if landed {
						break
					}
					r, _, ok, err := wait(context.Background(), g, s, nil)
					if err != nil {
						t.Error(err)
						return
					}
					if ok {
						if r < came {
							t.Errorf("caller %d came at %d and got what was true at %d", i, came, r)
						}
						break
					}
					prev = s.Flight
				}
			}
		})
	}
	wg.Wait()
	g.Running.Wait()
	if len(g.flights) != 0 {
		t.Errorf("%d flights left", len(g.flights))
	}
}

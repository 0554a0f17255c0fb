package flight

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// refresh begins a refresh that must be possible.
func refresh(t *testing.T, g *Group[string], key, of string) *Flight[string] {
	t.Helper()
	r := g.Refresh(key, of)
	if r == nil {
		t.Fatalf("no refresh of %q of %q", of, key)
	}
	if !r.Refresh || r.Key != key || r.Of != of || r.Nudge == nil {
		t.Errorf("the refresh of %q of %q is %+v", of, key, r)
	}
	return r
}

func wantNoRefresh(t *testing.T, g *Group[string], key, of, why string) {
	t.Helper()
	if r := g.Refresh(key, of); r != nil {
		t.Errorf("a refresh of %q of %q: %s", of, key, why)
		land(g, r, "", 0)
	}
}

// handOver begins a read of key by n callers, lets it come to nothing, and returns what its callers wait for then.
func handOver(t *testing.T, g *Group[string], r *Flight[string], n int, outer *Load) (seats []Seat[string]) {
	t.Helper()
	for range n {
		seats = append(seats, board(t, g, r.Key, nil, outer))
	}
	f := seats[0].Flight
	wantFirst(t, seats[0], true)
	if g.BeginFill(f, true) {
		t.Fatal("a read begins to fill beside a refresh")
	}
	g.End(f, "", 0) // as its goroutine would do
	g.Running.Done()
	for i, s := range seats {
		wantResult(t, g, s, outer, "", false, false)
		seats[i] = board(t, g, r.Key, s.Flight, outer)
		wantFirst(t, seats[i], false)
		if seats[i].Flight != r {
			t.Fatal("who read in vain does not wait for the refresh")
		}
	}
	return seats
}

func nudged(f *Flight[string]) bool {
	select {
	case <-f.Nudge:
		return true
	default:
		return false
	}
}

func TestOneRefreshForAKeyAtATime(t *testing.T) {
	t.Parallel()
	g := NewGroup[string]()
	r := refresh(t, g, "k", "e1")
	wantNoRefresh(t, g, "k", "e1", "one is under way")
	wantNoRefresh(t, g, "k", "e2", "one is under way, if of another entry")
	other := refresh(t, g, "l", "e1")
	land(g, other, "", 0)
	g.BeginFill(r, true)
	g.BeginLoad(r)
	wantNoRefresh(t, g, "k", "e1", "one is loading")
	land(g, r, "v", 1)
	again := refresh(t, g, "k", "e1") // no Rest was asked for
	g.End(r, "", 0)                   // only the first End counts
	wantNoRefresh(t, g, "k", "e1", "the second one is under way")
	land(g, again, "", 0)
	s := board(t, g, "k", nil, nil)
	s.Rest = time.Hour // only a refresh has one
	land(g, s.Flight, "", 0)
	g.Running.Wait()
	if len(g.refreshes)+len(g.flights) != 0 {
		t.Errorf("%d refreshes and %d flights are left", len(g.refreshes), len(g.flights))
	}
}

// TestNobodyBoardsARefresh: its key has a value to serve, and each read has to see whether that is still so.
func TestNobodyBoardsARefresh(t *testing.T) {
	t.Parallel()
	g := NewGroup[string]()
	r := refresh(t, g, "k", "e")
	for _, stage := range []func(){func() {}, func() { g.BeginFill(r, true) }, func() { g.Tick(r) }, func() { g.BeginLoad(r) }} {
		stage()
		s := board(t, g, "k", nil, nil)
		wantFirst(t, s, true)
		if s.Flight == r {
			t.Fatal("a refresh is boarded")
		}
		land(g, s.Flight, "stale", FirstTurn)
		wantResult(t, g, s, nil, "stale", false, true)
		if g.Wanted(r) || nudged(r) {
			t.Error("a reader is taken for somebody who waits for the refresh")
		}
	}
	s := board(t, g, "k", nil, nil)
	land(g, r, "v", 1)
	if g.flights["k"] != s.Flight {
		t.Error("the end of a refresh has taken a flight out of the map")
	}
	land(g, s.Flight, "", 1)
	g.Running.Wait()
}

func TestThereIsNoRefreshBesideAFlightThatFills(t *testing.T) {
	t.Parallel()
	g := NewGroup[string]()
	s := board(t, g, "k", nil, nil)
	reading := refresh(t, g, "k", "e") // the flight may yet find something to serve
	land(g, reading, "", 0)
	if !g.BeginFill(s.Flight, true) {
		t.Fatal("a flight does not begin to fill although no refresh is under way")
	}
	wantNoRefresh(t, g, "k", "e", "a flight waits for a load")
	loading := g.BeginLoad(s.Flight)
	wantNoRefresh(t, g, "k", "e", "a flight loads")
	g.Supersede("k") // its load is void
	r := refresh(t, g, "k", "e2")
	land(g, s.Flight, "v", loading)
	wantNoRefresh(t, g, "k", "e2", "the end of the void flight is not that of the refresh")
	land(g, r, "", 0)
	g.Running.Wait()
}

func TestAClosedGroupBeginsNoRefreshAndWaitsForThoseBegun(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := NewGroup[string]()
		r := refresh(t, g, "k", "e")
		g.Close()
		wantNoRefresh(t, g, "k", "e2", "the group is closed")
		wantNoRefresh(t, g, "l", "e", "the group is closed")
		closed := false
		go func() { g.Running.Wait(); closed = true }()
		synctest.Wait()
		if closed {
			t.Error("a refresh is not counted as running")
		}
		// Its load may still need others of this group.
		needed := board(t, g, "l", nil, &r.Load)
		land(g, needed.Flight, "v", Always)
		wantResult(t, g, needed, &r.Load, "v", false, true)
		r.Rest = time.Hour
		land(g, r, "", 0)
		synctest.Wait()
		if !closed {
			t.Error("a Rest keeps the group open")
		}
		if _, err := g.Board("l", nil, &r.Load); err != ErrClosed {
			t.Errorf("a call from inside of a refresh that is over: %v, want ErrClosed", err)
		}
	})
}

func TestARestHoldsOffTheSameEntryOnlyAndEndsByItself(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(t *testing.T, g *Group[string], r *Flight[string]){
		"End":           func(_ *testing.T, g *Group[string], r *Flight[string]) { g.End(r, "v", 1) },
		"EndIfDeserted": func(_ *testing.T, g *Group[string], r *Flight[string]) { g.EndIfDeserted(r) },
		"End with callers": func(t *testing.T, g *Group[string], r *Flight[string]) {
			handOver(t, g, r, 2, nil)
			g.End(r, "v", 1)
		},
		"End after BreakOff": func(_ *testing.T, g *Group[string], r *Flight[string]) {
			g.BeginLoad(r)
			g.BreakOff(r)
			g.End(r, "v", 1)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const rest = time.Second
				g := NewGroup[string]()
				r := refresh(t, g, "k", "e")
				r.Rest = rest
				end(t, g, r)
				g.Running.Done()
				wantNoRefresh(t, g, "k", "e", "its Rest has just begun")
				if resting := g.refreshes["k"]; resting == r || resting.result != nil || resting.offer != nil {
					t.Error("the value is kept for the Rest") // which may be large, and the Rest long
				}
				time.Sleep(rest - 1)
				wantNoRefresh(t, g, "k", "e", "its Rest goes on")
				elsewhere := refresh(t, g, "l", "e")
				land(g, elsewhere, "", 0)
				if s := board(t, g, "k", nil, nil); !s.First {
					t.Error("a refresh that has ended is boarded")
				} else if !g.BeginFill(s.Flight, true) {
					t.Error("callers are handed over to a refresh that has ended")
				} else {
					land(g, s.Flight, "", 0)
				}
				time.Sleep(time.Nanosecond)
				synctest.Wait()
				if len(g.refreshes)+len(g.flights) != 0 {
					t.Errorf("after the Rest: %d refreshes and %d flights are left", len(g.refreshes), len(g.flights))
				}
				again := refresh(t, g, "k", "e")

				again.Rest = rest // of which the end must not touch what comes then
				land(g, again, "", 0)
				newer := refresh(t, g, "k", "e2")
				time.Sleep(rest)
				synctest.Wait()
				wantNoRefresh(t, g, "k", "e2", "one is under way since the Rest of another entry")
				newer.Rest = rest
				land(g, newer, "", 0)
				older := refresh(t, g, "k", "e")
				older.Rest = rest / 2
				land(g, older, "", 0)
				time.Sleep(rest / 2)
				synctest.Wait()
				time.Sleep(rest)
				synctest.Wait()
				if len(g.refreshes) != 0 {
					t.Errorf("%d refreshes are left", len(g.refreshes))
				}
				g.Running.Wait()
			})
		})
	}
}

// TestARefreshThatOthersReplaceHasNoRest: the one that came after it counts.
func TestARefreshThatOthersReplaceHasNoRest(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := NewGroup[string]()
		void := refresh(t, g, "k", "e1")
		g.BeginLoad(void)
		g.Supersede("k")
		r := refresh(t, g, "k", "e2")
		void.Rest = time.Second
		land(g, void, "", 0)
		wantNoRefresh(t, g, "k", "e1", "the newer one is under way")
		time.Sleep(time.Second)
		synctest.Wait()
		wantNoRefresh(t, g, "k", "e1", "the newer one is still under way")
		land(g, r, "", 0)
		again := refresh(t, g, "k", "e1")
		land(g, again, "", 0)
	})
}

// TestWhoReadsInVainIsHandedOverToTheRefresh goes through every turn at which a caller can be handed over and
// every turn as of which the result can be true: nobody takes what was true only before.
func TestWhoReadsInVainIsHandedOverToTheRefresh(t *testing.T) {
	t.Parallel()
	const turns = 5
	for came := FirstTurn; came <= turns; came++ {
		for asOf := range turns + 3 {
			g := NewGroup[string]()
			r := refresh(t, g, "k", "e")
			if !g.BeginFill(r, true) {
				t.Fatal("a refresh is handed over to itself")
			}
			var seats []Seat[string]
			for turn := FirstTurn; turn <= turns; turn++ {
				if turn == came {
					seats = handOver(t, g, r, 2, nil)
				}
				if turn == 3 {
					g.BeginLoad(r)
				} else {
					g.Tick(r)
				}
			}
			land(g, r, "v", asOf)
			takes, want := came < asOf, ""
			if takes {
				want = "v"
			}
			wantResult(t, g, seats[0], nil, want, false, takes)
			wantResult(t, g, seats[1], nil, want, takes, takes)
			if !takes { // the next flight is new to them
				again := board(t, g, "k", r, nil)
				wantFirst(t, again, true)
				land(g, again.Flight, "w", FirstTurn)
				wantResult(t, g, again, nil, "w", false, true)
			}
			g.Running.Wait()
		}
	}
}

// TestWhoIsSlowToFollowAHandoverIsNotLate: what counts is when the caller was handed over, not when it notices.
func TestWhoIsSlowToFollowAHandoverIsNotLate(t *testing.T) {
	t.Parallel()
	for _, since := range []bool{true, false} {
		g := NewGroup[string]()
		r := refresh(t, g, "k", "e")
		s := board(t, g, "k", nil, nil)
		g.BeginFill(s.Flight, true)
		g.Running.Done()
		asOf, want := r.turn, ""
		if since {
			asOf, want = g.Tick(r), "v"
		}
		land(g, r, "v", asOf)
		wantResult(t, g, s, nil, "", false, false)
		handed := board(t, g, "k", s.Flight, nil)
		wantResult(t, g, handed, nil, want, false, since)
		if !since {
			again := board(t, g, "k", handed.Flight, nil)
			wantFirst(t, again, true)
			land(g, again.Flight, "w", FirstTurn)
			wantResult(t, g, again, nil, "w", false, true)
		}
		g.Running.Wait()
	}
}

// TestWhoComesDuringAReadIsLateForARefreshThatBeganBefore: it may have loaded before a Delete, and the caller come
// after it.
func TestWhoComesDuringAReadIsLateForARefreshThatBeganBefore(t *testing.T) {
	t.Parallel()
	g := NewGroup[string]()
	r := refresh(t, g, "k", "e")
	g.BeginFill(r, true)
	loading := g.BeginLoad(r)
	reader := board(t, g, "k", nil, nil)
	late := board(t, g, "k", nil, nil) // begins here, after a Delete in another process
	wantFirst(t, late, true)           // it reads for itself
	land(g, reader.Flight, "stale", FirstTurn)
	wantResult(t, g, reader, nil, "stale", false, true)
	if g.BeginFill(late.Flight, true) {
		t.Fatal("a read begins to fill beside a refresh")
	}
	g.Running.Done()
	wantResult(t, g, late, nil, "", false, false)
	sentOn := board(t, g, "k", late.Flight, nil)
	if sentOn.Flight != r {
		t.Fatal("who read in vain does not wait for the refresh")
	}
	land(g, r, "v1", loading) // its store was refused
	wantResult(t, g, sentOn, nil, "", false, false)
	g.Running.Wait()
}

// TestARefreshServesAllWhoAreHandedOverToIt: one load for all, though each of them reads first.
func TestARefreshServesAllWhoAreHandedOverToIt(t *testing.T) {
	t.Parallel()
	g := NewGroup[string]()
	r := refresh(t, g, "k", "e")
	g.BeginFill(r, true)
	g.Tick(r)
	if g.Wanted(r) {
		t.Error("wanted by nobody")
	}
	nudged(r)
	handed := handOver(t, g, r, 1, nil)
	if !g.Wanted(r) || !nudged(r) {
		t.Error("the refresh is not told that somebody waits now")
	}
	if g.EndIfDeserted(r) {
		t.Error("a refresh with a caller is deserted")
	}
	wantNoRefresh(t, g, "k", "e", "one is under way, with callers")
	joins := handOver(t, g, r, 1, nil)[0]
	g.BeginLoad(r)
	late := handOver(t, g, r, 1, nil)[0]
	r.Rest = time.Hour
	land(g, r, "v", r.loadTurn)
	wantResult(t, g, handed[0], nil, "v", false, true)
	wantResult(t, g, joins, nil, "v", true, true)
	wantResult(t, g, late, nil, "", false, false)
	wantNoRefresh(t, g, "k", "e", "the Rest is that of any refresh")
	again := board(t, g, "k", late.Flight, nil)
	wantFirst(t, again, true)
	if !g.BeginFill(again.Flight, true) {
		t.Error("a Rest keeps a flight from filling")
	}
	land(g, again.Flight, "", 1)
	g.Running.Wait()
}

// TestARefreshThatItsCallersHaveLeftIsNobodysAgain, but still the flight of its key.
func TestARefreshThatItsCallersHaveLeftIsNobodysAgain(t *testing.T) {
	t.Parallel()
	g := NewGroup[string]()
	r := refresh(t, g, "k", "e")
	g.BeginFill(r, true)
	s := handOver(t, g, r, 1, nil)[0]
	nudged(r)
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, ok, err := g.Wait(gone, s, nil); ok || err != context.Canceled {
		t.Errorf("got %t, %v, want context.Canceled", ok, err)
	}
	if g.Wanted(r) || !nudged(r) {
		t.Error("the refresh is not told that nobody waits any more")
	}
	wantNoRefresh(t, g, "k", "e", "one is still under way")
	joins := handOver(t, g, r, 1, nil)[0]
	if _, _, ok, err := g.Wait(gone, joins, nil); ok || err != context.Canceled {
		t.Errorf("got %t, %v, want context.Canceled", ok, err)
	}
	r.Rest = time.Hour
	if !g.EndIfDeserted(r) {
		t.Error("a refresh without callers is not deserted")
	}
	wantNoRefresh(t, g, "k", "e", "it rests")
	g.Running.Done()
	wantFirst(t, board(t, g, "k", nil, nil), true)
}

// TestALoadThatWaitsForItsOwnRefreshIsFoundOut: a refresh belongs to nobody until callers are handed over to it.
func TestALoadThatWaitsForItsOwnRefreshIsFoundOut(t *testing.T) {
	t.Parallel()
	g := NewGroup[string]()
	r := refresh(t, g, "k", "e")
	g.BeginLoad(r)
	inside := board(t, g, "k", nil, &r.Load) // it may read the key,
	wantFirst(t, inside, true)
	if g.BeginFill(inside.Flight, true) {
		t.Fatal("a read begins to fill beside a refresh")
	}
	g.Running.Done()
	wantResult(t, g, inside, &r.Load, "", false, false)
	if _, err := g.Board("k", inside.Flight, &r.Load); err != ErrRecursive { // but not wait for itself
		t.Errorf("a load waits for itself: %v, want ErrRecursive", err)
	}
	if g.Wanted(r) {
		t.Error("who was refused counts as waiting")
	}

	// In two steps: r waits for l, which waits for r.
	l := board(t, g, "l", nil, &r.Load)
	inside = board(t, g, "k", nil, &l.Load)
	if g.BeginFill(inside.Flight, true) {
		t.Fatal("a read begins to fill beside a refresh")
	}
	g.Running.Done()
	wantResult(t, g, inside, &l.Load, "", false, false)
	if _, err := g.Board("k", inside.Flight, &l.Load); err != ErrRecursive {
		t.Errorf("two loads wait for each other: %v, want ErrRecursive", err)
	}
	land(g, l.Flight, "", Always)
	wantResult(t, g, l, &r.Load, "", false, true)
	land(g, r, "", 1)
	g.Running.Wait()
}

func TestARefreshThatALoadWaitsForIsExempt(t *testing.T) {
	t.Parallel()
	g, h := NewGroup[string](), NewGroup[string]()
	outer := board(t, h, "outer", nil, nil)
	r := refresh(t, g, "k", "e")
	g.BeginFill(r, true)
	handOver(t, g, r, 1, nil)
	nudged(r)
	if g.Exempt(r) {
		t.Error("exempt for a caller from outside")
	}
	handOver(t, g, r, 1, &outer.Load)
	if !g.Exempt(r) || !nudged(r) {
		t.Error("not exempt, or not nudged, for a call from inside of another load")
	}

	r = refresh(t, g, "l", "e")
	g.BeginFill(r, true)
	nudged(r)
	handOver(t, g, r, 1, &outer.Load)
	if !g.Exempt(r) || !nudged(r) {
		t.Error("not exempt, or not nudged, for a call from inside of another load that was handed over")
	}
}

// leaveWith waits in a seat with a context that has ended.
func leaveWith(t *testing.T, g *Group[string], s Seat[string], deadline bool) (r string, hold Hold, ok bool, err error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	if deadline {
		ctx, cancel = context.WithDeadline(t.Context(), time.Unix(0, 0))
	}
	cancel()
	return wait(ctx, g, s, nil)
}

// TestAnOfferIsTakenAtADeadlineByThoseForWhomItIsTrue goes through every turn at which a caller can come and
// every turn as of which an offer can be true.
func TestAnOfferIsTakenAtADeadlineByThoseForWhomItIsTrue(t *testing.T) {
	t.Parallel()
	const turns = 5
	for offered := range turns + 2 {
		for _, deadline := range []bool{true, false} {
			for _, end := range []string{"", "too late", "for all"} {
				g := NewGroup[string]()
				seats := []Seat[string]{board(t, g, "k", nil, nil)}
				f := seats[0].Flight
				g.BeginFill(f, true)
				for turn := FirstTurn; turn <= turns; turn++ {
					seats = append(seats, board(t, g, "k", nil, nil))
					if turn == 3 {
						g.BeginLoad(f)
					} else {
						g.Tick(f)
					}
				}
				if offered > 0 {
					g.Offer(f, "older", FirstTurn)
					g.Offer(f, "old", offered) // the later one counts
				}
				switch end {
				case "too late":
					land(g, f, "v", 0)
				case "for all":
					land(g, f, "v", Always)
				}
				want := context.Canceled
				if deadline {
					want = context.DeadlineExceeded
				}
				for came, s := range seats { // the first at 0, the others at 1 to 5
					r, hold, ok, err := leaveWith(t, g, s, deadline)
					switch {
					case end == "for all": // a result that is there is better
						if r != "v" || !ok || err != nil {
							t.Errorf("got %q, %t, %v, want the result", r, ok, err)
						}
					case deadline && came < offered:
						if r != "old" || hold != Shared || !ok || err != want {
							t.Errorf("came at %d, offered as of %d: got %q, hold %d, %t, %v, want the offer", came, offered, r, hold, ok, err)
						}
					case r != "" || ok || err != want:
						t.Errorf("came at %d, offered as of %d, deadline %t: got %q, %t, %v, want only %v", came, offered, deadline, r, ok, err, want)
					}
				}
			}
		}
	}
}

// TestAnOfferIsNoReasonToLeave: it is for those whose patience has ended.
func TestAnOfferIsNoReasonToLeave(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := NewGroup[string]()
		s := board(t, g, "k", nil, nil)
		g.BeginFill(s.Flight, true)
		other := board(t, g, "k", nil, nil)
		g.Offer(s.Flight, "old", g.Tick(s.Flight))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		begun := time.Now()
		r, _, ok, err := wait(ctx, g, s, nil)
		if r != "old" || !ok || err != context.DeadlineExceeded || time.Since(begun) != time.Second {
			t.Errorf("got %q, %t, %v after %v, want the offer after 1s", r, ok, err, time.Since(begun))
		}
		g.Offer(s.Flight, "older still", 0) // is none
		if r, _, ok, _ := leaveWith(t, g, other, true); r != "" || ok {
			t.Errorf("got %q, %t, want nothing", r, ok)
		}
		if !g.EndIfDeserted(s.Flight) {
			t.Error("who has taken an offer is still counted")
		}
		g.Running.Done()
	})
}

// TestNewsForARefresh: before its load begins they only nudge, then they make it void.
func TestNewsForARefresh(t *testing.T) {
	t.Parallel()
	for name, news := range map[string]func(g *Group[string], r *Flight[string]){
		"Supersede": func(g *Group[string], _ *Flight[string]) { g.Supersede("l"); g.Supersede("k") },
		"BreakOff":  func(g *Group[string], r *Flight[string]) { g.BreakOff(r) },
	} {
		for _, callers := range []bool{false, true} {
			t.Run(fmt.Sprint(name, callers), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					g := NewGroup[string]()
					r := refresh(t, g, "k", "e1")
					g.BeginFill(r, true)
					var early, late Seat[string]
					if callers {
						early = handOver(t, g, r, 1, nil)[0]
					}
					nudged(r)
					news(g, r)
					if !nudged(r) {
						t.Error("not nudged before the load")
					}
					wantNoRefresh(t, g, "k", "e2", "one is under way and has only to look again")
					loading := g.BeginLoad(r)
					var left sync.WaitGroup
					if callers {
						late = handOver(t, g, r, 1, nil)[0]
						left.Go(func() { wantResult(t, g, late, nil, "", false, false) })
						synctest.Wait()
					}
					news(g, r)
					news(g, r)
					left.Wait() // although the load goes on
					again := board(t, g, "k", nil, nil)
					wantFirst(t, again, true)
					if !g.BeginFill(again.Flight, true) {
						t.Error("callers are handed over to a load that is void")
					}
					land(g, again.Flight, "", 0)
					newer := refresh(t, g, "k", "e2")
					land(g, r, "v1", loading)
					wantNoRefresh(t, g, "k", "e2", "the end of the void one is not that of the newer")
					if callers {
						wantResult(t, g, early, nil, "v1", false, true)
					}
					land(g, newer, "", 0)
					g.Running.Wait()
					if len(g.refreshes)+len(g.flights) != 0 {
						t.Errorf("%d refreshes and %d flights are left", len(g.refreshes), len(g.flights))
					}
				})
			})
		}
	}
}

// TestASupersededKeyHasNewsForBoth: a flight that reads beside a refresh.
func TestASupersededKeyHasNewsForBoth(t *testing.T) {
	t.Parallel()
	g := NewGroup[string]()
	s := board(t, g, "k", nil, nil)
	r := refresh(t, g, "k", "e1")
	g.BeginLoad(r)
	g.Supersede("k")
	if g.flights["k"] != s.Flight {
		t.Error("a read is broken off by news")
	}
	if !g.BeginFill(s.Flight, true) {
		t.Error("callers are handed over to a load that is void")
	}
	g.Supersede("k")
	if !nudged(s.Flight) {
		t.Error("the flight is not nudged")
	}
	land(g, s.Flight, "", 1)
	land(g, r, "", 1)
	g.Running.Wait()
}

// TestReadsRefreshesAndLoadsTogether: under many callers nobody is given what was true only before it came, no two
// loads of a key run side by side, and in the end nothing is left. Half of the keys have news in the middle of
// loads, which make them void; for these the second does not hold.
func TestReadsRefreshesAndLoadsTogether(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := NewGroup[int64]()
		var clock, served, handed atomic.Int64
		var loading [4]atomic.Int64
		pause := func() { time.Sleep(time.Duration(rand.IntN(3)) * time.Millisecond) }
		// run is what follows a read, or is behind it: a look, and perhaps a load.
		run := func(f *Flight[int64], k int) {
			defer g.Running.Done()
			if !g.BeginFill(f, true) {
				handed.Add(1)
				return
			}
			if k < 2 && loading[k].Add(1) > 1 {
				t.Error("two loads of a key side by side")
			}
			turn := g.Tick(f)
			read := clock.Add(1) // the turn has begun
			pause()
			if rand.IntN(3) > 0 {
				turn = g.BeginLoad(f)
				read = clock.Add(1)
				pause()
				if k >= 2 && rand.IntN(3) == 0 {
					g.Supersede(f.Key)
				}
				pause()
			}
			if k < 2 {
				loading[k].Add(-1)
			}
			f.Rest = time.Duration(rand.IntN(3)) * time.Millisecond
			if rand.IntN(4) > 0 || !g.EndIfDeserted(f) {
				g.End(f, read, turn)
			}
		}
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				for range 1000 {
					k := rand.IntN(len(loading))
					key := fmt.Sprint(k)
					came := clock.Add(1)
					var prev *Flight[int64]
					for round := 0; ; round++ {
						s, err := g.Board(key, prev, nil)
						if err != nil || round > 50 { // nobody goes round for ever
							t.Errorf("round %d: %v", round, err)
							return
						}
						if s.First {
							fly := func() {
								read := clock.Add(1)
								pause()
								if rand.IntN(3) == 0 {
									g.Running.Add(1)
									run(s.Flight, k)
								} else { // there is something to serve
									g.End(s.Flight, read, FirstTurn)
									if r := g.Refresh(key, fmt.Sprint(rand.IntN(2))); r != nil {
										go run(r, k)
									}
								}
								g.Running.Done() // what Board has counted
							}
							if s.After {
								g.RunAfter(s.Flight, fly)
							} else {
								go fly()
							}
						}
						r, _, ok, err := wait(context.Background(), g, s, nil)
						if err != nil {
							t.Error(err)
							return
						}
						if ok {
							served.Add(1)
							if r < came {
								t.Errorf("came at %d and got what was true at %d", came, r)
							}
							break
						}
						prev = s.Flight
					}
					pause()
				}
			})
		}
		wg.Wait()
		g.Running.Wait()
		time.Sleep(time.Second) // all Rests are over
		synctest.Wait()
		if len(g.flights)+len(g.refreshes) != 0 {
			t.Errorf("%d flights and %d refreshes left", len(g.flights), len(g.refreshes))
		}
		if served.Load() != 8000 || handed.Load() == 0 {
			t.Errorf("%d served, %d flights handed over: nothing is proved", served.Load(), handed.Load())
		}
	})
}

// Package flight coalesces, within one process, the calls for one key: what singleflight does, with an answer
// to the question whether a result is too old for a call that came late.
package flight

import (
	"context"
	"errors"
	"math"
	"sync"
	"time"
)

var (
	ErrClosed    = errors.New("singlefill: cache is closed")
	ErrRecursive = errors.New("singlefill: a load waits for itself")
)

// A Flight is what this process has under way for one key: a read, and, if that finds nothing fresh, all that
// follows until there is a result. Callers board it and leave it; it belongs to none of them.
//
// It counts its turns: one for each command whose reply may decide it, taken before the command is sent, and
// one for the beginning of its load. The result says from which turn on it is known to be true (as of). Who
// boarded before that turn takes it. Who boarded later goes round once more, because nobody may be given
// what was true only before the call:
//
//  1. caller A boards; the flight reads the key, misses, locks it and begins to load v1;
//  2. the source changes to v2; Delete breaks the lock;
//  3. caller B, having begun after Delete returned, boards;
//  4. the flight's store is refused, so that v1 is known to be true only as of the beginning of the load;
//  5. A takes v1; B boards again, and gets v2.
//
// The same rule lets readers of one key share reads, and none takes a reply that was on its way when it came: who
// comes during a read boards the flight after it, which begins when that read has ended. If it ends with a miss, the
// flight goes on, and those who wait for the one after it are handed over to it.
//
// Nobody goes round for ever: whoever was in a flight is early for every flight of that key begun after it.
//
// A refresh is a flight for nobody: its key has a value that can be served meanwhile, so callers do not board
// it but read, each time anew. When a read finds nothing to serve any more, its callers are handed over to the
// refresh.
type Flight[R any] struct {
	Key   string
	Load  Load          // in the graph of loads that wait for each other
	Nudge chan struct{} // there is news, or somebody new: look again; nil until BeginFill

	// Common makes the result belong to none of several callers: all of them have to copy it. Set by who runs the
	// flight, before its end; taken back by the end if there is one caller only, who owns it as ever.
	Common  bool
	Refresh bool          // see above
	Of      string        // which entry of the key it is to refresh
	Rest    time.Duration // how long, after its end, there shall be no other one of that entry; set by who runs it

	// Guarded by Group.mu.
	exempt   bool // see Exempt
	ended    bool // result, asOf are final
	broken   bool // what the load will bring has been made void since it began
	due      bool // begun, or to be begun as soon as there is a run
	sought   bool // by callers of an earlier flight, who may come even after the end
	taken    bool // by a caller
	turn     int
	loadTurn int           // the turn at which the load began; 0: it has not
	callers  int           // who wait
	done     chan struct{} // closed when ended; made by the first who waits
	gone     chan struct{} // closed when broken; made by the first who waits
	after    *Flight[R]    // for those who came during the read; begins when this one ends, if it ends with that
	begin    chan struct{} // closed when a flight that is after another one is due and has no run, or has ended before
	run      func()        // begins such a flight in place of the caller who made it
	next     *Flight[R]    // one to board after this one; begun later, unless handed is more than 0
	handed   int           // the turn of next when this one's callers were handed over to it; 0: they were not
	result   *R            // nil: there is none, or nobody who could take it
	asOf     int
	offer    *R  // what callers take if their patience ends first
	offered  int // the turn as of which offer is true; 0: there is none
}

// Always is the asOf of a result that everyone may take: there was nothing to compare it with.
const Always = math.MaxInt

// FirstTurn is the turn of the read with which each flight begins.
const FirstTurn = 1

// A Seat is one caller's place in a flight.
type Seat[R any] struct {
	*Flight[R]
	First   bool // the caller has to run the flight, which is new
	After   bool // not now: see AwaitTurn
	boarded int  // the flight's turn when the caller came
}

// A Hold is how a caller has a result.
type Hold int

const (
	Owned  Hold = iota // it is the caller's own
	Shared             // it is another caller's own, who may be changing it
	Common             // it is nobody's own: all who have it copy it
)

// A Group is the flights of one cache, at most one for a key that can be boarded.
type Group[R any] struct {
	Running sync.WaitGroup // flights, and what else Close waits for; added to while not closed, or by one who is counted

	mu        sync.Mutex
	closed    bool
	flights   map[string]*Flight[R] // that can be boarded
	refreshes map[string]*Flight[R] // that callers come to by being handed over; what is ended is having its Rest
}

func NewGroup[R any]() *Group[R] {
	return &Group[R]{flights: make(map[string]*Flight[R]), refreshes: make(map[string]*Flight[R])}
}

// Board finds a seat for a call: in the flight of key, or in a new one, which counts as running. prev is the
// flight in which the call has been late, or nil; outer is the load from inside of which it comes, or nil.
func (g *Group[R]) Board(key string, prev *Flight[R], outer *Load) (Seat[R], error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	f := g.flights[key]
	if prev != nil && prev.next != nil {
		f = prev.next
	}
	// Who came before may go on to a flight that Close waits for; a load that it waits for may need others.
	if g.closed && (prev == nil || f == nil) && !outer.inside(g) {
		return Seat[R]{}, ErrClosed
	}
	s := Seat[R]{Flight: f}
	switch {
	case f == nil:
		s.Flight, s.First = g.newFlight(key, outer), true
		s.due = true
		g.flights[key] = s.Flight
	case prev == nil && f.reads():
		if f.after == nil {
			f.after = g.newFlight(key, outer)
			f.after.begin = make(chan struct{})
			s.First, s.After = true, true
		}
		s.Flight = f.after
	case prev == nil:
		s.boarded = f.turn
	default:
		s.boarded = prev.handed
	}
	if prev != nil {
		prev.next = s.Flight
		s.sought = true
	}
	if !outer.waitFor(&s.Load) {
		return Seat[R]{}, ErrRecursive
	}
	s.callers++
	s.exempt = s.exempt || outer != nil
	s.wake() // is it still worth waiting for what it waits for?
	return s, nil
}

func (g *Group[R]) newFlight(key string, outer *Load) *Flight[R] {
	g.Running.Add(1)
	return &Flight[R]{Key: key, turn: FirstTurn, Load: Load{cache: g, outer: outer}}
}

// late reports whether a seat was taken after the load began.
func (s Seat[R]) late() bool { return s.loadTurn > 0 && s.boarded >= s.loadTurn }

// Wait waits for the end of the flight, for ctx, or for the news that waiting is in vain, and gives up the
// seat. ok is false when the caller has to board again, or leave with err. The first who takes a result owns
// it, unless it is Common. If the deadline of ctx comes first, the caller takes what Offer has left, if
// anything: ok is true then and err is that of ctx.
func (g *Group[R]) Wait(ctx context.Context, s Seat[R], outer *Load) (r *R, hold Hold, ok bool, err error) {
	defer outer.leave(&s.Load)
	g.mu.Lock()
	defer g.mu.Unlock()
	if !s.ended {
		done, gone := s.news()
		g.mu.Unlock()
		select {
		case <-done:
		case <-gone:
		case <-ctx.Done():
		}
		g.mu.Lock()
	}
	s.callers--
	if s.ended && s.boarded < s.asOf && !(s.broken && s.late()) { // even if ctx has just ended too
		switch {
		case s.Common:
			hold = Common
		case s.taken:
			hold = Shared
		}
		s.taken = true
		return s.result, hold, true, nil
	}
	if !s.ended && s.callers == 0 {
		s.wake() // it is nobody's now
	}
	if err = ctx.Err(); err == context.DeadlineExceeded && s.boarded < s.offered {
		return s.offer, Shared, true, err
	}
	return r, hold, false, err
}

// news returns what ends the waiting in a seat.
func (s Seat[R]) news() (done, gone <-chan struct{}) {
	if s.done == nil {
		s.done, s.gone = make(chan struct{}), make(chan struct{})
		if s.broken {
			close(s.gone)
		}
	}
	if s.late() {
		return s.done, s.gone
	}
	return s.done, nil
}

// BeginFill readies a flight for more than a read, unless it is handed over: see HandOver. handOver says whether
// it may be.
func (g *Group[R]) BeginFill(f *Flight[R], handOver bool) (begun bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if handOver && g.handOver(f) {
		return false
	}
	if f.Nudge == nil {
		f.Nudge = make(chan struct{}, 1)
	}
	g.pass(f, f)
	return true
}

// Wanted reports whether anybody waits for a flight.
func (g *Group[R]) Wanted(f *Flight[R]) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return f.callers > 0
}

// Offer says what callers may take, as of a turn, when they can wait no longer.
func (g *Group[R]) Offer(f *Flight[R], r R, asOf int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	f.offer, f.offered = &r, asOf
}

// Tick begins a turn and returns it.
func (g *Group[R]) Tick(f *Flight[R]) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	f.turn++
	return f.turn
}

// BeginLoad begins the turn of the load and returns it.
func (g *Group[R]) BeginLoad(f *Flight[R]) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	f.turn++
	f.loadTurn = f.turn
	return f.turn
}

// Exempt reports whether a call from inside of another load waits: that load may hold a place to load until
// this one has ended, so this one must not wait for a place of its own. It runs in the place of that one.
func (g *Group[R]) Exempt(f *Flight[R]) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return f.exempt
}

// End makes a result final, true as of turn asOf, and lets the callers go. Only the first End of a flight counts.
func (g *Group[R]) End(f *Flight[R], r R, asOf int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !f.ended {
		g.end(f, new(r), asOf)
	}
}

// Land is End and Wait for the caller who has run a flight by itself, if that has come no further than its read: r is
// as if it had been taken by Wait.
func (g *Group[R]) Land(s Seat[R], r *R, outer *Load) Hold {
	defer outer.leave(&s.Load)
	g.mu.Lock()
	defer g.mu.Unlock()
	var result *R
	if s.callers > 1 || s.sought {
		result = new(*r)
	}
	g.end(s.Flight, result, FirstTurn)
	s.callers--
	s.taken = true
	if s.Common {
		return Common
	}
	return Owned
}

// EndIfDeserted ends a flight, without a result, if nobody waits for it.
func (g *Group[R]) EndIfDeserted(f *Flight[R]) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if f.callers > 0 || f.ended {
		return f.ended
	}
	g.end(f, nil, 0)
	return true
}

func (g *Group[R]) end(f *Flight[R], r *R, asOf int) {
	f.ended, f.result, f.asOf, f.Load.over = true, r, asOf, true
	f.Common = f.Common && f.callers > 1
	g.forget(f)
	if f.done != nil {
		close(f.done)
	}
	if after := f.after; after != nil {
		f.after = nil // or who is slow to take the result of f would keep those of all flights since
		g.beginAfter(after)
	}
	if f.Refresh && f.Rest > 0 && g.refreshes[f.Key] == nil {
		resting := &Flight[R]{Key: f.Key, Refresh: true, Of: f.Of, ended: true} // and nothing of the value
		g.refreshes[f.Key] = resting
		time.AfterFunc(f.Rest, func() {
			g.mu.Lock()
			defer g.mu.Unlock()
			g.forget(resting)
		})
	}
}

// forget takes a flight out of the maps: nobody can board it any more, but for those who follow a next.
func (g *Group[R]) forget(f *Flight[R]) {
	m := g.flights
	if f.Refresh {
		m = g.refreshes
	}
	if m[f.Key] == f {
		delete(m, f.Key)
	}
}

// Supersede tells what is under way for key that the key has been deleted, set or made stale.
func (g *Group[R]) Supersede(key string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, f := range []*Flight[R]{g.flights[key], g.refreshes[key]} {
		if f != nil {
			g.breakOff(f)
		}
	}
}

// BreakOff tells a flight that its lock is not its own any more.
func (g *Group[R]) BreakOff(f *Flight[R]) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.breakOff(f)
}

// breakOff forgets a flight whose load has become void for all who came after it began: they board anew at
// once, and later callers do not meet it. A flight that is not loading has only to look again.
func (g *Group[R]) breakOff(f *Flight[R]) {
	switch {
	case f.loadTurn == 0:
		f.wake()
	case !f.broken && !f.ended:
		f.broken = true
		g.forget(f)
		if f.gone != nil {
			close(f.gone)
		}
	}
}

func (f *Flight[R]) wake() {
	select {
	case f.Nudge <- struct{}{}:
	default:
	}
}

// Go runs a function that Running counts; not at all if the group is closed.
func (g *Group[R]) Go(run func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.closed {
		g.Running.Go(run)
	}
}

// Close makes Board refuse and reports whether it had not done so before.
func (g *Group[R]) Close() (first bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	first, g.closed = !g.closed, true
	return first
}

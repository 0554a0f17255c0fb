package flight

import (
	"context"
	"time"
)

// A Caller is one call, which may need the fills of several keys. It joins another fill if the result of the first
// is too old for it.
type Caller struct {
	Outer *Load // the load that made the call, or nil
	Stamp Stamp // taken after the call began

	// Guarded by Fills.mu.
	open int           // how many of its waits are not over
	done chan struct{} // gets a value when Wait may have to return; it may be an old one
}

// Joined reports whether the call has ever called Join. Only the goroutine of the call may ask.
func (c *Caller) Joined() bool { return c.done != nil }

// A Waiter is one caller in the fill of one key. Join and Wait take the waiters of a call together. A stampede of many
// callers for many keys makes a Waiter for each pair of them.
type Waiter[R any] struct {
	Key string
	// Patience is set for a caller that has an old value: it leaves the fill that long after its beginning. The fill
	// goes on then.
	Patience time.Duration
	Empty    bool // the call found the key empty
	// Takes reports whether a result that is valid for the caller will do; nil: each does. It runs with Fills.mu.
	Takes func(r *R) bool

	// Set by Join.
	First  bool // the caller started the fill
	late   bool // the load had begun before the caller first joined
	Fill   *Fill[R]
	Joined time.Time // when
	Err    error     // the caller has not joined
	caller *Caller

	// Set by Wait.
	Verdict Verdict
	Result  *R        // nil if the verdict is Impatient or Left, or if there is none
	Over    time.Time // when the wait was over; others of the call may have lasted longer

	// Guarded by Fills.mu. Without a list a waiter is in no fill any more.
	list       *waiters[R]
	next, prev *Waiter[R]
}

// Before reports whether the caller joined before s, and so may take a result that is valid from s.
func (w *Waiter[R]) Before(s Stamp) bool { return w.caller.Stamp < s }

// over ends a wait: the caller need not wait for this fill any more.
func (w *Waiter[R]) over(now time.Time) {
	w.Over = now
	w.list.remove(w)
	_, verdict := w.brought()
	if w.caller.open--; w.caller.open == 0 || verdict == Outdated {
		select {
		case w.caller.done <- struct{}{}:
		default:
		}
	}
}

// waiters is the list of the waiters in a fill.
type waiters[R any] struct{ first *Waiter[R] }

func (l *waiters[R]) add(w *Waiter[R]) {
	w.list, w.next, w.prev = l, l.first, nil
	if w.next != nil {
		w.next.prev = w
	}
	l.first = w
}

func (l *waiters[R]) remove(w *Waiter[R]) {
	if w.prev != nil {
		w.prev.next = w.next
	} else {
		l.first = w.next
	}
	if w.next != nil {
		w.next.prev = w.prev
	}
	w.list, w.next, w.prev = nil, nil, nil
}

// Join adds a caller to the fills of the keys of ws, or starts fills. Those that it starts run together, in another
// goroutine: start returns the function that runs the fills of the waiters with the indices of. That must call End
// for each of them, and Over, from any goroutine, when all its work is done.
func (g *Fills[R]) Join(call *Caller, ws []*Waiter[R], start func(of []int, fills []*Fill[R]) (run func(l *Load))) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if call.done == nil {
		call.done = make(chan struct{}, 1)
	}
	var of []int
	var begun []*Fill[R]
	for i, w := range ws {
		if w.Fill = g.byKey[w.Key]; w.Fill != nil {
			continue
		}
		if g.closed && !call.Outer.inside(g) {
			w.Err = ErrClosed
			continue
		}
		w.First, w.Fill = true, g.add(&Fill[R]{Key: w.Key, empty: w.Empty})
		of, begun = append(of, i), append(begun, w.Fill)
	}
	g.start(call.Outer, of, begun, start)
	now := time.Now()
	for _, w := range ws {
		switch w.Joined = now; {
		case w.Err != nil:
		case call.Outer.waitFor(&w.Fill.member):
			g.join(call, w, w.Fill)
		default:
			w.Err = ErrRecursive
		}
	}
}

func (g *Fills[R]) join(call *Caller, w *Waiter[R], f *Fill[R]) {
	w.Fill, w.caller = f, call
	w.late = f.phase == loading && call.Stamp >= f.running.since
	f.waiters.add(w)
	call.open++
	f.callers.all++
	f.callers.kept = f.callers.kept || w.Patience > 0
	if !w.late {
		f.callers.early++
	}
	if !w.First && f.load.queued == nil && w.Patience == 0 { // a caller with an old value is in no hurry
		f.wake()
	}
}

// A Verdict says what a caller may do with the result of a fill.
type Verdict int8

const (
	Waiting   Verdict = iota // the fill has not ended
	Owned                    // the caller owns the result: it has started the fill
	Shared                   // the caller that started the fill owns the result, and may be changing it
	Outdated                 // the result, if there is one, is older than the call, or will not do
	Impatient                // the caller has left the fill when the Patience of its waiter was over
	Left                     // the caller's context ended first
)

// Wait waits until all fills that a call has joined have ended, or one of them brings nothing that the caller takes:
// its result is void for this caller, or the caller leaves it, since its Patience is over. When ctx ends, the caller
// leaves them all. Those that still have the verdict Waiting are for another Wait.
func (g *Fills[R]) Wait(ctx context.Context, call *Caller, ws []*Waiter[R]) {
	for {
		goOn, until := g.settle(ctx, ws)
		if !goOn {
			break
		}
		var impatient <-chan time.Time
		if !until.IsZero() {
			impatient = time.After(time.Until(until))
		}
		select {
		case <-call.done:
		case <-impatient:
		case <-ctx.Done():
		}
	}
	if call.Outer != nil {
		for _, w := range ws {
			if w.Verdict != Waiting {
				call.Outer.leave(&w.Fill.member)
			}
		}
	}
}

// settle sets the verdicts of waits that are over. It reports whether Wait goes on, and when the caller leaves the
// first of the fills that have not ended; zero: before none of them ends.
func (g *Fills[R]) settle(ctx context.Context, ws []*Waiter[R]) (goOn bool, until time.Time) {
	ended, now := ctx.Err() != nil, time.Now()
	open, asksAgain := false, false
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, w := range ws {
		switch {
		case w.Verdict != Waiting:
		case w.list == nil:
			w.Result, w.Verdict = w.brought()
		case ended:
			g.leave(w, Left, now)
		case w.Patience == 0:
			open = true
		default:
			end := w.Fill.Begun.Add(w.Patience)
			if !now.Before(end) {
				g.leave(w, Impatient, now)
			} else if open = true; until.IsZero() || end.Before(until) {
				until = end
			}
		}
		asksAgain = asksAgain || w.Verdict == Outdated || w.Verdict == Impatient
	}
	return open && !asksAgain, until
}

// brought returns the result and the verdict for a caller that takes them now. Which caller owns the result does not
// depend on the order in which they do: it may differ from the copies, by what the codec drops.
func (w *Waiter[R]) brought() (*R, Verdict) {
	switch o := &w.Fill.outcome; {
	case w.Fill.phase != done || w.late && w.Fill.superseded || o.result == nil:
		return nil, Outdated
	case !w.Before(o.validFrom):
		return o.result, Outdated
	case w.Takes != nil && !w.Takes(o.result):
		return o.result, Outdated
	case w.First:
		return o.result, Owned
	default:
		return o.result, Shared
	}
}

// leave removes a caller from a fill that has not ended.
func (g *Fills[R]) leave(w *Waiter[R], why Verdict, now time.Time) {
	f := w.Fill
	f.remove(w, now)
	w.Verdict = why
	if !f.callers.want() {
		f.wake()
	}
	f.cancelIfVoid()
}

// remove ends a wait before the fill has ended.
func (f *Fill[R]) remove(w *Waiter[R], now time.Time) {
	w.over(now)
	f.callers.all--
	if !w.late {
		f.callers.early--
	}
}

package flight

import "context"

// The flight after a read: see Flight. Board makes it, and the end of the read begins it or passes its callers on.

// reads reports whether a flight has not come further than its read.
func (f *Flight[R]) reads() bool { return !f.ended && f.Nudge == nil }

// AwaitTurn waits until a flight that is after another one is to be begun by the caller who has made it. It returns
// false if that is not to be: the other one goes on, or ctx has ended, be it in the same instant. The caller has to
// call RunAfter then, since others may wait.
func (g *Group[R]) AwaitTurn(ctx context.Context, f *Flight[R]) bool {
	select {
	case <-f.begin:
	case <-ctx.Done():
		return false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return !f.ended && ctx.Err() == nil
}

// RunAfter says how to run such a flight without the caller who has made it. run is called in a goroutine of its own, as
// soon as the flight is due; never, if it has ended, or if all callers have left by then.
func (g *Group[R]) RunAfter(f *Flight[R], run func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	f.run = run
	if f.due && !f.ended {
		go run()
	}
}

// pass hands the callers of the flight after f over to another one.
func (g *Group[R]) pass(f, to *Flight[R]) {
	if after := f.after; after != nil {
		f.after = nil
		after.next, after.handed = to, to.turn
		g.cancel(after)
	}
}

// beginAfter begins a flight that was after another one. Whose goroutine runs it is the last that the end of that one
// makes ready, and so the first to run: the next read is sent before all those who have their value now work with it.
func (g *Group[R]) beginAfter(f *Flight[R]) {
	if f.callers == 0 {
		g.cancel(f)
		return
	}
	f.due = true
	g.flights[f.Key] = f
	if f.run != nil {
		go f.run()
	} else {
		close(f.begin)
	}
}

// cancel ends a flight that has not begun.
func (g *Group[R]) cancel(f *Flight[R]) {
	g.end(f, nil, 0)
	close(f.begin)
	g.Running.Done()
}

package flight

// The flight after a read: see Flight. Board makes it, and the end of the read begins it or passes its callers on.

// reads reports whether a flight has not come further than its read.
func (f *Flight[R]) reads() bool { return !f.ended && f.Nudge == nil }

// RunAfter says how to run a flight that is after another one. run is called in a goroutine of its own, as soon as
// that one has ended with its read; never, if that one goes on, or if all callers have left by then.
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

// beginAfter begins a flight that was after another one. Its goroutine is the last that the end of that one makes
// ready, and so the first to run: the next read is sent before all those who have their value now work with it.
func (g *Group[R]) beginAfter(f *Flight[R]) {
	if f.callers == 0 {
		g.cancel(f)
		return
	}
	f.due = true
	g.flights[f.Key] = f
	if f.run != nil {
		go f.run()
	}
}

// cancel ends a flight that has not begun.
func (g *Group[R]) cancel(f *Flight[R]) {
	var none R
	g.end(f, none, 0)
	g.Running.Done()
}

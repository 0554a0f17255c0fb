package flight

import "time"

// Go runs a function that Drain waits for. After Close it does nothing.
func (g *Fills[R]) Go(run func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.closed {
		g.running.Go(run)
	}
}

// Behind runs a function that Drain waits for. Only a fill that has not called over may use it.
func (g *Fills[R]) Behind(run func()) { g.running.Go(run) }

// Later is Behind after d, unless stop is called first.
func (g *Fills[R]) Later(d time.Duration, run func()) (stop func()) {
	g.running.Add(1)
	timer := time.AfterFunc(d, func() {
		defer g.running.Done()
		run()
	})
	return func() {
		if timer.Stop() {
			g.running.Done()
		}
	}
}

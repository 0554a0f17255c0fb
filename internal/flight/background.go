package flight

import (
	"math"
	"sync"
	"time"
)

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

// A Later is a function that runs in a while, unless Stop is called first.
type Later struct {
	timer   *time.Timer // nil: none
	running *sync.WaitGroup
}

// Later makes l run a function as Behind does, after d.
func (g *Fills[R]) Later(l *Later, d time.Duration, run func()) {
	g.running.Add(1)
	*l = Later{time.AfterFunc(math.MaxInt64, func() { // not before l is set
		defer g.running.Done()
		run()
	}), &g.running}
	l.timer.Reset(d)
}

func (l Later) Stop() {
	if l.timer != nil && l.timer.Stop() {
		l.running.Done()
	}
}

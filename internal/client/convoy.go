package client

import (
	"sync"
	"time"
)

// A Convoy is commands of several goroutines for one server that are about to be sent at the same
// time. They go in one pipeline, whether they would find free connections or not. A command that
// comes later goes as if there were no Convoy. A nil *Convoy has none.
type Convoy struct {
	mu       sync.Mutex
	expected int // commands; 0: not known
	waiting  []*waiter
	gate     *gate
	timer    *time.Timer
	departed bool
}

// linger is how long a Convoy waits for commands that do not come.
const linger = 2 * time.Millisecond

// Expect tells how many commands will come.
func (v *Convoy) Expect(n int) {
	v.mu.Lock()
	v.expected = n
	depart := len(v.waiting) >= n && v.timer != nil
	v.mu.Unlock()
	if depart {
		v.depart()
	}
}

// join adds a command. It returns false if the Convoy has departed, or goes through another gate.
func (v *Convoy) join(g *gate, w *waiter) bool {
	if v == nil {
		return false
	}
	v.mu.Lock()
	if v.departed || v.gate != nil && v.gate != g {
		v.mu.Unlock()
		return false
	}
	v.gate, v.waiting = g, append(v.waiting, w)
	if v.timer == nil {
		v.timer = time.AfterFunc(linger, v.depart)
	}
	full := len(v.waiting) == v.expected
	v.mu.Unlock()
	if full {
		v.depart()
	}
	return true
}

func (v *Convoy) depart() {
	v.mu.Lock()
	departed := v.departed
	v.departed = true
	v.mu.Unlock()
	if !departed {
		v.timer.Stop()
		v.gate.line(v.waiting...)
	}
}

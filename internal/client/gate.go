package client

import (
	"container/list"
	"sync"
	"sync/atomic"
)

// A gate admits as many commands at a time as can be sent: more would wait for a connection of the pool, and their time
// would run before the server has been asked. The others wait in the order in which they came. No command overtakes
// another, or one could wait for ever.
type gate struct {
	size  uint64
	state atomic.Uint64 // commands admitted in the lower half, and waiting in the upper one

	mu    sync.Mutex
	queue list.List // of chan struct{}, each of a waiting command; protected by mu
}

const oneWaiting = 1 << 32

func admitted(state uint64) uint64 { return state % oneWaiting }

// tryEnter admits a command if there is room for it, and no other one waits.
func (g *gate) tryEnter() bool {
	for {
		state := g.state.Load()
		if state >= g.size { // no command waits in a state that is less
			return false
		}
		if g.state.CompareAndSwap(state, state+1) {
			return true
		}
	}
}

// A place is that of a command which waits at a gate.
type place struct {
	admitted chan struct{} // is closed when the command is
	element  *list.Element
}

// line puts a command into the line.
func (g *gate) line() place {
	g.mu.Lock()
	defer g.mu.Unlock()
	admitted := make(chan struct{})
	p := place{admitted, g.queue.PushBack(admitted)}
	g.state.Add(oneWaiting)
	g.admit() // a command may have left before it could see this one wait
	return p
}

// giveUp takes a command out of the line, or back out of the gate if it has been admitted by then.
func (g *gate) giveUp(p place) {
	g.mu.Lock()
	defer g.mu.Unlock()
	select {
	case <-p.admitted:
		g.state.Add(^uint64(0))
		g.admit()
	default:
		g.queue.Remove(p.element)
		g.state.Add(^uint64(oneWaiting - 1))
	}
}

// leave makes room for the next command.
func (g *gate) leave() {
	if g.state.Add(^uint64(0)) >= oneWaiting {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.admit()
	}
}

// admit lets in the commands that come first. g.mu is held.
func (g *gate) admit() {
	for first := g.queue.Front(); first != nil; first = g.queue.Front() {
		state := g.state.Load()
		if admitted(state) >= g.size {
			return
		}
		if g.state.CompareAndSwap(state, state+1-oneWaiting) {
			close(g.queue.Remove(first).(chan struct{}))
		}
	}
}

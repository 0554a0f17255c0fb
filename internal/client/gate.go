package client

import (
	"container/list"
	"sync"
	"sync/atomic"
)

// A gate admits as many commands at a time as can be sent. More commands would wait for a
// connection of the pool, while their time is running although the server has not been asked. The
// others queue in order. No command overtakes another, so that none waits for ever.
type gate struct {
	size  uint64
	state atomic.Uint64 // lower half: commands admitted; upper half: commands waiting

	mu    sync.Mutex
	queue list.List // of chan struct{}, one per waiting command; protected by mu
}

const oneWaiting = 1 << 32

func admitted(state uint64) uint64 { return state % oneWaiting }

// tryEnter admits a command if there is room and no command waits.
func (g *gate) tryEnter() bool {
	for {
		state := g.state.Load()
		if state >= g.size { // a smaller state has no waiting command
			return false
		}
		if g.state.CompareAndSwap(state, state+1) {
			return true
		}
	}
}

// A waiter is a command that waits at a gate.
type waiter struct {
	admitted chan struct{} // closed when the command is admitted
	element  *list.Element
}

// enqueue adds a command to the queue.
func (g *gate) enqueue() waiter {
	g.mu.Lock()
	defer g.mu.Unlock()
	admitted := make(chan struct{})
	w := waiter{admitted, g.queue.PushBack(admitted)}
	g.state.Add(oneWaiting)
	g.admit() // a command may have left before it could see this one
	return w
}

// giveUp removes a command from the queue, or makes it leave if it has been admitted.
func (g *gate) giveUp(w waiter) {
	g.mu.Lock()
	defer g.mu.Unlock()
	select {
	case <-w.admitted:
		g.state.Add(^uint64(0))
		g.admit()
	default:
		g.queue.Remove(w.element)
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

// admit admits the first waiting commands. The caller holds g.mu.
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

package client

import (
	"container/list"
	"sync"
	"sync/atomic"
	"time"

	"github.com/singlefill/singlefill/internal/line"
)

// A gate admits as many commands at a time as can be sent. The others queue in order. Only what holds locks overtakes
// what asks for them ([Command.Holds]), so that none waits for ever. The first ones in the queue take the next free
// place together: see [group].
//
// The pool of the client has a queue, too. But RedisTimeout would include the time in that queue, in which the
// server has not been asked: with a thousand cold keys and ten connections the last commands failed at a healthy
// Redis. The gates of a server, for commands that go alone, for those that may go together, and for pipelines of
// many keys ([throttle]), admit as many as the pool has connections; all caches and locks on one client share them.
// RedisTimeout begins when the gate admits the command. The wait ends with the caller, when the server is away, or
// when no command that has passed the gate was answered for RedisTimeout, or for the rest of it if the command waits
// to be sent again. Pings pass none: they may be answered, on connections that work, while those that the queue
// waits for are not. A place is free again when the time of its command is over, although a client that ignores
// deadlines keeps the connection for longer: with few places, two lost replies would stop everything for
// ReadTimeout. The gate is not a semaphore.Weighted: only a context can wake its waiters, and each command would
// need one. See TestWait_TimeBeginsWhenSent, TestWait_CallerLeaves, TestWait_FrozenServer,
// TestWait_OnlyPingsAnswered, TestTogether_LostReply, TestClient_ManyColdKeys.
type gate struct {
	size  uint64
	line  *line.Line
	state atomic.Uint64 // lower half: places taken; upper half: commands waiting

	mu    sync.Mutex
	queue list.List   // of *waiter; protected by mu
	moved time.Time   // when the last command was answered while others waited, or a group was sent; protected by mu
	timer *time.Timer // to look whether the queue moves
	due   time.Time   // when it is due; zero: it is not set, or has just fired; protected by mu
	most  int         // length of the next group; protected by mu
}

const oneWaiting = 1 << 32

func taken(state uint64) uint64 { return state % oneWaiting }

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
	parcel
	begun   time.Time
	decided chan struct{} // closed when the command is admitted, or the queue has not moved for its time
	stuck   bool          // it has not moved
	at      time.Time     // when the command was admitted; it is set before it can be sent
	group   *group        // with which it has been admitted; nil: alone
	element *list.Element
}

// enqueue adds a command to the queue.
func (g *gate) enqueue(p parcel) *waiter {
	w := &waiter{parcel: p, begun: time.Now(), decided: make(chan struct{})}
	g.mu.Lock()
	defer g.mu.Unlock()
	if p.first {
		w.element = g.queue.PushFront(w)
	} else {
		w.element = g.queue.PushBack(w)
	}
	g.state.Add(oneWaiting)
	g.lookAt(w.begun.Add(p.timeout))
	g.admit(false) // a command may have left before it could see this one
	return w
}

// giveUp removes a command from the queue, or makes it leave if it has been admitted. It returns
// false if that is too late: others have taken the command along.
func (g *gate) giveUp(w *waiter) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case !over(w.decided):
		g.remove(w)
	case w.stuck:
	case w.group != nil:
		return w.group.leaveOut(w)
	default:
		g.state.Add(^uint64(0))
		g.admit(false)
	}
	return true
}

func (g *gate) remove(w *waiter) {
	g.queue.Remove(w.element)
	g.state.Add(^uint64(oneWaiting - 1))
}

// leave makes room for the next commands: several of them if this one was answered. At a server that
// does not answer, a single one finds that out.
func (g *gate) leave(answered bool) {
	if g.state.Add(^uint64(0)) < oneWaiting {
		return
	}
	if !answered && g.isDue() {
		g.look()
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if answered {
		g.moved = time.Now()
	}
	g.admit(answered)
}

// lookAt has the gate look whether its queue moves, at the latest when that is due. One timer looks for all that wait:
// if each had its own, thousands would wake up at a time, and hold up those that bring the answers. The caller holds
// g.mu.
func (g *gate) lookAt(due time.Time) {
	if !g.due.IsZero() && !due.Before(g.due) {
		return
	}
	if g.due = due; g.timer != nil {
		g.timer.Reset(time.Until(due))
		return
	}
	g.timer = time.AfterFunc(time.Until(due), func() {
		if g.isDue() { // it may be set again just as it fires
			g.look()
		}
	})
}

// isDue reports whether a look is due, or on its way.
func (g *gate) isDue() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if time.Now().Before(g.due) {
		return false
	}
	g.due = time.Time{}
	return true
}

// look gives up on the commands that have waited for their time while none that had passed the gate was answered: first
// on one, then on two, and so on, since in a busy process answers may be about to arrive.
func (g *gate) look() {
	for most, more := 1, true; more; most *= 2 {
		g.line.Look() // which may be due to go away; and it lets others run
		g.mu.Lock()
		more = g.giveUpOn(most)
		g.mu.Unlock()
	}
}

// giveUpOn gives up on at most so many commands, and reports whether there are more. If not, it has the gate look again
// when the next one is due. The caller holds g.mu.
func (g *gate) giveUpOn(most int) (more bool) {
	now := time.Now()
	for e := g.queue.Front(); e != nil; {
		w := e.Value.(*waiter)
		e = e.Next()
		waited := min(now.Sub(w.begun), now.Sub(g.moved))
		if waited > w.timeout+w.timeout/10 { // the process was held up
			waited = w.timeout * 3 / 4
			w.begun = now.Add(-waited)
		}
		if waited < w.timeout {
			g.lookAt(now.Add(w.timeout - waited))
			continue
		}
		if most--; most < 0 {
			return true
		}
		g.remove(w)
		w.stuck = true
		close(w.decided)
	}
	return false
}

// admit admits the first waiting commands. The caller holds g.mu.
func (g *gate) admit(together bool) {
	for g.queue.Len() > 0 && taken(g.state.Load()) < g.size {
		most := 1
		if together {
			most = max(g.most, 1)
		}
		ready := g.next(most)
		g.state.Add(1 - uint64(len(ready))*oneWaiting)
		var s *group
		if len(ready) > 1 {
			s = &group{waiters: ready, done: make(chan struct{})}
			go s.send(g) // which waits for g.mu
		}
		now := time.Now()
		for _, w := range ready {
			w.at, w.group = now, s
			close(w.decided)
		}
	}
}

// next removes the first waiter from the queue, and those behind it that can go with it, most in all. The caller
// holds g.mu.
func (g *gate) next(most int) (ready []*waiter) {
	for front := g.queue.Front(); front != nil && len(ready) < most; front = g.queue.Front() {
		w := front.Value.(*waiter)
		if len(ready) > 0 && (w.cmd == nil || ready[0].cmd == nil || w.timeout != ready[0].timeout) {
			break // one of them goes alone, or their times differ
		}
		ready = append(ready, g.queue.Remove(front).(*waiter))
	}
	return ready
}

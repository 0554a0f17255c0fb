package flight

import (
	"bytes"
	"context"
	"runtime"
	"strconv"
	"sync"
)

// graph guards the loads of all caches of this process: which waits for which, and in whose place it runs.
var graph sync.Mutex

// A Load is one fill in the graph of loads that wait for other loads of this process, of whatever cache: a Loader
// that asks a cache waits for the fill it joins.
type Load struct {
	cache any   // the *Fills that it belongs to
	outer *Load // the load from inside which it was started, or nil

	// Guarded by graph.
	over      bool // its fill has ended, though its Loader or a context of it may live on
	goroutine int  // which runs its Loader
	slot      *Slot
	waits     map[*Load]calls // loads that calls from inside this one wait for
	waiters   map[*Load]int   // loads from inside which calls wait for this one
}

// calls is how many calls from inside one load wait for another.
type calls struct {
	all      int
	blocking int // those in the goroutine of the Loader, which cannot go on before they return
}

type loadKey struct{}

// Inside returns a context by which calls are known to come from inside l. It is called in the goroutine that runs the
// Loader.
func (l *Load) Inside(ctx context.Context) context.Context {
	id := goroutineID()
	graph.Lock()
	l.goroutine = id
	graph.Unlock()
	return context.WithValue(ctx, loadKey{}, l)
}

// LoadOf returns the load from inside which a call with ctx comes, or nil.
func LoadOf(ctx context.Context) *Load {
	l, _ := ctx.Value(loadKey{}).(*Load)
	return l
}

// finish notes that the fill of l has ended.
func (l *Load) finish() {
	graph.Lock()
	defer graph.Unlock()
	l.over = true
}

// inside reports whether l is, or runs inside, a load of cache that is not over.
func (l *Load) inside(cache any) bool {
	graph.Lock()
	defer graph.Unlock()
	for ; l != nil; l = l.outer {
		if l.cache == cache && !l.over {
			return true
		}
	}
	return false
}

// Awaited reports whether a call from inside another load waits for l.
func (l *Load) Awaited() bool {
	graph.Lock()
	defer graph.Unlock()
	return len(l.waiters) > 0
}

// waitFor notes that a call from inside l waits for other, which may run in the place of l meanwhile.
//
// It refuses a wait that could never end: the call blocks the Loader of l, and other waits for l in the same way. A call
// in another goroutine is not refused, since the Loader need not wait for it. If it does, that circle ends with
// LoadTimeout.
func (l *Load) waitFor(other *Load) bool {
	if l == nil {
		return true
	}
	id := goroutineID()
	graph.Lock()
	defer graph.Unlock()
	n := l.waits[other]
	n.all++
	if id == l.goroutine {
		if other.blocksOn(l, make(map[*Load]bool)) {
			return false
		}
		n.blocking++
	}
	if l.waits == nil {
		l.waits = make(map[*Load]calls)
	}
	if other.waiters == nil {
		other.waiters = make(map[*Load]int)
	}
	l.waits[other] = n
	other.waiters[l]++
	l.slot.offer(other.slot)
	return true
}

// leave takes back what waitFor noted.
func (l *Load) leave(other *Load) {
	if l == nil {
		return
	}
	id := goroutineID()
	graph.Lock()
	defer graph.Unlock()
	n := l.waits[other]
	n.all--
	if id == l.goroutine {
		n.blocking--
	}
	l.waits[other] = n
	if n.all == 0 {
		delete(l.waits, other)
	}
	if other.waiters[l]--; other.waiters[l] == 0 {
		delete(other.waiters, l)
	}
}

// blocksOn reports whether l is target, or cannot end before it.
func (l *Load) blocksOn(target *Load, seen map[*Load]bool) bool {
	if l == target {
		return true
	}
	seen[l] = true
	for next, n := range l.waits {
		if n.blocking > 0 && !seen[next] && next.blocksOn(target, seen) {
			return true
		}
	}
	return false
}

// goroutineID returns the number of the calling goroutine, which the runtime shows in a stack trace only, as
// "goroutine 42 [running]:". net/http finds it in the same way. Only loads and calls from inside loads need it.
func goroutineID() int {
	var buf [40]byte
	text := bytes.TrimPrefix(buf[:runtime.Stack(buf[:], false)], []byte("goroutine "))
	text, _, _ = bytes.Cut(text, []byte(" "))
	id, _ := strconv.Atoi(string(text))
	return id
}

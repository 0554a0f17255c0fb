package flight

import (
	"bytes"
	"context"
	"runtime"
	"slices"
	"strconv"
	"sync"
)

// graph guards the loads of all caches of this process: which load waits for which, and in whose
// slot it runs.
//
// Mutexes are taken in the order Bulk.mu, SharedSlot.mu, graph, and Fills.mu, graph. Whoever holds graph takes
// no other one: functions that are called with it, such as granted of Slot.Queue, may only begin a goroutine.
var graph sync.Mutex

// A Load is the node of one fill in the graph of loads that wait for other loads of this process,
// in any cache. A Loader that calls a cache waits for the fill it joins. The fills that one call
// starts for many keys are one node, since one Loader works for them.
type Load struct {
	cache any   // the *Fills of the fills
	outer *Load // the load that started it, or nil

	// Guarded by graph.
	// fills counts the fills that have not ended. The Loader and its context may live on.
	fills      int
	goroutines []uint64 // run a fill or a Loader
	slot       *Slot
	waits      map[*Load]calls // loads that calls from inside this load wait for
	waiters    map[*Load]int   // loads whose calls wait for this load
}

// calls counts the calls from inside one load that wait for another.
type calls struct {
	all int
	// blocking counts those made in the Loader's goroutine, which cannot go on before they return.
	blocking int
}

type loadKey struct{}

// NewLoad returns the node of a group of fills. outer is the load that starts them, or nil.
func (g *Fills[R]) NewLoad(outer *Load) *Load { return &Load{cache: g, outer: outer} }

// Begin notes that the calling goroutine runs a Loader. The function that it returns notes the end.
func (l *Load) Begin() (end func()) {
	id := goroutineID()
	graph.Lock()
	defer graph.Unlock()
	l.goroutines = append(l.goroutines, id)
	return func() {
		graph.Lock()
		defer graph.Unlock()
		l.goroutines = slices.DeleteFunc(l.goroutines, func(other uint64) bool { return other == id })
	}
}

// start notes that a fill begins.
func (l *Load) start() {
	graph.Lock()
	defer graph.Unlock()
	l.fills++
}

// Inside returns a context that marks calls as made from inside l.
func (l *Load) Inside(ctx context.Context) context.Context {
	return context.WithValue(ctx, loadKey{}, l)
}

// LoadOf returns the load that ctx marks, or nil.
func LoadOf(ctx context.Context) *Load {
	l, _ := ctx.Value(loadKey{}).(*Load)
	return l
}

// finish notes that a fill has ended.
func (l *Load) finish() {
	graph.Lock()
	defer graph.Unlock()
	l.fills--
}

// inside reports whether l, or a load around it, is a load of cache with a fill that has not ended.
func (l *Load) inside(cache any) bool {
	graph.Lock()
	defer graph.Unlock()
	for ; l != nil; l = l.outer {
		if l.cache == cache && l.fills > 0 {
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

// waitFor notes that a call from inside l waits for other, so that other may run in the slot of l.
//
// It returns false if the wait could never end: the call blocks the Loader of l, and other waits
// for l in the same way. Calls from other goroutines are not refused, since the Loader need not
// wait for them. If it does, LoadTimeout ends the circle.
func (l *Load) waitFor(other *Load) bool {
	if l == nil {
		return true
	}
	id := goroutineID()
	graph.Lock()
	defer graph.Unlock()
	n := l.waits[other]
	n.all++
	if slices.Contains(l.goroutines, id) {
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

// leave undoes waitFor.
func (l *Load) leave(other *Load) {
	if l == nil {
		return
	}
	id := goroutineID()
	graph.Lock()
	defer graph.Unlock()
	n := l.waits[other]
	n.all--
	if slices.Contains(l.goroutines, id) {
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

// goroutineID returns the number of the calling goroutine. A call from inside a load certainly blocks the load only if
// it runs in the goroutine of the Loader: a prefetch in another one is no circle, and looks the same otherwise. The runtime shows it only in stack
// traces, as "goroutine 42 [running]:". net/http reads it in the same way, to check itself with
// DEBUG_HTTP2_GOROUTINES=1. It takes about 1 µs, and 1 µs more for each function on the stack. Only fills and calls from inside loads need it.
func goroutineID() uint64 {
	var buf [40]byte
	return goroutineNumber(buf[:runtime.Stack(buf[:], false)])
}

func goroutineNumber(stack []byte) uint64 {
	text, _, _ := bytes.Cut(bytes.TrimPrefix(stack, []byte("goroutine ")), []byte(" "))
	id, _ := strconv.ParseUint(string(text), 10, 64)
	return id
}

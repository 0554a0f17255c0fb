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
// Mutexes are taken in the order Fills.mu, graph. A function that holds graph takes
// no other one: functions that are called with it, such as granted of Slot.Queue, may only begin a goroutine.
var graph sync.Mutex

// A Load runs the fills of one or several keys together, since one Loader works for them. In the graph it is a node: a
// Loader that calls a cache waits for the fills that it joins, and so for their loads. A fill can move to another load.
type Load struct {
	Woken chan struct{} // has an element when a fill is to be looked at

	// Guarded by Fills.mu.
	queued *queued // nil: it does not wait for a slot
	nudged bool

	cache any   // the *Fills of the fills
	outer *Load // the load that started it, or nil

	// Guarded by graph.
	fills      []*member // that have not ended. The Loader and its context may live on
	goroutines []uint64  // run the load or its Loader
	slot       *Slot
	waits      map[*member]calls // fills that calls from inside this load wait for
}

// A member is a fill in the graph.
type member struct {
	load    *Load         // that runs the fill; changed with Fills.mu and graph
	at      int           // in load.fills, or ended; guarded by graph
	waiters map[*Load]int // loads whose calls wait for the fill; guarded by graph
}

// calls counts the calls from inside one load that wait for a fill.
type calls struct {
	all int
	// blocking counts those made in the Loader's goroutine, which cannot go on before they return.
	blocking int
}

type loadKey struct{}

// newLoad returns a load without fills. outer is the load that starts it, or nil.
func newLoad(cache any, outer *Load) *Load {
	return &Load{Woken: make(chan struct{}, 1), cache: cache, outer: outer}
}

// Begin notes that the calling goroutine, whose number it returns, runs a Loader.
func (l *Load) Begin() (goroutine uint64) { return l.begin(goroutineID()) }

func (l *Load) begin(goroutine uint64) uint64 {
	graph.Lock()
	defer graph.Unlock()
	l.goroutines = append(l.goroutines, goroutine)
	return goroutine
}

// End notes that a goroutine does so no more.
func (l *Load) End(goroutine uint64) {
	graph.Lock()
	defer graph.Unlock()
	l.goroutines = slices.DeleteFunc(l.goroutines, func(other uint64) bool { return other == goroutine })
}

// take takes a fill that begins, or is of another load.
func (l *Load) take(f *member) {
	graph.Lock()
	defer graph.Unlock()
	if f.load != nil {
		f.part()
	}
	f.load, f.at = l, len(l.fills)
	l.fills = append(l.fills, f)
}

// part removes a fill from its load. The caller holds graph.
func (f *member) part() {
	if f.at == ended {
		return
	}
	l := f.load
	end := len(l.fills) - 1
	last := l.fills[end]
	l.fills[f.at], last.at = last, f.at
	l.fills[end], l.fills = nil, l.fills[:end]
	f.at = ended
}

const ended = -1

// parted is called when another load has taken fills.
func (l *Load) parted() {
	graph.Lock()
	defer graph.Unlock()
	l.slot.part()
}

// A Work is done inside a load. A Load is one, of which no more is known.
type Work interface{ Load() *Load }

func (l *Load) Load() *Load { return l }

// Inside returns a context that marks calls as made by some work.
func Inside(ctx context.Context, w Work) context.Context { return context.WithValue(ctx, loadKey{}, w) }

// WorkOf returns the work that ctx marks, or nil.
func WorkOf(ctx context.Context) Work {
	w, _ := ctx.Value(loadKey{}).(Work)
	return w
}

// LoadOf returns the load that ctx marks, or nil.
func LoadOf(ctx context.Context) *Load {
	if w := WorkOf(ctx); w != nil {
		return w.Load()
	}
	return nil
}

// finish notes that the fill has ended.
func (f *member) finish() {
	graph.Lock()
	defer graph.Unlock()
	if f.part(); len(f.load.fills) > 0 {
		f.load.slot.part()
	}
}

// open reports whether the fill has not ended. The caller holds graph.
func (f *member) open() bool { return f.at != ended }

// inside reports whether l, or a load around it, is a load of cache with a fill that has not ended.
func (l *Load) inside(cache any) bool {
	graph.Lock()
	defer graph.Unlock()
	for ; l != nil; l = l.outer {
		if l.cache == cache && len(l.fills) > 0 {
			return true
		}
	}
	return false
}

// Awaited reports whether a call from inside another load waits for l.
func (l *Load) Awaited() bool {
	graph.Lock()
	defer graph.Unlock()
	for _, f := range l.fills {
		if len(f.waiters) > 0 {
			return true
		}
	}
	return false
}

// waitFor notes that a call from inside l waits for a fill, so that this may run in the slot of l.
//
// It returns false if the wait could never end: the call blocks the Loader of l, and the load of the fill waits
// for l in the same way. Calls from other goroutines are not refused, since the Loader need not
// wait for them. If it does, LoadTimeout ends the circle.
func (l *Load) waitFor(f *member) bool {
	if l == nil {
		return true
	}
	id := goroutineID()
	graph.Lock()
	defer graph.Unlock()
	n := l.waits[f]
	n.all++
	if slices.Contains(l.goroutines, id) {
		if f.load.blocksOn(l, make(map[*Load]bool)) {
			return false
		}
		n.blocking++
	}
	if l.waits == nil {
		l.waits = make(map[*member]calls)
	}
	if f.waiters == nil {
		f.waiters = make(map[*Load]int)
	}
	l.waits[f] = n
	f.waiters[l]++
	l.slot.offer(f.load.slot)
	return true
}

// leave undoes waitFor.
func (l *Load) leave(f *member) {
	id := goroutineID()
	graph.Lock()
	defer graph.Unlock()
	n := l.waits[f]
	n.all--
	if slices.Contains(l.goroutines, id) {
		n.blocking--
	}
	l.waits[f] = n
	if n.all == 0 {
		delete(l.waits, f)
	}
	if f.waiters[l]--; f.waiters[l] == 0 {
		delete(f.waiters, l)
	}
}

// blocksOn reports whether l is target, or cannot end before it.
func (l *Load) blocksOn(target *Load, seen map[*Load]bool) bool {
	if l == target {
		return true
	}
	seen[l] = true
	for f, n := range l.waits {
		if next := f.load; n.blocking > 0 && f.open() && !seen[next] && next.blocksOn(target, seen) {
			return true
		}
	}
	return false
}

// goroutineID returns the number of the calling goroutine. A call from inside a load certainly blocks the load only if
// it runs in the goroutine of the Loader: a prefetch in another one is no circle, and looks the same otherwise. The
// runtime shows it only in stack traces, as "goroutine 42 [running]:". net/http reads it in the same way, to check
// itself with DEBUG_HTTP2_GOROUTINES=1. It takes about 1 µs, and 1 µs more for each function on the stack. Only fills
// and calls from inside loads need it.
func goroutineID() uint64 {
	var buf [40]byte
	return goroutineNumber(buf[:runtime.Stack(buf[:], false)])
}

func goroutineNumber(stack []byte) uint64 {
	text, _, _ := bytes.Cut(bytes.TrimPrefix(stack, []byte("goroutine ")), []byte(" "))
	id, _ := strconv.ParseUint(string(text), 10, 64)
	return id
}

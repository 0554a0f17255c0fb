package flight

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

var (
	ErrClosed    = errors.New("singlefill: cache is closed")
	ErrRecursive = errors.New("singlefill: a load waits for itself")
)

// Fills holds the fills of one cache, at most one for each key.
//
// A fill brings a value for callers that found none: it waits for another process, or loads.
// Callers join and leave it; it does not end with any of them. A refresh is a fill that starts
// without callers.
//
// A caller must not get a result that was true only before its call. So each result carries a
// stamp, validFrom, that was taken before the command that proves the result was sent. A caller
// takes the result if its own stamp is older. A caller takes its stamp at its first join.
// For example:
//
//  1. caller A joins; the fill locks the key and begins to load v1;
//  2. the source changes to v2; a Delete in another process releases the lock;
//  3. caller B, which began after Delete returned, joins;
//  4. the store of v1 is refused, so v1 is valid only from the beginning of the load;
//  5. A takes v1; B joins another fill, and gets v2.
//
// A caller that joins again keeps its stamp, which is older than every fill begun since. So it does
// not join for ever.
type Fills[R any] struct {
	clock   *Clock
	running sync.WaitGroup
	mu      sync.Mutex // before graph
	closed  bool
	byKey   map[string]*Fill[R]        // fills that callers can join
	resting map[string]rest            // refreshes that ended a moment ago, by key
	most    struct{ fills, rests int } // in these maps: see emptied
	empty   atomic.Int64               // fills in byKey whose key was empty: see Filling

	aborting context.Context // ends at Abort
	abort    context.CancelFunc
}

func NewFills[R any](clock *Clock) *Fills[R] {
	g := &Fills[R]{clock: clock, byKey: make(map[string]*Fill[R]), resting: make(map[string]rest)}
	g.aborting, g.abort = context.WithCancel(context.Background())
	return g
}

// Now returns a stamp of the clock.
func (g *Fills[R]) Now() Stamp { return g.clock.Now() }

// A rest is the time in which an entry is not refreshed again.
type rest struct {
	entry string
	until time.Time
}

// A phase is a stage of a fill.
type phase int

const (
	// acquiring: it asks Redis, waits for the lock's holder, or is queued for a slot (load.queued). Only package fill
	// tells the first two apart.
	acquiring phase = iota
	loading
	done
)

// A Fill brings one key's value.
type Fill[R any] struct {
	Key     string
	Refresh bool // callers have already been answered
	Begun   time.Time
	Call    atomic.Pointer[Call] // of the Loader; nil until that is called, which is later than BeginLoad

	member // of the graph of loads that wait for each other

	entry string // that a refresh is for

	// Guarded by Fills.mu.
	phase      phase
	superseded bool // the result is void for callers that joined since the load began
	empty      bool // the key was empty when the fill began
	waiters    waiters[R]
	callers    callers
	running    running
	outcome    outcome[R]
}

// A Call is a call of the function that loads the value of a fill, or the values of several.
type Call struct {
	Context context.Context
	Keys    int
	Begun   time.Time
}

// queued is what is left of a load that waits for a slot: it has no goroutine.
type queued struct {
	goOn func()
	poll *time.Timer // continues the load
}

// running is set when the load begins.
type running struct {
	since  Stamp
	cancel func()
}

// callers counts the callers in a fill.
type callers struct {
	all   int
	early int // those that joined before the load began
	// kept: a caller that leaves with an old value wants the fill to go on without callers.
	kept bool
}

func (c callers) want() bool { return c.all > 0 || c.kept }

// An outcome is the result of a fill, nil if there is none, and which callers may take it.
type outcome[R any] struct {
	result    *R
	validFrom Stamp
}

// Filling tells which of n keys have a fill that found the key empty; nil: none. Another read would hardly find
// more. A fill that waits for a slot does not count.
func (g *Fills[R]) Filling(n int, key func(i int) string) (filling []bool) {
	if g.empty.Load() == 0 {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	filling = make([]bool, n)
	for i := range n {
		f := g.byKey[key(i)]
		filling[i] = f != nil && f.empty && f.load.queued == nil
	}
	return filling
}

// Refresh starts fills without callers for entries of keys. It leaves out a key that has a fill, or of which a
// refresh of the same entry ended a moment ago. A caller that finds nothing to serve joins them like any fill. start is
// as in Join, for the keys with the indices of. Refresh reports whether it has started a fill.
func (g *Fills[R]) Refresh(keys, entries []string, start func(of []int, fills []*Fill[R]) (run func(l *Load))) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	var of []int
	var fills []*Fill[R]
	for i, key := range keys {
		r := g.resting[key]
		rests := r.entry == entries[i] && time.Now().Before(r.until)
		if !g.closed && g.byKey[key] == nil && !rests {
			of, fills = append(of, i), append(fills, g.add(&Fill[R]{Key: key, Refresh: true, entry: entries[i]}))
		}
	}
	g.start(nil, of, fills, start)
	return len(fills) > 0
}

func (g *Fills[R]) add(f *Fill[R]) *Fill[R] {
	f.Begun = time.Now()
	g.byKey[f.Key] = f
	g.byKey = emptied(g.byKey, &g.most.fills)
	if f.empty {
		g.empty.Add(1)
	}
	return f
}

// start runs fills together, as one load.
func (g *Fills[R]) start(outer *Load, of []int, fills []*Fill[R], start func(of []int, fills []*Fill[R]) (run func(l *Load))) {
	if len(fills) == 0 {
		return
	}
	l := newLoad(g, outer)
	for _, f := range fills {
		l.take(&f.member)
	}
	g.running.Add(1)
	g.Run(l, start(of, fills))
}

// Split moves some fills of a load to another load, which has no slot. Drain waits until Over is called for it, too.
func (g *Fills[R]) Split(l *Load, fills []*Fill[R]) *Load {
	g.running.Add(1)
	g.mu.Lock()
	defer g.mu.Unlock()
	other := newLoad(g, l.outer)
	for _, f := range fills {
		other.take(&f.member)
	}
	l.parted()
	other.nudged = l.nudged
	other.wake() // l may have been woken for one of these
	return other
}

// Run runs a load in another goroutine.
func (g *Fills[R]) Run(l *Load, run func(l *Load)) {
	go func() {
		grow()
		var trace [40]byte // here, where it is of one function: see goroutineID
		defer l.End(l.begin(goroutineNumber(trace[:runtime.Stack(trace[:], false)])))
		run(l)
	}()
}

// grow has the stack grow while there is nothing on it to be moved. A fill needs so much, and would move it twice.
//
//go:noinline
func grow() {
	var room [5 << 10]byte
	runtime.KeepAlive(&room)
}

// Over notes that no work of a load is left.
func (g *Fills[R]) Over() { g.running.Done() }

// Queue continues a load that waits for a slot by goOn, in a new goroutine: when it is woken, or after
// poll. The goroutine that calls Queue leaves its fills alone. A queued fill does not ask Redis, so
// callers that join it read first, and do not wake it.
func (g *Fills[R]) Queue(l *Load, poll time.Duration, goOn func(l *Load)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	l.queued = &queued{func() { g.Run(l, goOn) }, time.AfterFunc(poll, func() { g.Wake(l) })}
	select {
	case <-l.Woken: // since it last looked
		l.wake()
	default:
	}
}

// Wake continues a load that is queued. Another one sees in Woken that it was woken.
func (g *Fills[R]) Wake(l *Load) {
	g.mu.Lock()
	defer g.mu.Unlock()
	l.wake()
}

// Tell is Wake of the load of a fill that has no new caller.
func (g *Fills[R]) Tell(f *Fill[R]) {
	g.mu.Lock()
	defer g.mu.Unlock()
	f.load.wake()
}

// Nudged reports whether a caller has joined a fill of a load since the last call, the last one has left, or a key was
// invalidated.
func (g *Fills[R]) Nudged(l *Load) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	nudged := l.nudged
	l.nudged = false
	return nudged
}

// WakeAll wakes all fills that do not load.
func (g *Fills[R]) WakeAll() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, f := range g.byKey {
		if f.phase == acquiring {
			f.wake()
		}
	}
}

// Wanted reports whether a caller waits for the fill, or wants it to go on.
func (g *Fills[R]) Wanted(f *Fill[R]) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return f.callers.want()
}

// BeginLoad notes that the load of a fill begins, and returns its stamp. cancel is called when no
// caller may take its result any more.
func (g *Fills[R]) BeginLoad(f *Fill[R], cancel func()) Stamp {
	g.mu.Lock()
	defer g.mu.Unlock()
	f.phase, f.running = loading, running{g.clock.Now(), cancel}
	f.callers.early = f.callers.all
	return f.running.since
}

// End sets the result of a fill, valid from validFrom, and wakes the callers. If it is a refresh, Refresh
// does not refresh the same entry for the time of rest. Only the first End counts.
func (g *Fills[R]) End(f *Fill[R], r *R, validFrom Stamp, rest time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.end(f, r, validFrom, rest)
}

// EndIfDeserted ends a fill without a result if no caller wants it. It reports whether the fill has
// ended.
func (g *Fills[R]) EndIfDeserted(f *Fill[R], rest time.Duration) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !f.callers.want() {
		g.end(f, nil, 0, rest)
	}
	return f.phase == done
}

func (g *Fills[R]) end(f *Fill[R], r *R, validFrom Stamp, rest time.Duration) {
	if f.phase == done {
		return
	}
	if f.Refresh && rest > 0 { // in the same step: the next reader may begin a refresh
		g.rest(f, rest)
	}
	f.phase, f.outcome = done, outcome[R]{result: r, validFrom: validFrom}
	f.member.finish()
	g.forget(f)
	for now := time.Now(); f.waiters.first != nil; {
		f.waiters.first.over(now)
	}
}

// forget keeps new callers from joining f.
func (g *Fills[R]) forget(f *Fill[R]) {
	if g.byKey[f.Key] == f {
		delete(g.byKey, f.Key)
		g.byKey = emptied(g.byKey, &g.most.fills)
		if f.empty {
			g.empty.Add(-1)
		}
	}
}

func (g *Fills[R]) rest(f *Fill[R], d time.Duration) {
	r := rest{f.entry, time.Now().Add(d)}
	g.resting[f.Key] = r
	g.resting = emptied(g.resting, &g.most.rests)
	time.AfterFunc(d, func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.resting[f.Key] == r {
			delete(g.resting, f.Key)
			g.resting = emptied(g.resting, &g.most.rests)
		}
	})
}

// Supersede notifies the fill of key that the key was deleted or expired, or set.
func (g *Fills[R]) Supersede(key string, set bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if f := g.byKey[key]; f != nil {
		g.supersede(f, set)
	}
}

// LockLost notifies a fill that another process may load its key. Its load goes on: callers that joined before it
// began may have its value, which the store refuses; later ones read again.
func (g *Fills[R]) LockLost(f *Fill[R]) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.supersede(f, false)
}

// Superseded reports whether this process knows that Redis will refuse the result of a running load.
func (g *Fills[R]) Superseded(f *Fill[R]) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return f.superseded
}

// SupersedeAll notifies all fills that their keys were deleted.
func (g *Fills[R]) SupersedeAll() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, f := range g.byKey {
		g.supersede(f, false)
	}
}

// supersede makes the result of a running load void for callers that joined after it began; they
// start another fill at once. A fill that is not loading asks Redis again. If it waits for a slot it does so at
// once only if it may find a value: Clear would wake thousands of goroutines.
func (g *Fills[R]) supersede(f *Fill[R], set bool) {
	switch {
	case f.phase == acquiring:
		f.callers.kept = false
		if set || f.load.queued == nil || !f.callers.want() {
			f.wake()
		}
	case f.phase == loading && !f.superseded:
		f.superseded = true
		g.forget(f)
		for w := f.waiters.first; w != nil; {
			next := w.next
			if w.late {
				f.remove(w, time.Now())
			}
			w = next
		}
		f.cancelIfVoid()
	}
}

// cancelIfVoid cancels a load whose result no caller may take any more, and Redis would refuse. While earlier
// callers wait, it goes on: they may have the value, and sooner than a new load would bring one. A Loader that ignores
// its context keeps its slot until it returns; otherwise a key that is deleted all the time would have any number of
// loads.
func (f *Fill[R]) cancelIfVoid() {
	if f.superseded && f.phase == loading && f.callers.early == 0 {
		f.running.cancel()
	}
}

// wake wakes the load of a fill, which is to look at it.
func (f *Fill[R]) wake() {
	f.load.nudged = true
	f.load.wake()
}

func (l *Load) wake() {
	if q := l.queued; q != nil {
		l.queued = nil
		q.poll.Stop()
		q.goOn()
		return
	}
	select {
	case l.Woken <- struct{}{}:
	default:
	}
}

// Inside reports whether a call with this outer load comes from a running load of one of the fills.
func (g *Fills[R]) Inside(outer *Load) bool { return outer.inside(g) }

// Close makes Join refuse to start fills, except for calls from inside a load, and stops Refresh
// and Go.
func (g *Fills[R]) Close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
}

// Abort ends the context of Aborting: the fills end their loads, whatever their Loaders do.
func (g *Fills[R]) Abort() { g.abort() }

// Aborting ends when no load may go on.
func (g *Fills[R]) Aborting() context.Context { return g.aborting }

// Drain waits until all fills and the functions that they started have ended.
func (g *Fills[R]) Drain() { g.running.Wait() }

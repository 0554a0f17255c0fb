package flight

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

var (
	ErrClosed    = errors.New("singlefill: cache is closed")
	ErrRecursive = errors.New("singlefill: a load waits for itself")
)

// Fills is the fills of one cache, at most one for each key.
//
// A fill brings a value for callers that found none: it waits for another process, or loads. Callers join it and
// leave it; it belongs to none of them. A refresh is a fill that starts without callers.
//
// Nobody may be given what was true only before their call. So a result carries the stamp from which it is known
// to be true, taken before the command was sent that proves it, and a caller takes the result if its own stamp is
// older. A caller's stamp is that of its first join, and it keeps it. For example:
//
//  1. caller A joins; the fill locks the key and begins to load v1;
//  2. the source changes to v2; a Delete in another process releases the lock;
//  3. caller B, which began after Delete returned, joins;
//  4. the store of v1 is refused, so v1 is known to be true only as of the beginning of the load;
//  5. A takes v1; B asks again, and gets v2.
//
// A caller that asks again is older than every fill begun since, so none asks for ever.
type Fills[R any] struct {
	clock   *Clock
	running sync.WaitGroup
	mu      sync.Mutex
	closed  bool
	byKey   map[string]*Fill[R] // fills that callers can join
	resting map[string]string   // keys whose last refresh ended a moment ago, and which entry it refreshed
	empty   atomic.Int64        // fills in byKey for a key that was empty: see Filling
}

func NewFills[R any](clock *Clock) *Fills[R] {
	return &Fills[R]{clock: clock, byKey: make(map[string]*Fill[R]), resting: make(map[string]string)}
}

// A phase is how far a fill has come.
type phase int

const (
	contending phase = iota // it reads, competes for the lock, or waits for its holder
	loading
	done
)

// A Fill is one key's way to a value.
type Fill[R any] struct {
	Key     string
	Refresh bool          // started behind callers that have been answered
	Load    Load          // in the graph of loads that wait for each other
	Wake    chan struct{} // a caller joined, the last one left, or the key was invalidated

	ended chan struct{} // closed with the last phase
	void  chan struct{} // closed when superseded

	// Guarded by Fills.mu.
	phase      phase
	superseded bool // the result is void for all callers that joined since the load began
	empty      bool // the key was empty when the fill began
	queued     bool // see Queued
	callers    int
	early      int // callers, among those, that joined before the load began
	loadedFrom Stamp
	cancelLoad func()
	outcome    outcome[R]
}

// An outcome is a result, nil if there is none, and what callers may take it.
type outcome[R any] struct {
	result    *R
	validFrom Stamp
	taken     bool // a caller owns it
}

// A Caller is one call that needs a fill, and joins another one if the first was too old for it.
type Caller struct {
	Outer *Load // the load from inside which the call comes, or nil
	Empty bool  // the call has found the key empty
	Stamp Stamp // a point after its beginning; 0: Join sets it
}

// A Waiter is one caller in a fill.
type Waiter[R any] struct {
	*Fill[R]
	*Caller
	First bool // the fill is new
	late  bool // the load had begun when the caller first joined
}

// Before reports whether the caller joined before s, and so may have what is known to be true as of s.
func (w Waiter[R]) Before(s Stamp) bool { return w.Stamp < s }

// Filling reports whether a fill runs for key that found the key empty: another read would hardly find more.
func (g *Fills[R]) Filling(key string) bool {
	if g.empty.Load() == 0 {
		return false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	f := g.byKey[key]
	return f != nil && f.empty && !f.queued
}

// Join lets a call wait for the fill of key, or for a new one. A new one runs in a goroutine of its own: run has to End
// the fill, and to call over when all of its work is done, from whatever goroutine.
func (g *Fills[R]) Join(key string, call *Caller, run func(f *Fill[R], over func())) (Waiter[R], error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	f := g.byKey[key]
	if f == nil && g.closed && !call.Outer.inside(g) {
		return Waiter[R]{}, ErrClosed
	}
	first := f == nil
	if first {
		f = g.add(&Fill[R]{Key: key, empty: call.Empty, Load: Load{cache: g, outer: call.Outer}}, run)
	}
	if !call.Outer.waitFor(&f.Load) {
		return Waiter[R]{}, ErrRecursive
	}
	if call.Stamp == 0 {
		call.Stamp = g.clock.Now()
	}
	w := Waiter[R]{Fill: f, First: first, late: f.phase == loading && call.Stamp >= f.loadedFrom, Caller: call}
	f.callers++
	if !w.late {
		f.early++
	}
	if !first && !f.queued {
		f.wake()
	}
	return w, nil
}

// Refresh runs a fill without callers for an entry of key, unless there is a fill already, or a refresh of the same entry
// ended only a moment ago. A caller that finds nothing to serve joins it like any fill.
func (g *Fills[R]) Refresh(key, entry string, run func(f *Fill[R], over func())) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if rests, ok := g.resting[key]; !g.closed && g.byKey[key] == nil && !(ok && rests == entry) {
		g.add(&Fill[R]{Key: key, Refresh: true, Load: Load{cache: g}}, run)
	}
}

func (g *Fills[R]) add(f *Fill[R], run func(f *Fill[R], over func())) *Fill[R] {
	f.Wake, f.ended, f.void = make(chan struct{}, 1), make(chan struct{}), make(chan struct{})
	g.byKey[f.Key] = f
	if f.empty {
		g.empty.Add(1)
	}
	g.running.Add(1)
	go run(f, g.running.Done)
	return f
}

// Queued says whether a fill waits for a place to load. It does not ask Redis then, so callers that join it read first,
// and do not wake it.
func (g *Fills[R]) Queued(f *Fill[R], queued bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	f.queued = queued
}

// A Verdict says what a caller can do with the result of a fill.
type Verdict int

const (
	Owned    Verdict = iota // the result is the caller's own
	Shared                  // another caller owns the result, and may be changing it
	Outdated                // the result, if there is one, is older than the call
	Left                    // the caller's context ended first
)

// Wait waits until the fill ends, until its result is void for this caller, or until ctx ends, and leaves the fill.
func (g *Fills[R]) Wait(ctx context.Context, w Waiter[R]) (*R, Verdict) {
	defer w.Outer.leave(&w.Load)
	var void chan struct{}
	if w.late {
		void = w.void
	}
	select {
	case <-w.ended:
	case <-void:
	case <-ctx.Done():
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	f := w.Fill
	f.callers--
	if !w.late {
		f.early--
	}
	switch o := &f.outcome; {
	case f.phase == done && o.result == nil || w.late && f.superseded:
		return nil, Outdated
	case f.phase == done && !w.Before(o.validFrom):
		return o.result, Outdated
	case f.phase == done && o.taken: // even if ctx has just ended too
		return o.result, Shared
	case f.phase == done:
		o.taken = true
		return o.result, Owned
	}
	if f.callers == 0 {
		f.wake()
	}
	f.cancelIfVoid()
	return nil, Left
}

// Wanted reports whether a caller waits for the fill.
func (g *Fills[R]) Wanted(f *Fill[R]) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return f.callers > 0
}

// BeginLoad begins the load of a fill, and returns its stamp. cancel is called when no caller can be given what it brings.
func (g *Fills[R]) BeginLoad(f *Fill[R], cancel func()) Stamp {
	g.mu.Lock()
	defer g.mu.Unlock()
	f.phase, f.loadedFrom, f.cancelLoad, f.early = loading, g.clock.Now(), cancel, f.callers
	return f.loadedFrom
}

// End makes a result final, known to be true as of validFrom, and wakes the callers. Only the first End counts.
func (g *Fills[R]) End(f *Fill[R], r *R, validFrom Stamp) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.end(f, r, validFrom)
}

// EndIfDeserted ends a fill without a result if no caller waits for it.
func (g *Fills[R]) EndIfDeserted(f *Fill[R]) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if f.callers == 0 {
		g.end(f, nil, 0)
	}
	return f.phase == done
}

func (g *Fills[R]) end(f *Fill[R], r *R, validFrom Stamp) {
	if f.phase == done {
		return
	}
	f.phase, f.outcome = done, outcome[R]{result: r, validFrom: validFrom}
	f.Load.finish()
	g.forget(f)
	close(f.ended)
}

// forget lets no more callers join f.
func (g *Fills[R]) forget(f *Fill[R]) {
	if g.byKey[f.Key] == f {
		delete(g.byKey, f.Key)
		if f.empty {
			g.empty.Add(-1)
		}
	}
}

// Rest keeps the entry that a fill was to refresh from being refreshed again for d.
func (g *Fills[R]) Rest(f *Fill[R], entry string, d time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.resting[f.Key] = entry
	time.AfterFunc(d, func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.resting[f.Key] == entry {
			delete(g.resting, f.Key)
		}
	})
}

// Supersede tells the fill of key that the key has been deleted, set or made stale.
func (g *Fills[R]) Supersede(key string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if f := g.byKey[key]; f != nil {
		g.supersede(f)
	}
}

// LockLost tells a fill that another process may load its key.
func (g *Fills[R]) LockLost(f *Fill[R]) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.supersede(f)
}

// supersede makes what a load brings void for all callers that join after it began: they start another fill at once. A
// fill that is not loading asks Redis again.
func (g *Fills[R]) supersede(f *Fill[R]) {
	switch {
	case f.phase == contending:
		f.wake()
	case f.phase == loading && !f.superseded:
		f.superseded = true
		g.forget(f)
		close(f.void)
		f.cancelIfVoid()
	}
}

// cancelIfVoid cancels a load whose result no caller can be given any more, and Redis would refuse.
func (f *Fill[R]) cancelIfVoid() {
	if f.superseded && f.phase == loading && f.early == 0 {
		f.cancelLoad()
	}
}

func (f *Fill[R]) wake() {
	select {
	case f.Wake <- struct{}{}:
	default:
	}
}

// Go runs a function that Drain waits for. It does not run it after Close.
func (g *Fills[R]) Go(run func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.closed {
		g.running.Go(run)
	}
}

// Behind runs a function that Drain waits for. Only a fill that is not over may call it.
func (g *Fills[R]) Behind(run func()) { g.running.Go(run) }

// Later is Behind after d, unless stop is called before.
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

// Inside reports whether a call comes from inside a load of one of the fills.
func (g *Fills[R]) Inside(outer *Load) bool { return outer.inside(g) }

// Close makes Join refuse to start a fill, but for calls from inside a load.
func (g *Fills[R]) Close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
}

// Drain waits until all fills are over, and what they have left behind.
func (g *Fills[R]) Drain() { g.running.Wait() }

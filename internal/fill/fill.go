// Package fill brings the values of keys that callers have not found: a fill waits for the value that another
// process stores, or loads it and stores it.
//
// The fills that a call begins are a [set]. It is a [state] and a loop that takes one turn after the other (run): it
// asks Redis (ask), pauses or queues, loads (callLoader), and stores (store). What a reply of Redis means for a fill is
// decided by a function without effects (decide). The fills of a set go together while they are in the same state:
// where they part, some become another set (follow). A set goes on in another goroutine if the goroutine of its Loader
// does not come back: after a panic or runtime.Goexit (broken), and at LoadTimeout (callLoader). A panic or
// runtime.Goexit of another function of the user ends the fills of the set.
package fill

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/event"
	"github.com/singlefill/singlefill/internal/filllock"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/tags"
	"github.com/singlefill/singlefill/internal/value"
	"github.com/singlefill/singlefill/internal/wait"
)

// A Filler begins and runs the fills of one cache.
type Filler struct {
	Parts
	times     *wait.Times
	refreshes refreshes
}

func New(p Parts) *Filler { return &Filler{Parts: p, times: wait.NewTimes()} }

// A Source is from where fills load.
type Source struct {
	Loader Loader
	Anew   bool // load although the key holds a value, unless a newer value arrives; and not without Redis
}

// Join joins the fills of keys, or starts fills, which load together. found returns what the call has found for
// waits[i], which is not changed any more; it is called only for a fill that starts. A fill has a detached context, and
// goes on when all callers have left: impatient callers of a slow source would keep its key cold for ever, and other
// processes would wait for a load that never succeeds.
func (f *Filler) Join(ctx context.Context, call *flight.Caller, waits []*flight.Waiter[Result],
	found func(i int) *value.Lookup, from Source) {
	f.Fills.Join(call, waits, func(of []int, fills []*flight.Fill[Result]) (run func(*flight.Load)) {
		x := f.newSet(from, fills)
		for k, i := range of {
			x.all[k].old = found(i)
		}
		return func(l *flight.Load) { x.start(client.Detach(ctx), l) }
	})
}

func (f *Filler) closed() bool {
	select {
	case <-f.Closing:
		return true
	default:
		return false
	}
}

// A set is fills that are in the same state, and go together. One goroutine runs it at a time.
type set struct {
	*Filler
	all   []filling  // with which it began
	mine  []*filling // all that have not moved to other sets
	fills []*filling // of mine, those not ended
	from  Source
	load  *flight.Load
	slot  *flight.Slot
	wait  wait.Wait

	until  time.Time       // the end of the pause
	inLine time.Time       // since when it waits for a slot
	polled time.Time       // when it left the line last, to ask
	hasty  bool            // it asks soon, since keys have been invalidated
	queued time.Duration   // time spent waiting for slots
	since  *tags.Sequences // before the load; nil without Options.Tags
	noted  *tags.Noted     // before the store; nil: there are no tags
	call   *running        // of the Loader; nil before it
}

func (f *Filler) newSet(from Source, fills []*flight.Fill[Result]) *set {
	x := &set{Filler: f, from: from, all: make([]filling, len(fills)), mine: make([]*filling, len(fills))}
	for i, of := range fills {
		x.mine[i] = &x.all[i]
		x.all[i].key, x.all[i].fill = of.Key, of
	}
	x.fills = x.mine
	return x
}

// start runs a set from its first command to its end.
func (x *set) start(ctx context.Context, l *flight.Load) {
	x.load, x.slot = l, x.Slots.NewSlot(l)
	x.lockAnew(x.fills)
	x.run(ctx, beginning)
}

// lockAnew gives fills new attempts to lock.
func (x *set) lockAnew(fills []*filling) {
	pairs := make([]filllock.Pair, len(fills))
	for i, f := range fills {
		pairs[i] = filllock.PairOf(x.Store.Key(f.key))
	}
	for i, l := range filllock.NewMany(x.Client, pairs, x.LockTTL) {
		fills[i].lock, fills[i].holds = l, false
	}
}

// run takes the turns of a set until it has ended, or goes on in another goroutine.
func (x *set) run(ctx context.Context, s state) {
	defer func() {
		if s != ended { // the turn has not returned
			x.broken(ctx, s, recover())
		}
	}()
	for s != ended {
		switch s {
		case beginning:
			s = x.begin(ctx)
		case asking:
			s = x.ask(ctx)
		case answered:
			s = x.follow(ctx)
		case paused:
			s = x.pause(ctx)
		case queueing:
			s = x.queue(ctx)
		case dequeued:
			s = x.dequeue(ctx)
		case loading:
			s = x.callLoader(ctx)
		case storing:
			s = x.store(ctx)
		}
	}
}

// broken is the last turn in the goroutine of a set in which a function of the user has panicked with p, or has called
// runtime.Goexit. While the set loads, that is the outcome of its load. Otherwise its fills fail: only a Loader and
// TTLFunc may do so. It calls no function of the user, which might do so again.
func (x *set) broken(ctx context.Context, s state, p any) {
	o := x.User.Panicked(p, s == loading)
	if s == loading {
		if x.call.claim() {
			x.Events.LoadPanics(len(x.fills))
			x.loaded(slices.Repeat([]Outcome{o}, len(x.fills)))
			x.goOn(ctx, storing)
		}
		return
	}
	for _, f := range x.fills {
		if s == storing && f.outcome.result == nil {
			x.Events.CountLoad(&event.LoadInfo{Err: o.Err}, false)
		}
		f.polls, f.lock.InDoubt = 0, f.lock.InDoubt || s != storing
		x.end(ctx, f, &Result{Found: value.Found{Err: o.Err}, Failed: true, NoStale: true}, flight.Always) // does nothing if it has ended
	}
	x.over(ctx)
}

// goOn runs a set in another goroutine.
func (x *set) goOn(ctx context.Context, s state) {
	x.Fills.Run(x.load, func(*flight.Load) { x.run(ctx, s) })
}

// split makes another set of some of the fills, which has no slot.
func (x *set) split(some []*filling) *set {
	fills := make([]*flight.Fill[Result], len(some))
	for i, f := range some {
		fills[i] = f.fill
	}
	moved := make(map[*filling]bool, len(some))
	for _, f := range some {
		moved[f] = true
	}
	x.fills, x.mine = without(x.fills, moved), without(x.mine, moved)
	y := &set{Filler: x.Filler, mine: some, fills: some, from: x.from, wait: x.wait, queued: x.queued, since: x.since}
	if y.call = x.call; y.call != nil {
		y.call.sets.Add(1)
	}
	y.load = x.Fills.Split(x.load, fills)
	y.slot = x.Slots.NewSlot(y.load)
	return y
}

func without(fills []*filling, moved map[*filling]bool) []*filling {
	return slices.DeleteFunc(slices.Clone(fills), func(f *filling) bool { return moved[f] })
}

// over is the last turn of a set, whose fills have ended.
func (x *set) over(ctx context.Context) state {
	for _, f := range x.mine {
		x.end(ctx, f, nil, 0) // does nothing if the fill has ended
		x.release(ctx, f)
	}
	if x.call != nil {
		x.call.setEnded()
	}
	x.slot.Release()
	x.Fills.Over()
	return ended
}

// end hands the result to the callers. The result is known to be true as of validFrom.
func (x *set) end(ctx context.Context, f *filling, r *Result, validFrom flight.Stamp) {
	x.waited(ctx, f) // WaitDone comes before the callers continue
	if r != nil && r.Failed {
		r.OldSince = f.oldSince
		if x.Store.Servable(&f.old.Found, time.Now()) {
			old := f.old.Found
			r.Old = &old
		}
	}
	x.Fills.End(f.fill, r, validFrom, f.rest)
}

// deserted ends a fill that no caller wants. It reports whether the fill has ended.
func (x *set) deserted(ctx context.Context, f *filling) bool {
	ended := x.Fills.EndIfDeserted(f.fill, f.rest)
	if ended {
		x.waited(ctx, f)
		x.release(ctx, f)
	}
	return ended
}

// release gives up the lock of a fill that has ended, unless Redis has been told.
func (x *set) release(ctx context.Context, f *filling) {
	if f.lock.InDoubt || f.holds {
		x.giveUp(ctx, f)
	}
}

// drop ends fills that no caller wants. It reports whether none is left.
func (x *set) drop(ctx context.Context) (none bool) {
	x.fills = slices.DeleteFunc(slices.Clone(x.fills), func(f *filling) bool { return x.deserted(ctx, f) })
	return len(x.fills) == 0
}

// failClosed ends the fills since the cache was closed.
func (x *set) failClosed(ctx context.Context) {
	for _, f := range x.fills {
		x.end(ctx, f, &Result{Found: value.Found{Err: flight.ErrClosed}}, flight.Always)
	}
}

// waited notes the end of a wait.
func (x *set) waited(ctx context.Context, f *filling) {
	if f.ear != nil {
		f.ear.Close()
	}
	if f.polls == 0 {
		return
	}
	polls := f.polls
	f.polls = 0
	x.Events.WaitDone(ctx, f.key, x.wait.Begun, polls)
}

// giveUp abandons the attempt of a fill in the background.
func (x *set) giveUp(ctx context.Context, f *filling) {
	lock := *f.lock
	f.lock.InDoubt, f.holds = false, false
	x.Fills.Behind(func() { x.abandon(ctx, lock) })
}

// abandon gives up an attempt to lock of which a command was not answered, or whose release was
// refused. Otherwise it could keep the lock without a load. It tries until Redis answers; what Redis
// refuses, until the lock has expired. The first command is sent also while the breaker is open: a frozen
// server executes it as soon as it goes on. When the cache is closed it tries once more.
func (f *Filler) abandon(ctx context.Context, lock filllock.Lock) {
	for end := time.Now().Add(f.LockTTL); ; {
		closed := f.closed()
		late := time.Until(lock.Late())
		switch _, err := lock.Abandon().Do(ctx, f.Client.Timeout); {
		case closed || errors.Is(err, redis.ErrClosed):
			return
		case err == nil && late > 0: // the breaker has opened before: the command may overtake this one
			f.pauseFor(late)
			continue
		case err == nil:
			return
		case client.Unreachable(err):
			end = time.Now().Add(f.LockTTL)
		case time.Now().After(end):
			return
		}
		f.pauseUntilBack(lock.Keys.Lock)
	}
}

// pauseUntilBack pauses, at least for as long as the breaker of key's node is open. Close ends it, of the cache or
// of the client.
func (f *Filler) pauseUntilBack(key string) {
	for away := true; away && !f.closed(); away = f.Client.Away(key) && !f.Client.Gone() {
		f.pauseFor(wait.MaxPause)
	}
}

// pauseFor pauses until the cache is closed.
func (f *Filler) pauseFor(d time.Duration) {
	select {
	case <-f.Closing:
	case <-time.After(d):
	}
}

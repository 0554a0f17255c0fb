package singlefill

import (
	"cmp"
	"context"
	"fmt"
	"runtime/pprof"
	"sync/atomic"
	"time"

	"github.com/singlefill/singlefill/internal/bulk"
	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/event"
	"github.com/singlefill/singlefill/internal/filllock"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/tags"
	"github.com/singlefill/singlefill/internal/value"
	"github.com/singlefill/singlefill/internal/wait"
)

// A filling is a running fill: it waits for the value that another process stores, or loads one.
type filling struct {
	*engine
	fill *flight.Fill[result]
	load loader
	lock *filllock.Lock
	slot slot
	wait wait.Wait
	seat *bulk.Seat // of a fill of many keys
	over func()     // to be called when no work is left

	next     attempt
	old      *value.Lookup   // what the key holds, as last seen
	replaces bool            // the key held old when this fill took the lock
	oldSince flight.Stamp    // old is known to be true as of this stamp
	rest     time.Duration   // how long no other refresh of the same entry is started
	queued   time.Duration   // time spent waiting for slots
	inLine   time.Time       // since when it waits for one
	since    *tags.Sequences // before the load; nil without Options.Tags
	loading  bool            // the Loader has been called, and has no outcome yet

	superseded atomic.Bool // the load was cancelled because no caller may have its value any more
	returned   atomic.Bool // the load has an outcome
}

// A slot is the right to load: a [flight.Slot], or a [flight.Share] of the one that the fills of many
// keys have in common.
type slot interface {
	Try(local bool) bool
	TryLease(ctx context.Context) bool
	Queue(granted func())
	Held() bool
	Release()
}

// fill runs a fill from its first command to its end. l is what a read has found.
func (c *engine) fill(ctx context.Context, f *flight.Fill[result], load loader, l *value.Lookup, over func(), in *bulk.Seat) {
	x := &filling{
		engine: c, fill: f, load: load, over: over, old: l, seat: in,
		lock: c.newLock(f.Key),
	}
	if in == nil {
		x.slot = c.slots.NewSlot(f.Load)
	} else {
		x.slot, x.lock.Convoy = in.NewShare(), in.Asks()
	}
	x.run(ctx, x.begin)
}

// begin is the first part of a fill.
func (x *filling) begin(ctx context.Context) step {
	if x.fill.Refresh && x.old.Data != nil {
		x.store.Decode(ctx, x.old, x.old.Data) // the reader owns its value
	}
	x.wait = wait.New(x.loadTimes.Estimate(x.fill.Key, x.old.Entry.LoadTime))
	// With MaxFleetLoads the lock is asked for first: a slot costs two commands then.
	x.next = attempt{within: x.opts.redisTimeout, queue: x.fleet == nil}
	if x.old.RedisErr != nil && x.client.Silent(x.lock.Keys.Lock) {
		x.next.within -= x.old.Asked
	}
	return x.acquire(ctx)
}

// run runs a fill from one of its parts until it ends, or is queued and leaves its goroutine.
func (x *filling) run(ctx context.Context, part func(ctx context.Context) step) {
	goesOn := false
	defer func() {
		if !goesOn {
			x.finish(ctx)
		}
	}()
	switch next := part(ctx); {
	case next == ended:
	case next == loadLocked:
		x.waited(ctx)
		goesOn = true // a load finishes in the goroutine in which it ends
		x.loadLocked(ctx)
	case next == loadUnlocked && x.slot.Try(true):
		x.waited(ctx)
		goesOn = true
		x.loadUnlocked(ctx)
	default:
		goesOn = x.queue(ctx)
	}
}

// finish is the last step of a fill. It gives back what the fill holds, and ends it if nothing else
// has.
func (x *filling) finish(ctx context.Context) {
	if x.loading { // the codec called runtime.Goexit
		x.lock.InDoubt = true
		x.end(ctx, failure(&PanicError{Value: "runtime.Goexit was called"}), flight.Always)
	}
	x.end(ctx, nil, 0) // does nothing if the fill has ended
	x.seat.Decided()
	x.slot.Release()
	if x.lock.InDoubt {
		x.fills.Behind(func() { x.abandon(ctx, *x.lock) })
	}
	x.over()
}

// end hands the result to the callers. The result is known to be true as of validFrom.
func (x *filling) end(ctx context.Context, r *result, validFrom flight.Stamp) {
	x.waited(ctx) // WaitDone comes before the callers continue
	x.loading = false
	if r != nil && r.failed {
		r.oldSince = x.oldSince
		if x.store.Servable(&x.old.Found) {
			old := x.old.Found
			r.old = &old
		}
	}
	x.fills.End(x.fill, r, validFrom, x.rest)
}

// An outcome is how a load ended, and what happened to its value.
type outcome struct {
	event.LoadInfo
	value      any
	entry      entry.Entry   // of value, or of ErrNotFound
	life       time.Duration // of value
	tags       []string      // of value
	untagged   bool          // its tags are not known, or cannot be proved
	notFound   bool          // Err is ErrNotFound or wraps it
	text       string        // of Err
	superseded bool          // the load was cancelled because no caller could have had its value

	call   *flight.Call   // of the Loader; nil: there was none
	convoy *client.Convoy // with what the command goes that stores it
}

func (o outcome) failed() bool { return o.Err != nil && !o.notFound }

func (o outcome) result() result {
	found := value.Found{Value: o.value, Entry: o.entry, At: o.entry.WrittenAt, Freshness: value.Fresh, Err: o.Err}
	return result{Found: found, failed: o.failed()}
}

// failure returns the result of a load that failed with err, here or in another process.
func failure(err error) *result {
	return &result{Found: value.Found{Err: err}, failed: err != ErrNotFound}
}

// A step is what a fill does next.
type step int

const (
	ended        step = iota // nothing: it has a result, or no caller waits for it
	loadLocked               // load and store: the fill holds the lock and a slot
	loadUnlocked             // load without storing: Redis does not answer
	waitForSlot              // queue for a slot, then ask again

	// The other steps stay within acquire.
	takeValue   // end with the value that has arrived
	takeFailure // end with the failure of the load in another process
	askAgain    // ask again at once
	retryNew    // ask again at once, as a new attempt to lock
	waitForLock // pause, then ask again
	leave       // leave the key to other processes, unless a caller has joined
)

// A view is what decide knows beside the reply.
type view struct {
	wanted   bool // a caller waits
	servable bool // the value found can end the fill
}

// decide returns the step that follows from a reply. It has no effects: it sends nothing, locks
// nothing and reads no clock.
func decide(r filllock.Reply, v view) step {
	switch r.Status {
	case filllock.Hit:
		if v.servable {
			return takeValue
		}
		return askAgain
	case filllock.Locked:
		return loadLocked
	case filllock.Failed:
		return takeFailure
	case filllock.Refused:
		return retryNew
	case filllock.Gone:
		if v.wanted {
			return askAgain // as a load
		}
	case filllock.Busy:
		if v.wanted {
			return waitForLock
		}
	case filllock.Free:
		if v.wanted {
			return waitForSlot
		}
	}
	return leave
}

// An attempt is the state of acquire between two commands.
type attempt struct {
	within     time.Duration // bound on the next command
	queue      bool          // wait for a slot before the next command
	wanted     bool          // a caller waits for this fill
	awaited    string        // token of the holder that the fill waits for
	lastAsked  flight.Stamp  // the lock was seen held, or free, as of this stamp
	unanswered int           // commands without an answer
}

// maxUnanswered is how many commands of one fill may stay unanswered while the server answers
// others.
const maxUnanswered = 2

// acquire asks Redis for an entry or for the lock until it has either. One command does both: it
// tells a waiter that the value arrived, that the load failed, or that the holder died. Between two
// commands the fill holds no connection, and no slot while another process holds the lock.
//
// A refresh that no caller waits for asks once. It leaves the key to its holder, and the slots to
// loads that callers wait for.
func (x *filling) acquire(ctx context.Context) step {
	a := &x.next
	for {
		x.rest = maxRest
		a.wanted = !x.fill.Refresh || x.fills.Wanted(x.fill)
		take := x.trySlot(ctx, a.wanted)
		if !take {
			if !a.wanted && x.fills.EndIfDeserted(x.fill, x.rest) {
				return ended
			}
			if a.queue && !x.client.Away(x.lock.Keys.Lock) {
				return waitForSlot
			}
		}
		if a.within < time.Millisecond || x.client.Away(x.lock.Keys.Lock) {
			return x.unreached()
		}
		reply, stamp, err := x.ask(ctx, take)
		switch {
		case err == nil:
		case x.worthAsking(err):
			continue
		default:
			return x.unreached()
		}
		a.within, x.rest = x.opts.redisTimeout, restFor(reply.Left)
		next := decide(reply, view{wanted: a.wanted, servable: x.old.Freshness >= value.Revalidate})
		if next = x.follow(ctx, next, reply, stamp); next == ended || next == loadLocked {
			return next
		}
	}
}

// trySlot takes a slot if one is free.
func (x *filling) trySlot(ctx context.Context, wanted bool) bool {
	if wanted {
		return x.slot.Try(false)
	}
	return x.slot.TryLease(ctx)
}

// worthAsking reports whether to ask again after a command without an answer: callers wait, and the
// server answers other commands.
func (x *filling) worthAsking(err error) bool {
	a := &x.next
	a.unanswered++
	return a.unanswered < maxUnanswered && a.wanted && client.Unreachable(err) && !x.client.Silent(x.lock.Keys.Lock)
}

// unreached is the step after Redis did not answer: the source serves the callers. A refresh
// without callers ends.
func (x *filling) unreached() step {
	if x.fill.Refresh && x.fills.EndIfDeserted(x.fill, x.rest) {
		return ended
	}
	return loadUnlocked
}

// follow takes a step within acquire. It returns ended, loadLocked, or any other step if acquire
// goes on.
func (x *filling) follow(ctx context.Context, next step, reply filllock.Reply, stamp flight.Stamp) step {
	a := &x.next
	switch next {
	case takeValue:
		x.wait.Found()
		x.loadTimes.Note(x.fill.Key, x.old.Entry.LoadTime)
		x.end(ctx, &result{Found: x.old.Found}, stamp)
		return ended
	case takeFailure:
		x.wait.Found()
		// Callers that had joined when the lock was last seen held have waited for that load.
		err := x.opts.errors.remoteError(x.fill.Key, reply.Text)
		x.end(ctx, failure(err), a.lastAsked)
		return ended
	case retryNew:
		x.lock = x.newLock(x.fill.Key)
	case waitForLock:
		x.seat.Decided()
		x.slot.Release()
		a.awaited, a.lastAsked, a.queue = reply.Text, stamp, false
		x.wait.Polls++
		d := x.wait.Pause(reply)
		x.wait.Listen(x.client, x.lock.Keys.Lock, reply)
		if x.pause(ctx, d) != wait.Paused {
			return ended
		}
	case waitForSlot:
		a.queue, a.lastAsked = true, stamp
	case leave:
		if x.fills.EndIfDeserted(x.fill, x.rest) {
			return ended
		}
	case loadLocked:
		if x.slot.Held() {
			return loadLocked
		}
		// The server executed an earlier command to lock only now, and the slot has been given back
		// since.
		lock := *x.lock
		x.fills.Behind(func() { x.abandon(ctx, lock) })
		x.lock = x.newLock(x.fill.Key)
		return askAgain
	}
	return next
}

// pause sleeps for d, or less if a caller joins.
func (x *filling) pause(ctx context.Context, d time.Duration) wait.Event {
	event := x.wait.Sleep(d, x.closing, x.fill.Wake, func() bool { return x.fills.EndIfDeserted(x.fill, x.rest) })
	if event == wait.Closed {
		x.end(ctx, &result{Found: value.Found{Err: ErrClosed}}, flight.Always)
	}
	return event
}

// queuedPoll is the time between two polls of all queued fills of this cache together.
const queuedPoll = 250 * time.Millisecond

// queue has the fill run again when it has a slot, or when it is time to poll for a value from another
// process. Until then it has no goroutine. The more fills are queued, the more rarely each of them
// polls: a queue of any length sends four commands a second. It returns false if the fill has ended.
func (x *filling) queue(ctx context.Context) bool {
	if x.unwanted(ctx) {
		return false
	}
	x.wait.End()
	x.inLine = time.Now()
	x.slot.Queue(func() { go x.fills.Wake(x.fill) })
	poll := time.Duration(max(x.slots.Queued(), 1)*x.seat.Fills()) * queuedPoll
	x.fills.Queue(x.fill, poll, func() {
		pprof.SetGoroutineLabels(ctx) // not those of whatever has woken the fill
		x.run(ctx, x.goOn)
	})
	return true
}

// goOn is the part of a fill after it has been queued.
func (x *filling) goOn(ctx context.Context) step {
	x.queued += time.Since(x.inLine)
	if x.unwanted(ctx) {
		return ended
	}
	// Redis may have come back. Without a slot the command is a poll.
	x.next.within, x.next.unanswered, x.next.queue = x.opts.redisTimeout, 0, false
	return x.acquire(ctx)
}

// unwanted ends a fill without a slot if no caller waits, or the cache was closed and no load waits: Close
// waits for the load that needs this one. The order counts: once EndIfDeserted has looked at the callers, the
// first one has joined, and its load waits.
func (x *filling) unwanted(ctx context.Context) bool {
	if x.fills.EndIfDeserted(x.fill, x.rest) {
		return true
	}
	if x.checkOpen() == nil || x.fill.Load.Awaited() {
		return false
	}
	x.end(ctx, &result{Found: value.Found{Err: ErrClosed}}, flight.Always)
	return true
}

// waited notes the end of a wait.
func (x *filling) waited(ctx context.Context) {
	x.wait.End()
	if x.wait.Polls == 0 {
		return
	}
	polls := x.wait.Polls
	x.wait.Polls = 0
	x.events.WaitDone(ctx, x.fill.Key, x.wait.Begun, polls)
}

// loadLocked loads while it renews the lock. One command then stores the value and releases the
// lock.
func (x *filling) loadLocked(ctx context.Context) {
	l := x.beginLoad(ctx)
	stop := x.renew(l.ctx)
	if x.tags != nil && x.seat == nil { // fills of many keys share those of their load
		x.since = x.tags.Sequences(l.ctx)
	}
	x.call(l, func(o outcome) {
		defer x.finish(ctx)
		stop()
		l.cancel()
		x.slot.Release()
		x.lock.Convoy = o.convoy
		if !o.failed() {
			x.loadTimes.Note(x.fill.Key, o.Duration)
		}
		x.commit(ctx, o, l.began)
	})
}

// loadUnlocked loads while Redis does not answer. The callers of this process share the outcome. It
// is not stored: this process may have missed a Delete.
func (x *filling) loadUnlocked(ctx context.Context) {
	if x.lock.InDoubt {
		lock := *x.lock
		x.lock.InDoubt = false
		x.fills.Behind(func() { x.abandon(ctx, lock) })
	}
	x.events.LoadUnlocked()
	l := x.beginLoad(ctx)
	x.call(l, func(o outcome) {
		defer x.finish(ctx)
		l.cancel()
		x.slot.Release()
		o.Unlocked = true
		o.convoy.Leave()
		x.encode(&o) // callers decode their copies from it
		r := o.result()
		validFrom := l.began
		if r.failed {
			validFrom = x.clock.Now() // callers that joined during the load have waited for its failure
		}
		r.unverified = true
		x.end(ctx, &r, validFrom)
		x.loadDone(ctx, o)
	})
}

// A running load has a context that ends at LoadTimeout, or earlier by cancel. That of a fill of many keys
// ends by cancel only: the fill may still wait for its call of the ManyLoader, which internal/bulk ends.
type running struct {
	ctx    context.Context
	cancel func()
	began  flight.Stamp
}

func (x *filling) beginLoad(ctx context.Context) (l running) {
	if x.seat == nil {
		l.ctx, l.cancel = context.WithTimeout(ctx, x.opts.loadTimeout)
	} else {
		l.ctx, l.cancel = context.WithCancel(ctx)
	}
	l.began = x.fills.BeginLoad(x.fill, func() {
		x.superseded.Store(true)
		l.cancel()
	})
	x.loading = true
	return l
}

// call runs the Loader, and then done, once, with its outcome: in this goroutine, or, if the Loader
// has not returned at LoadTimeout, in another one. The goroutine of a Loader that hangs is
// abandoned.
func (x *filling) call(l running, done func(o outcome)) {
	f := x.fill
	x.events.LoadBegun(f.Refresh)
	finish := func(o outcome) {
		if x.returned.CompareAndSwap(false, true) {
			x.events.LoadEnded()
			o.Key, o.Refresh, o.Queued = f.Key, f.Refresh, x.queued
			if o.call = f.Call.Load(); o.call != nil {
				o.Keys, o.Duration = o.call.Keys, time.Since(o.call.Begun)
			}
			done(o)
		}
	}
	if x.seat != nil {
		x.callLoader(l.ctx, finish)
		return
	}
	// Not context.AfterFunc, since the context also ends when the fill is superseded.
	timeout := time.AfterFunc(x.opts.loadTimeout, func() {
		<-l.ctx.Done() // at its deadline, which is now, and not because finish cancels it
		var o outcome
		o.Err = x.tooLong(f.Key)
		o.text = o.Err.Error()
		finish(o)
	})
	x.callLoader(l.ctx, func(o outcome) {
		timeout.Stop()
		finish(o)
	})
}

// loadDone tells what has become of a load.
func (x *filling) loadDone(ctx context.Context, o outcome) {
	x.events.LoadDone(cmp.Or(contextOf(o.call), ctx), o.LoadInfo, o.notFound)
}

// tooLong is the error of a load that was abandoned.
func (c *engine) tooLong(key string) error {
	return fmt.Errorf("singlefill: load of %.100q took longer than LoadTimeout (%v): %w", key, c.opts.loadTimeout, context.DeadlineExceeded)
}

// takeTags takes the tags of what a load has brought.
func (x *filling) takeTags(o *outcome) (err error) {
	if x.tags == nil || o.failed() {
		return nil
	}
	if o.tags, err = x.store.TagsOf(x.fill.Key, o.value); err != nil {
		return err
	}
	return x.since.Missing(o.tags)
}

// noteTags notes the tags of what a load has brought, also if it is not to be stored: a DeleteTag that comes
// later then finds the key, and the lock that this fill still holds. It returns false if a tag has been
// invalidated since the load began, or may have been.
func (x *filling) noteTags(ctx context.Context, o *outcome) (noted *tags.Noted, valid bool, err error) {
	if o.untagged || len(o.tags) == 0 {
		return nil, !o.untagged, nil
	}
	note := tags.Note{Key: x.fill.Key, Tags: o.tags, Life: x.store.KeptFor(o.life)}
	noted, err = x.tags.Note(ctx, []tags.Note{note}, x.since)
	return noted, noted != nil, err
}

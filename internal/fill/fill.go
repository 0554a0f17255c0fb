// Package fill brings the values of keys that callers have not found: a fill waits for the value that another
// process stores, or loads it and stores it.
//
// A fill is a [state] and a loop that takes one turn after the other (run): it asks Redis (ask), pauses or queues,
// loads (callLoader), and stores (store). What a reply of Redis means for it is decided by a function without effects
// (decide). A fill goes on in another goroutine if that of its Loader does not come back: after a panic or
// runtime.Goexit (leave), and at LoadTimeout (callLoader).
package fill

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/bulk"
	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/event"
	"github.com/singlefill/singlefill/internal/filllock"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/revoke"
	"github.com/singlefill/singlefill/internal/tags"
	"github.com/singlefill/singlefill/internal/value"
	"github.com/singlefill/singlefill/internal/wait"
)

// Parts are what a Filler is made of.
type Parts struct {
	Client  *client.Client
	Store   *value.Store
	Tags    *tags.Index // nil: no value has tags
	Fills   *flight.Fills[Result]
	Slots   *flight.Slots
	User    User
	Events  *event.Sink
	Keys    *revoke.Keys
	Closing <-chan struct{}

	LockTTL     time.Duration
	LoadTimeout time.Duration
	RetryAfter  time.Duration // 0: off
	FailureTTL  time.Duration // 0: off
}

// A Filler begins and runs the fills of one cache.
type Filler struct {
	Parts
	times *wait.Times
}

func New(p Parts) *Filler { return &Filler{Parts: p, times: wait.NewTimes()} }

// A Source is from where a fill loads: a Loader, or a seat in a bulk, whose ManyLoader works for several fills.
type Source struct {
	Loader Loader
	Seat   *bulk.Seat // nil: Loader
	Anew   bool       // load although the key holds a value, unless a newer one arrives; and not without Redis
}

// An Ask is a key for which a call needs a fill.
type Ask struct {
	value.Lookup // what the call has found under the key
	From         Source
	Wait         flight.Waiter[Result]
}

// Join joins the fills of keys, or starts fills with what the call has found. A fill has a detached context, and goes on
// when all callers have left: impatient callers of a slow source would keep its key cold for ever, and other processes
// would wait for a load that never succeeds.
func (f *Filler) Join(ctx context.Context, call *flight.Caller, asks []*Ask) {
	waits := make([]*flight.Waiter[Result], len(asks))
	for i, a := range asks {
		a.Wait.Key, a.Wait.Group = a.Key, a.From.Seat.Node()
		a.Wait.Empty = a.RedisErr == nil && a.Freshness == value.Expired
		waits[i] = &a.Wait
	}
	f.Fills.Join(call, waits, func(i int) func(of *flight.Fill[Result], over func()) {
		found, from := asks[i].Lookup, asks[i].From // the call may change its own when it has left
		return func(of *flight.Fill[Result], over func()) { f.start(client.Detach(ctx), of, from, &found, over) }
	})
}

// Refresh loads a key in the background, in one process of the fleet, since its entry is stale or about to expire.
// A caller that finds nothing to serve joins it. Loads that callers wait for go first. It reports whether it has
// begun. ctx never ends.
func (f *Filler) Refresh(ctx context.Context, key string, data []byte, from Source) bool {
	if f.closed() {
		return false
	}
	return f.Fills.Refresh(key, entry.Header(data), from.Seat.Node(), func(of *flight.Fill[Result], over func()) {
		f.start(ctx, of, from, &value.Lookup{Key: key, Data: data}, over)
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

func (f *Filler) newLock(key string) *filllock.Lock {
	return filllock.New(f.Client, filllock.PairOf(f.Store.Key(key)), f.LockTTL)
}

// A filling is a running fill.
type filling struct {
	*Filler
	fill *flight.Fill[Result]
	from Source
	lock *filllock.Lock
	slot slot
	wait wait.Wait
	over func() // to be called when no work is left

	next     attempt
	pausing  time.Duration   // of the next pause
	old      *value.Lookup   // what the key holds, as last seen
	replaces bool            // the key held old when this fill took the lock
	oldSince flight.Stamp    // old is known to be true as of this stamp
	newSince flight.Stamp    // old was stored after this stamp; 0: it may have been there before the fill
	away     error           // why Redis was not asked, or did not answer
	rest     time.Duration   // how long no other refresh of the same entry is started
	queued   time.Duration   // time spent waiting for slots
	inLine   time.Time       // since when it waits for one
	since    *tags.Sequences // before the load; nil without Options.Tags
	load     load
	outcome  outcome // of the load

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

// A state is what a fill does. It is a variable of the goroutine that runs the fill, so no other one changes it.
type state int

const (
	beginning state = iota
	asking          // asks Redis for the value, or for the lock
	paused          // waits for another process, which holds the lock
	queueing        // waits for a slot; the fill has no goroutine then
	dequeued        // has waited for a slot, and may have it
	loading         // the Source loads
	storing         // hands the outcome of the load to Redis and to the callers
	ended
	elsewhere // goes on in another goroutine
)

// start runs a fill from its first command to its end. l is what a read has found.
func (f *Filler) start(ctx context.Context, of *flight.Fill[Result], from Source, l *value.Lookup, over func()) {
	x := &filling{Filler: f, fill: of, from: from, over: over, old: l, lock: f.newLock(of.Key)}
	if from.Seat == nil {
		x.slot = f.Slots.NewSlot(of.Load)
	} else {
		x.slot, x.lock.Convoy = from.Seat.NewShare(), from.Seat.Asks()
	}
	x.run(ctx, beginning)
}

// run takes the turns of a fill until it has ended, or goes on in another goroutine.
func (x *filling) run(ctx context.Context, s state) {
	defer x.leave(ctx, &s)
	for s < ended {
		switch s {
		case beginning:
			s = x.begin(ctx)
		case asking:
			s = x.ask(ctx)
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

// leave is what the goroutine of a fill does last, also if a function of the user has panicked or called
// runtime.Goexit: then the state is still that of the turn. A Loader that has done so brings its outcome by that, and
// the fill goes on in another goroutine.
func (x *filling) leave(ctx context.Context, s *state) {
	switch *s {
	case elsewhere:
		return
	case loading:
		if o := x.User.Panicked(recover()); x.claim() {
			x.Events.LoadPanics(1)
			x.loaded(outcome{Outcome: o})
			go x.run(ctx, storing)
		}
		return
	case storing: // the codec, Options.Tags or Trace has called runtime.Goexit
		x.lock.InDoubt = true
		x.end(ctx, &Result{Found: value.Found{Err: x.User.Panicked(nil).Err}, Failed: true}, flight.Always)
	}
	x.end(ctx, nil, 0) // does nothing if the fill has ended
	x.from.Seat.Decided()
	x.slot.Release()
	if x.lock.InDoubt {
		lock := *x.lock
		x.Fills.Behind(func() { x.abandon(ctx, lock) })
	}
	x.over()
}

// end hands the result to the callers. The result is known to be true as of validFrom.
func (x *filling) end(ctx context.Context, r *Result, validFrom flight.Stamp) {
	x.waited(ctx) // WaitDone comes before the callers continue
	if r != nil && r.Failed {
		r.OldSince = x.oldSince
		if x.Store.Servable(&x.old.Found, time.Now()) {
			old := x.old.Found
			r.Old = &old
		}
	}
	x.Fills.End(x.fill, r, validFrom, x.rest)
}

// waited notes the end of a wait.
func (x *filling) waited(ctx context.Context) {
	x.wait.End()
	if x.wait.Polls == 0 {
		return
	}
	polls := x.wait.Polls
	x.wait.Polls = 0
	x.Events.WaitDone(ctx, x.fill.Key, x.wait.Begun, polls)
}

// abandon gives up an attempt to lock of which a command was not answered, or whose release was
// refused. Otherwise it could keep the lock without a load. It tries until Redis answers; what Redis
// refuses, until the lock has expired. The first command is sent also while the breaker is open: a frozen
// server executes it as soon as it goes on. When the cache is closed it tries once more.
func (f *Filler) abandon(ctx context.Context, lock filllock.Lock) {
	for end := time.Now().Add(f.LockTTL); ; {
		closed := f.closed()
		late := time.Until(lock.Late())
		switch _, err := lock.Abandon(ctx); {
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

package fill

import (
	"cmp"
	"context"
	"errors"
	"runtime/pprof"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/filllock"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/value"
	"github.com/singlefill/singlefill/internal/wait"
)

// maxRest is how long this process does not refresh an entry after a refresh that could not
// load: another process held the lock, RetryAfter was not over, no slot was free, or Redis did
// not answer.
const maxRest = time.Second

// restFor returns how long to rest after a refresh. left is what remains of the lock, or of
// RetryAfter.
func restFor(left time.Duration) time.Duration {
	if left == 0 {
		return value.RefreshRest
	}
	return min(left, maxRest)
}

// An attempt is what a fill knows between two commands.
type attempt struct {
	within     time.Duration // bound on the next command
	queue      bool          // wait for a slot before the next command
	wanted     bool          // a caller waits for this fill
	awaited    string        // token of the holder that the fill waits for
	asksFor    string        // Query.For of the last command
	lastAsked  flight.Stamp  // the lock was seen held, or free, as of this stamp
	unanswered int           // commands without an answer
}

// begin is the first turn of a fill.
func (x *filling) begin(ctx context.Context) state {
	if x.fill.Refresh && x.old.Data != nil {
		x.Store.Decode(ctx, x.old, x.old.Data) // the reader owns its value
	}
	x.wait = wait.New(x.times.Estimate(x.fill.Key, x.old.Entry.LoadTime))
	x.wait.Eager = x.from.Anew // a poll proves to the callers before it that the awaited load ends after their calls
	// With MaxFleetLoads the lock is asked for first: a slot costs two commands then.
	x.next = attempt{within: x.Client.Timeout, queue: !x.Slots.Leased()}
	if x.old.RedisErr != nil && x.Client.Silent(x.lock.Keys.Lock) {
		x.next.within -= x.old.Asked
	}
	return asking
}

// maxUnanswered is how many commands of one fill may stay unanswered while the server answers
// others.
const maxUnanswered = 2

// ask asks Redis for an entry or for the lock. One command does both: it tells a waiter that the value arrived,
// that the load failed, or that the holder died. Between two commands the fill holds no connection, and no slot
// while another process holds the lock.
//
// A refresh that no caller waits for asks once. It leaves the key to its holder, and the slots to
// loads that callers wait for.
func (x *filling) ask(ctx context.Context) state {
	a := &x.next
	x.rest = maxRest
	a.wanted = !x.fill.Refresh || x.Fills.Wanted(x.fill)
	take := x.trySlot(ctx)
	if !take {
		if !a.wanted && x.Fills.EndIfDeserted(x.fill, x.rest) {
			return ended
		}
		if a.queue && !x.Client.Away(x.lock.Keys.Lock) {
			return queueing
		}
	}
	if a.within < time.Millisecond || x.Client.Away(x.lock.Keys.Lock) {
		return x.unreached(ctx, cmp.Or(x.Client.Refusal(x.lock.Keys.Lock), client.ErrAway))
	}
	reply, stamp, err := x.getOrLock(ctx, take)
	switch {
	case err == nil:
	case x.worthAsking(err):
		return asking
	default:
		return x.unreached(ctx, err)
	}
	a.within, x.rest = x.Client.Timeout, restFor(reply.Left)
	next := decide(reply, view{wanted: a.wanted, servable: x.suffices()})
	return x.follow(ctx, next, reply, stamp)
}

// trySlot takes a slot if one is free.
func (x *filling) trySlot(ctx context.Context) bool {
	if x.next.wanted {
		return x.slot.Try(false)
	}
	return x.slot.TryLease(ctx)
}

// getOrLock sends one command: it looks for an entry and, if take is set, takes the lock if no process
// holds it. The stamp is from before the command. What the reply says of the key is true as of
// then.
func (x *filling) getOrLock(ctx context.Context, take bool) (filllock.Reply, flight.Stamp, error) {
	x.next.asksFor = x.purpose()
	a := x.next
	query := filllock.Query{Known: entry.Header(x.old.Data), Awaited: a.awaited, Take: take, For: a.asksFor, Spared: true}
	stamp, sent := x.Fills.Now(), time.Now()
	var reply filllock.Reply
	var err error
	found := value.Lookup{Key: x.fill.Key}
	x.Store.During([]*value.Lookup{&found}, func() {
		reply, err = client.Retry(ctx, a.within, x.Client.Again(x.lock.Keys.Lock), func(within time.Duration) (filllock.Reply, error) {
			return x.lock.GetOrLock(ctx, within, query)
		})
		x.wait.Answered(sent)
		if err == nil && reply.Status == filllock.Hit {
			x.Store.Decode(ctx, &found, []byte(reply.Text))
			found.Kept(reply.Kept)
		}
	})
	x.replaces = err == nil && reply.Status == filllock.Locked && reply.Known
	switch {
	case err != nil:
	case reply.Status == filllock.Hit:
		x.old, x.newSince, x.oldSince = new(found), x.oldSince, stamp
	default:
		x.oldSince = stamp
		if !reply.Known {
			x.old.Freshness = value.Expired
		}
	}
	return reply, stamp, err
}

// suffices reports whether what the key holds can end the fill.
func (x *filling) suffices() bool {
	return x.old.Freshness >= value.Revalidate && !(x.from.Anew && x.newSince == 0)
}

// purpose tells the script what the callers can do with the entry that the key holds.
func (x *filling) purpose() string {
	switch {
	case !x.next.wanted:
		return filllock.Served
	case x.Store.Servable(&x.old.Found, time.Now()):
		return filllock.Fallback
	}
	return filllock.Unusable
}

// worthAsking reports whether to ask again after a command without an answer: callers wait, and the
// server answers other commands. It has answered one that was late, since this process was held up.
func (x *filling) worthAsking(err error) bool {
	a := &x.next
	a.unanswered++
	if client.Late(err) {
		a.within = x.Client.Timeout
		return a.unanswered < maxUnanswered && a.wanted
	}
	return a.unanswered < maxUnanswered && a.wanted && client.Unreachable(err) && !x.Client.Silent(x.lock.Keys.Lock)
}

// unreached is called when Redis did not answer: the source serves the callers. A refresh without callers ends, and
// so does a fill that only brings a newer value, which could not be stored: callers that need a value join again.
func (x *filling) unreached(ctx context.Context, err error) state {
	x.away = err
	if x.fill.Refresh && x.Fills.EndIfDeserted(x.fill, x.rest) {
		return ended
	}
	if x.from.Anew {
		x.end(ctx, &Result{StoreErr: err}, 0)
		return ended
	}
	if !x.slot.Try(true) {
		return queueing
	}
	x.waited(ctx)
	x.load.unlocked = true
	return loading
}

// A step is what follows from a reply.
type step int

const (
	takeValue   step = iota // end with the value that has arrived
	takeFailure             // end with the failure of the load in another process
	takeLock                // load and store: the fill holds the lock
	askAgain                // ask again at once
	retryNew                // ask again at once, as a new attempt to lock
	waitForLock             // pause, then ask again
	waitForSlot             // queue for a slot, then ask again
	leaveKey                // leave the key to other processes, unless a caller has joined
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
		return takeLock
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
	return leaveKey
}

// follow takes a step.
func (x *filling) follow(ctx context.Context, next step, reply filllock.Reply, stamp flight.Stamp) state {
	a := &x.next
	switch next {
	case takeValue:
		x.wait.Found()
		x.times.Note(x.fill.Key, x.old.Entry.LoadTime)
		r := &Result{Found: x.old.Found}
		if r.Freshness == value.Fresh { // Expire stores the old value again
			r.NewSince = x.newSince
		}
		x.end(ctx, r, stamp)
		return ended
	case takeFailure:
		x.wait.Found()
		// Callers that had joined when the lock was last seen held have waited for that load.
		err := x.User.RemoteError(x.fill.Key, reply.Text)
		r := &Result{Found: value.Found{Err: err}, Failed: err != value.ErrNotFound, NoStale: errors.Is(err, ErrNoStale)}
		r.Resting, r.NewSince = reply.Left > 0, a.lastAsked
		validFrom := a.lastAsked
		if reply.Left > 0 && a.asksFor == filllock.Unusable { // it is remembered
			validFrom = stamp
		}
		x.end(ctx, r, validFrom)
		return ended
	case takeLock:
		if x.slot.Held() {
			x.waited(ctx)
			return loading
		}
		// The server executed an earlier command to lock only now, and the slot has been given back
		// since.
		lock := *x.lock
		x.Fills.Behind(func() { x.abandon(ctx, lock) })
		x.lock = x.newLock(x.fill.Key)
	case retryNew:
		x.lock = x.newLock(x.fill.Key)
	case waitForLock:
		x.from.Seat.Decided()
		x.slot.Release()
		a.awaited, a.lastAsked, a.queue = reply.Text, stamp, false
		x.wait.Polls++
		x.pausing = x.wait.Pause(reply)
		x.wait.Listen(x.Client, x.lock.Keys.Lock, reply)
		return paused
	case waitForSlot:
		a.queue, a.lastAsked = true, stamp
	case leaveKey:
		if x.Fills.EndIfDeserted(x.fill, x.rest) {
			return ended
		}
	}
	return asking
}

// pause sleeps, for a shorter time if a caller joins.
func (x *filling) pause(ctx context.Context) state {
	deserted := func() bool { return x.Fills.EndIfDeserted(x.fill, x.rest) }
	switch x.wait.Sleep(x.pausing, x.Closing, x.fill.Wake, deserted) {
	case wait.Closed:
		x.end(ctx, &Result{Found: value.Found{Err: flight.ErrClosed}}, flight.Always)
		return ended
	case wait.Interrupted:
		return ended
	}
	return asking
}

// queuedPoll is the time between two polls of all queued fills of this cache together.
const queuedPoll = 250 * time.Millisecond

// queue has the fill go on when it has a slot, or when it is time to poll for a value from another
// process. Until then it has no goroutine. The more fills are queued, the more rarely each of them
// polls: a queue of any length sends four commands a second.
func (x *filling) queue(ctx context.Context) state {
	if x.unwanted(ctx) {
		return ended
	}
	x.wait.End()
	x.inLine = time.Now()
	x.slot.Queue(func() { go x.Fills.Wake(x.fill) })
	poll := time.Duration(max(x.Slots.Queued(), 1)*x.from.Seat.Fills()) * queuedPoll
	x.Fills.Queue(x.fill, poll, func() {
		pprof.SetGoroutineLabels(ctx) // not those of whatever has woken the fill
		x.run(ctx, dequeued)
	})
	return elsewhere
}

// dequeue is the first turn after the queue.
func (x *filling) dequeue(ctx context.Context) state {
	x.queued += time.Since(x.inLine)
	if x.unwanted(ctx) {
		return ended
	}
	// Redis may have come back. Without a slot the command is a poll.
	x.next.within, x.next.unanswered, x.next.queue = x.Client.Timeout, 0, false
	return asking
}

// unwanted ends a fill without a slot if no caller waits, or the cache was closed and no load waits: Close
// waits for the load that needs this one, unless loads are aborted. Check the callers first: EndIfDeserted takes the lock under which the
// first caller joins, so afterwards Awaited sees that caller's load.
func (x *filling) unwanted(ctx context.Context) bool {
	if x.Fills.EndIfDeserted(x.fill, x.rest) {
		return true
	}
	if !x.closed() || x.fill.Load.Awaited() && x.Fills.Aborting().Err() == nil {
		return false
	}
	x.end(ctx, &Result{Found: value.Found{Err: flight.ErrClosed}}, flight.Always)
	return true
}

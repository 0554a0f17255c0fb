package fill

import (
	"cmp"
	"context"
	"errors"
	"runtime/pprof"
	"slices"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/filllock"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/foreign"
	"github.com/singlefill/singlefill/internal/value"
	"github.com/singlefill/singlefill/internal/wait"
)

// maxRest is how long this process does not refresh an entry after a refresh that could not
// load: another process held the lock, RetryAfter was not over, no slot was free, or Redis did
// not answer.
const maxRest = time.Second

// begin is the first turn of a set.
func (x *set) begin(ctx context.Context) state {
	for _, f := range x.fills {
		if f.fill.Refresh && f.old.Data != nil {
			x.Store.Decode(ctx, f.old, f.old.Data, time.Now()) // the reader owns its value
		}
		// With MaxFleetLoads the lock is asked for first: a slot costs two commands then.
		f.within, f.queue = x.Client.Timeout, !x.Slots.Leased()
		if f.old.RedisErr != nil && x.Client.Silent(f.lock.Keys.Lock) {
			f.within -= f.old.Asked
		}
	}
	first := x.fills[0] // the awaited load takes as long as the loads of its key
	x.wait = wait.New(x.times.Estimate(first.key, first.old.Entry.LoadTime))
	x.wait.Eager = x.from.Anew // a poll proves to earlier callers that the awaited load ends after their calls
	return asking
}

// ask asks Redis for entries or for locks. One command does both: it tells a waiter that the value arrived,
// that the load failed, or that the holder died. Between two commands the set holds no connection, and no slot
// while another process holds the locks.
//
// A refresh that no caller waits for asks once. It leaves the key to its holder, and the slots to
// loads that callers wait for.
func (x *set) ask(ctx context.Context) state {
	wanted, queue, away := false, false, false
	for _, f := range x.fills {
		f.rest = maxRest
		f.wanted = !f.fill.Refresh || x.Fills.Wanted(f.fill)
		wanted, queue, away = wanted || f.wanted, queue || f.queue, away || x.Client.Away(f.lock.Keys.Lock)
	}
	if wanted && x.Slots.Leased() { // the others ask for a lease at once, or not at all
		if some := slices.DeleteFunc(slices.Clone(x.fills), func(f *filling) bool { return f.wanted }); len(some) > 0 {
			x.split(some).goOn(ctx, asking)
		}
	}
	take := x.trySlot(ctx, wanted)
	if !take {
		x.fills = slices.DeleteFunc(slices.Clone(x.fills), func(f *filling) bool { return !f.wanted && x.deserted(ctx, f) })
		switch {
		case len(x.fills) == 0:
			return x.over(ctx)
		case queue && !away:
			return queueing
		}
	}
	sent := time.Now()
	parts := client.InParts(x.Client, x.fills, func(f *filling) string { return f.lock.Keys.Lock })
	if len(parts) == 1 {
		x.getOrLock(ctx, x.fills, take)
	} else {
		x.askTogether(ctx, parts, take)
	}
	x.wait.Answered(sent)
	return answered
}

// trySlot takes a slot if one is free.
func (x *set) trySlot(ctx context.Context, wanted bool) bool {
	if wanted {
		return x.slot.Try(false)
	}
	return x.slot.TryLease(ctx)
}

// gather is how long fills that have their answers wait for a server that has given none.
const gather = 5 * time.Millisecond

// askTogether asks several servers at the same time. If none of them has answered for a moment, the fills that have no
// answers become another set: their locks are not held, or may be held by others, and no lock is held while another
// one is awaited.
func (x *set) askTogether(ctx context.Context, parts [][]*filling, take bool) {
	sent, replies := time.Now(), make([]chan struct{}, len(parts))
	arrived := make(chan struct{}, len(parts))
	for i, part := range parts {
		replies[i] = make(chan struct{})
		foreign.Go(func() { x.getOrLock(ctx, part, take) }, func(failed *foreign.Failure) {
			for _, f := range part {
				if failed != nil {
					f.reply = filllock.Answer{Err: failed}
				}
			}
			close(replies[i])
			arrived <- struct{}{}
		})
	}
	<-arrived
	patience := time.NewTimer(gather)
	defer patience.Stop()
	for left := len(parts) - 1; left > 0; left-- {
		select {
		case <-arrived:
			patience.Reset(gather)
			continue
		case <-patience.C:
		}
		for i, part := range parts {
			select {
			case <-replies[i]:
			default:
				y := x.split(part)
				x.Fills.Run(y.load, func(*flight.Load) {
					<-replies[i]
					y.wait.Answered(sent)
					y.run(ctx, answered)
				})
			}
		}
		return
	}
}

// follow goes the ways of the fills. Where these part, it goes on with a load, or else with the fills that ask or wait
// for a slot: they may hold the slot of the set.
func (x *set) follow(ctx context.Context) state {
	unanswered := 0
	for _, f := range x.fills {
		switch x.decided(ctx, f); {
		case f.next == ended:
			x.release(ctx, f)
		case f.next == asking && f.reply.Err != nil:
			unanswered++
			f.apart = unanswered
		}
	}
	for _, f := range x.fills {
		if f.apart > 0 { // if none was answered, they may have had too much to say together
			f.apart = 1 + (f.apart-1)*parts/unanswered*(unanswered/len(x.fills))
		}
	}
	x.fills = slices.DeleteFunc(slices.Clone(x.fills), func(f *filling) bool { return f.next == ended })
	if len(x.fills) == 0 {
		return x.over(ctx)
	}
	if !slices.ContainsFunc(x.fills, func(f *filling) bool { return f.way != x.fills[0].way }) {
		return x.enter(x.fills[0].way)
	}
	var ways []way
	together := make(map[way][]*filling)
	for _, f := range x.fills {
		if together[f.way] == nil {
			ways = append(ways, f.way)
		}
		together[f.way] = append(together[f.way], f)
	}
	mine := slices.MinFunc(ways, func(a, b way) int { return cmp.Compare(rank(a.next), rank(b.next)) })
	for _, w := range ways {
		if w != mine {
			y := x.split(together[w])
			y.goOn(ctx, y.enter(w))
		}
	}
	return x.enter(mine)
}

// parts is in how many parts a set asks again of which no fill was answered.
const parts = 4

// rank is the order of states in which a set prefers them to parting with its fills.
func rank(s state) int { return slices.Index([]state{loading, asking, queueing, paused}, s) }

// enter enters a way.
func (x *set) enter(w way) state {
	if w.next == paused {
		x.beginPause()
	}
	return w.next
}

// decided finds the way of a fill. It panics for a command that has not returned.
func (x *set) decided(ctx context.Context, f *filling) {
	f.way = way{}
	switch r, err := f.reply.Value, f.reply.Err; {
	case err == nil:
		f.within, f.rest = x.Client.Timeout, cmp.Or(min(r.Left, maxRest), value.RefreshRest)
		f.next = x.take(ctx, f, decide(r, view{wanted: f.wanted, servable: x.suffices(f)}))
	case x.worthAsking(f, err):
		f.next = asking
	case isFailure(err):
		panic(err)
	default:
		f.next = x.unreached(ctx, f)
	}
}

func isFailure(err error) bool {
	_, is := err.(*foreign.Failure)
	return is
}

// suffices reports whether what the key holds can end the fill.
func (x *set) suffices(f *filling) bool {
	return f.old.Freshness >= value.Revalidate && !(x.from.Anew && f.newSince == 0)
}

// worthAsking reports whether to ask again after a command without an answer: callers wait, and the
// server answers other commands. It has answered a command that was late, since this process was held up.
func (x *set) worthAsking(f *filling, err error) bool {
	f.unanswered++
	if client.Late(err) {
		f.within = x.Client.Timeout
		return f.unanswered < maxUnanswered && f.wanted
	}
	return f.unanswered < maxUnanswered && f.wanted && client.Unreachable(err) && !x.Client.Silent(f.lock.Keys.Lock)
}

// unreached is called when Redis did not answer: the source serves the callers. A refresh without callers ends, and
// a fill that only brings a newer value ends, too, since that could not be stored: callers that need a value join
// again.
func (x *set) unreached(ctx context.Context, f *filling) state {
	f.away = f.reply.Err
	switch {
	case f.fill.Refresh && x.deserted(ctx, f):
		return ended
	case x.from.Anew:
		x.end(ctx, f, &Result{StoreErr: f.away}, 0)
		return ended
	case !x.slot.Try(true):
		return queueing
	}
	x.waited(ctx, f)
	f.unlocked = true
	return loading
}

// take takes a step.
func (x *set) take(ctx context.Context, f *filling, next step) state {
	reply := f.reply.Value
	switch next {
	case takeValue:
		x.found(f)
		x.times.Note(f.key, f.old.Entry.LoadTime)
		r := &Result{Found: f.old.Found}
		if r.Freshness == value.Fresh { // Expire stores the old value again
			r.NewSince = f.newSince
		}
		x.end(ctx, f, r, f.stamp)
		return ended
	case takeFailure:
		x.found(f)
		// Callers that had joined when the lock was last seen held have waited for that load.
		err := x.User.RemoteError(f.key, reply.Text)
		r := &Result{Found: value.Found{Err: err}, Failed: err != value.ErrNotFound, NoStale: errors.Is(err, ErrNoStale)}
		r.Resting, r.NewSince = reply.Left > 0, f.lastAsked
		validFrom := f.lastAsked
		if reply.Left > 0 && f.asksFor == filllock.Unusable { // it is remembered
			validFrom = f.stamp
		}
		x.end(ctx, f, r, validFrom)
		return ended
	case takeLock:
		if x.slot.Held() || x.slot.Try(false) {
			x.waited(ctx, f)
			return loading
		}
		// The server executed an earlier command to lock only now, and the slot has been given back
		// since.
		x.giveUp(ctx, f)
		x.lockAnew([]*filling{f})
	case retryNew:
		x.lockAnew([]*filling{f})
	case waitForLock:
		f.awaited, f.lastAsked, f.queue, f.holder = reply.Text, f.stamp, false, reply.Text
		return paused
	case waitForSlot:
		f.queue, f.lastAsked = true, f.stamp
	case leaveKey:
		if x.deserted(ctx, f) {
			return ended
		}
	}
	return asking
}

// found notes that the load has ended for which a fill has waited.
func (x *set) found(f *filling) {
	if f.ear != nil {
		f.ear.Found(x.wait.Heard)
	}
}

// beginPause is called when another process holds the locks of the fills.
func (x *set) beginPause() {
	x.slot.Release()
	held, ears := x.fills[0].reply.Value, make([]*wait.Ear, len(x.fills))
	for i, f := range x.fills {
		f.polls++
		if f.ear == nil {
			f.ear = wait.NewEar(x.Client, f.lock.Keys.Lock, func() { x.Fills.Tell(f.fill) })
		}
		ears[i] = f.ear
		held = filllock.Reply{Age: max(held.Age, f.reply.Value.Age), Left: min(held.Left, f.reply.Value.Left)}
	}
	x.wait.Polls++
	x.until = time.Now().Add(x.wait.Pause(held, ears))
	x.wait.Listen(held, ears)
}

// pause sleeps, for a shorter time if a caller joins. Fills whose ears have been told something ask by themselves.
func (x *set) pause(ctx context.Context) state {
	before, joined, hears := x.wait.Heard, false, make(map[*filling]bool)
	event := x.wait.Sleep(time.Until(x.until), x.Closing, x.load.Woken, func() (seen wait.Look) {
		if seen.Joined = x.Fills.Nudged(x.load); seen.Joined {
			seen.Deserted, joined = x.drop(ctx), true
		}
		for _, f := range x.fills {
			hears[f] = f.ear.Told(&seen) || hears[f]
		}
		return seen
	})
	switch event {
	case wait.Closed:
		x.failClosed(ctx)
		return x.over(ctx)
	case wait.Interrupted:
		return x.over(ctx)
	case wait.Woken:
		told := slices.DeleteFunc(slices.Clone(x.fills), func(f *filling) bool { return !hears[f] })
		if 0 < len(told) && len(told) < len(x.fills) {
			x.split(told).goOn(ctx, asking)
			if x.wait.Heard = before; joined {
				x.until = x.wait.Joined(x.until)
			}
			return paused
		}
	}
	return asking
}

const (
	// queuedPoll is the time between two polls of all queued fills of this cache together.
	queuedPoll = 250 * time.Millisecond

	// hastyPoll is the time between two polls of a set, for each of its keys, when keys have been invalidated or
	// callers have left: a key may have been Set.
	hastyPoll = 10 * time.Millisecond
)

// queue has the set go on when it has a slot, or when it is time to poll for values from another
// process. Until then it has no goroutine. The more fills are queued, the more rarely each of them
// polls: a queue of any length sends four commands a second.
func (x *set) queue(ctx context.Context) state {
	if x.unwanted(ctx) {
		return x.over(ctx)
	}
	for _, f := range x.fills {
		if f.ear != nil {
			f.ear.Close()
		}
	}
	x.inLine = time.Now()
	x.slot.Queue(func() { go x.Fills.Wake(x.load) })
	poll := time.Duration(max(x.Slots.Queued(), 1)*len(x.fills)) * queuedPoll
	if x.hasty {
		poll = time.Until(x.polled.Add(x.hastyPause()))
	}
	x.Fills.Queue(x.load, poll, func(*flight.Load) {
		pprof.SetGoroutineLabels(ctx) // not the labels of the goroutine that has woken the set
		x.run(ctx, dequeued)
	})
	return ended
}

// dequeue is the first turn after the queue.
func (x *set) dequeue(ctx context.Context) state {
	x.queued += time.Since(x.inLine)
	if x.unwanted(ctx) {
		return x.over(ctx)
	}
	nudged := x.Fills.Nudged(x.load) || x.hasty
	if x.hasty = nudged && !x.slot.Held() && time.Since(x.polled) < x.hastyPause(); x.hasty {
		return queueing
	}
	// Redis may have come back. Without a slot the command is a poll.
	x.polled = time.Now()
	for _, f := range x.fills {
		f.within, f.unanswered, f.queue = x.Client.Timeout, 0, false
	}
	return asking
}

// hastyPause is the least time between two polls of a queued set. A single key has none.
func (x *set) hastyPause() time.Duration { return time.Duration(len(x.fills)-1) * hastyPoll }

// unwanted ends fills without a slot that no caller wants, and all of them if the cache was closed and no load waits:
// Close waits for the load that needs one of these, unless loads are aborted. It reports whether none is left. Check
// the callers first: drop takes the mutex under which the first caller joins, so afterwards Awaited sees that caller's
// load.
func (x *set) unwanted(ctx context.Context) bool {
	if x.drop(ctx) {
		return true
	}
	if !x.closed() || x.load.Awaited() && x.Fills.Aborting().Err() == nil {
		return false
	}
	x.failClosed(ctx)
	return true
}

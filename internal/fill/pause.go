package fill

import (
	"runtime/pprof"
	"slices"
	"time"

	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/wait"
)

// A pausing waits for another process, which holds the locks.
type pausing struct {
	*acquiring
	until time.Time
}

// beginPause is called when another process holds the locks of the fills.
func (a *acquiring) beginPause(holder string, questions []*question) pausing {
	a.slot.Release()
	held, ears := questions[0].answer.Value, make([]*wait.Ear, len(questions))
	for i, q := range questions {
		f, r := q.filling, q.answer.Value
		f.polls++
		if f.ear == nil {
			f.ear = wait.NewEar(a.Client, f.lock.Keys.Lock, func() { a.Fills.Tell(f.Fill) })
		}
		ears[i] = f.ear
		held.Age, held.Left = max(held.Age, r.Age), min(held.Left, r.Left)
	}
	a.awaited = holder
	a.wait.Polls++
	until := time.Now().Add(a.wait.Pause(held, ears))
	a.wait.Listen(held, ears)
	return pausing{a, until}
}

// run sleeps, for a shorter time if a caller joins. Fills whose ears have been told something ask by themselves.
func (p pausing) run() phase {
	before, joined, told := p.wait.Heard, false, make(map[*filling]bool)
	event := p.wait.Sleep(time.Until(p.until), p.Closing, p.load.Woken, func() (seen wait.Look) {
		if seen.Joined = p.Fills.Nudged(p.load); seen.Joined {
			seen.Deserted, joined = p.drop(), true
		}
		for _, f := range p.fills {
			told[f] = f.ear.Told(&seen) || told[f]
		}
		return seen
	})
	switch event {
	case wait.Closed:
		return p.failClosed()
	case wait.Interrupted:
		return p.over()
	case wait.Woken:
		some := slices.DeleteFunc(slices.Clone(p.fills), func(f *filling) bool { return !told[f] })
		if 0 < len(some) && len(some) < len(p.fills) {
			y := p.split(some)
			y.goOn(asking{acquiring: y})
			if p.wait.Heard = before; joined {
				p.until = p.wait.Joined(p.until)
			}
			return p
		}
	}
	return asking{acquiring: p.acquiring}
}

// A queueing waits for a slot. The set has no goroutine then.
type queueing struct {
	*acquiring
	hasty bool // it asks soon, since keys have been invalidated
}

const (
	// queuedPoll is the time between two polls of all queued fills of this cache together.
	queuedPoll = 250 * time.Millisecond

	// hastyPoll is the time between two polls of a set, for each of its keys, when keys have been invalidated or
	// callers have left: a key may have been Set.
	hastyPoll = 10 * time.Millisecond
)

// run has the set go on when it has a slot, or when it is time to poll for values from another
// process. Until then it has no goroutine. The more fills are queued, the more rarely each of them
// polls: a queue of any length sends four commands a second.
func (q queueing) run() phase {
	if q.unwanted() {
		return nil
	}
	for _, f := range q.fills {
		if f.ear != nil {
			f.ear.Close()
		}
	}
	next := dequeued{q, time.Now()}
	q.slot.Queue(func() { go q.Fills.Wake(q.load) })
	poll := time.Duration(max(q.Slots.Queued(), 1)*len(q.fills)) * queuedPoll
	if q.hasty {
		poll = time.Until(q.polled.Add(q.hastyPause()))
	}
	q.Fills.Queue(q.load, poll, func(*flight.Load) {
		pprof.SetGoroutineLabels(q.ctx) // not the labels of the goroutine that has woken the set
		q.set.run(next)
	})
	return nil
}

// A dequeued has waited for a slot, and may have it.
type dequeued struct {
	queueing
	since time.Time // when it began to wait
}

func (d dequeued) run() phase {
	d.queued += time.Since(d.since)
	if d.unwanted() {
		return nil
	}
	nudged := d.Fills.Nudged(d.load) || d.hasty
	if nudged && !d.slot.Held() && time.Since(d.polled) < d.hastyPause() {
		return queueing{d.acquiring, true}
	}
	// Redis may have come back. Without a slot the command is a poll.
	d.polled, d.unanswered = time.Now(), 0
	return asking{acquiring: d.acquiring}
}

// hastyPause is the least time between two polls of a queued set. A single key has none.
func (a *acquiring) hastyPause() time.Duration { return time.Duration(len(a.fills)-1) * hastyPoll }

// unwanted ends fills without a slot that no caller wants, and all of them if the cache was closed and no load waits:
// Close waits for the load that needs one of these, unless loads are aborted. It reports whether the set is over. Check
// the callers first: drop takes the mutex under which the first caller joins, so afterwards Awaited sees that caller's
// load.
func (a *acquiring) unwanted() bool {
	switch {
	case a.drop():
		a.over()
	case !a.closed() || a.load.Awaited() && a.Fills.Aborting().Err() == nil:
		return false
	default:
		a.failClosed()
	}
	return true
}

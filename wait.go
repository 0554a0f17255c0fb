package singlefill

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/singlefill/singlefill/internal/fill"
	"github.com/singlefill/singlefill/internal/flight"
)

// A wait is one flight's waiting for another process.
//
// It asks rarely while the load it waits for cannot be over yet, and densely when it is about to be. How long loads
// of the key take, at least and at most, the process remembers; how long this one has taken so far, the reply says.
// Up to the earliest likely end a pause is half of the time to it, so that a wrong guess costs half of what is left
// of it at most, and never more than maxPause. Until the latest likely end it is a twelfth of the time between both.
// From there on, or from the beginning if nothing is known, it is a fifth of the time since: so late is the value
// found at most, in a number of polls that grows as the logarithm of the load.
//
// Those who wait for one key in thousands of processes ask densely at the same time. All that one of them sees of the
// others is how long its own commands take, and it pauses crowd times as long at least. So when they are too many for
// the server, its queue settles at one in crowd+1 of them, and each asks as often as its turn comes. One slow command
// alone may be slow for any reason: the quicker one of the last two counts, and the first one no further than maxPause.
type wait struct {
	begun    time.Time
	polls    int
	expected estimate
	last     time.Duration // what the last command took
	quick    time.Duration // what the quicker one of the last two took
}

const (
	minPause   = 2 * time.Millisecond
	maxPause   = 250 * time.Millisecond
	crowd      = 2
	firstNudge = 10 * time.Millisecond
	maxNudge   = 50 * time.Millisecond
)

func newWait(expected estimate) wait {
	return wait{begun: time.Now(), expected: expected, last: maxPause / crowd}
}

// heard notes how long a command took.
func (w *wait) heard(took time.Duration) {
	w.quick, w.last = min(w.last, took), took
}

// pause returns how long to sleep before asking again, a quarter shorter or longer at random, so that those who
// ask together part; but not past the end of the holder's lock.
func (w *wait) pause(reply fill.Reply) time.Duration {
	d := max(w.expected.pause(reply.Age), minPause)
	d = max(min(d, maxPause), crowd*w.quick)
	d = time.Duration(float64(d) * (0.75 + rand.Float64()/2))
	return min(d, reply.Left+time.Millisecond+rand.N(4*time.Millisecond))
}

// joinPause returns how long to sleep when somebody new has come, for whom the value may be there already: 10 to
// 50 ms, growing with the time waited, so that a crowd of newcomers does not make a crowd of commands.
func (w *wait) joinPause() time.Duration {
	return max(min(firstNudge+time.Since(w.begun)/32, maxNudge), crowd*w.quick)
}

// An event is what ends a pause.
type event int

const (
	paused      event = iota // the time is over
	granted                  // there is a place to load
	interrupted              // the fill has ended: the cache is being closed, or no caller waits any more
)

// pause sleeps for d; less if a caller joins.
func (x *filling[T]) pause(ctx context.Context, d time.Duration) event { return x.await(ctx, d, nil) }

// queuedPoll is how often the keys that wait for a place to load are looked for in Redis, all together.
const queuedPoll = 250 * time.Millisecond

// queue waits for a place to load, until it is time to look whether another process has brought the value. The more fills
// wait, the more rarely each of them looks: a queue of any length sends a few commands a second.
func (x *filling[T]) queue(ctx context.Context) event {
	x.fills.Queued(x.fill, true)
	defer x.fills.Queued(x.fill, false)
	granted := x.slot.Queue()
	return x.await(ctx, time.Duration(max(x.slots.Queued(), 1))*queuedPoll, granted)
}

// await sleeps for d, or until slot receives a value. Without a slot to wait for, a caller that joins shortens it; with one,
// an invalidation of the key ends it.
func (x *filling[T]) await(ctx context.Context, d time.Duration, slot <-chan struct{}) event {
	timer := time.NewTimer(d)
	defer timer.Stop()
	end, closing := time.Now().Add(d), x.closing
	if slot != nil && x.fill.Load.Awaited() {
		closing = nil // Close waits for the load that needs this one
	}
	for {
		select {
		case <-timer.C:
			return paused
		case <-slot:
			return granted
		case <-closing:
			x.end(ctx, &result[T]{err: ErrClosed}, flight.Always)
			return interrupted
		case <-x.fill.Wake:
			if x.fills.EndIfDeserted(x.fill) {
				return interrupted
			}
			if slot != nil {
				return paused
			}
			timer.Reset(min(time.Until(end), x.wait.joinPause()))
		}
	}
}

func (x *filling[T]) waited(ctx context.Context) {
	if x.wait.polls == 0 {
		return
	}
	x.counters.waits.Add(1)
	polls := x.wait.polls
	x.wait.polls = 0
	if x.opts.trace.WaitDone != nil {
		x.opts.trace.WaitDone(ctx, WaitInfo{Key: x.fill.Key, Duration: time.Since(x.wait.begun), Polls: polls})
	}
}

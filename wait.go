package singlefill

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/filllock"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/wake"
)

// A wait decides when a fill that waits for another process polls Redis.
//
// It polls rarely while the load cannot be over yet, and often when the load is about to end. The
// process remembers the range of load times of the key; the reply tells for how long the current
// load has run. Before the early end of the range, a pause is half of the time left to it, so a
// wrong guess costs at most half of what is left, and never more than maxPause. Within the range, a
// pause is a twelfth of its length. After it, or if no range is known, a pause is a fifth of the
// time since: that bounds how late a waiter finds the value, in a number of polls that grows with
// the logarithm of the load.
//
// A wait that the second poll does not end subscribes to wake-ups. While its subscription is complete,
// it polls at once when it is woken, and otherwise rarely: a lost wake-up costs at most listeningPause and a quarter
// of it, and no more than is left of the holder's lock. A wake-up that ends no wait, which may be
// forged or late, makes the next one count less.
//
// Processes that wait for the same key poll at the same time. A process notices the others only by
// the time that its own commands take. It pauses at least crowd times as long, so that no more than
// one waiter in crowd+1 is in the queue of the server. A single slow command may have other causes:
// the quicker one of the last two counts, and the first one up to maxPause.
type wait struct {
	begun    time.Time
	polls    int
	expected estimate
	sent     time.Time     // when the last command was sent
	last     time.Duration // duration of the last command
	quick    time.Duration // duration of the quicker one of the last two

	sub      *wake.Subscription
	wakeUp   chan bool // has an element when it is worth polling; true: a wake-up
	complete bool      // every wake-up since the last command
	since    time.Time // when that was sent
	woken    int       // wake-ups in a row that brought a poll forward
}

const (
	minPause     = 2 * time.Millisecond
	maxPause     = 250 * time.Millisecond
	crowd        = 2
	minJoinPause = 10 * time.Millisecond
	maxJoinPause = 50 * time.Millisecond

	// A wait listens before a pause this long, and after this number of polls.
	listenAfter      = 10 * time.Millisecond
	listenAfterPolls = 2

	// listenReplies is how many replies it takes until a wait is subscribed: of the connection, of the first
	// command on it, of the subscription, and of the next poll.
	listenReplies = 4

	// listeningPause is the time between two polls while no wake-up comes. It is longer than LockTTL by
	// default: what is polled for is the end of a dead holder's lock.
	listeningPause = 7 * time.Second
)

func newWait(expected estimate) wait {
	return wait{begun: time.Now(), expected: expected, last: maxPause / crowd}
}

// answered notes when a command was sent, and that it has been answered now.
func (w *wait) answered(sent time.Time) {
	took := time.Since(sent)
	w.sent, w.quick, w.last = sent, min(w.last, took), took
}

// listen begins to listen before a pause, if the wait is long enough to be worth it. A connection
// costs the server as much as several polls. Where replies are slow because many processes wait, the
// queue of the server must not grow: only some of them, at random, listen before the same pause.
func (w *wait) listen(c *client.Client, key string, reply filllock.Reply) {
	d := w.expected.pause(reply.Age)
	short := d < listenAfter && w.polls < listenAfterPolls || d < listenReplies*w.last
	if w.sub != nil || short || rand.N(w.last+1) > listenAfter {
		return
	}
	wakeUp := make(chan bool, 1)
	w.wakeUp = wakeUp
	w.sub = c.Listen(key, func(_ string, message bool) {
		select {
		case wakeUp <- message:
		default:
		}
	})
}

// found notes that the awaited load has ended. If a poll has found that out that no wake-up brought
// forward, wake-ups get lost.
func (w *wait) found() {
	if w.complete {
		w.sub.Missed(w.since)
	}
}

// end ends the wait.
func (w *wait) end() {
	if w.sub == nil {
		return
	}
	w.sub.Close()
	w.sub, w.wakeUp, w.complete = nil, nil, false
}

// pause returns how long to sleep before the next poll. It is up to a quarter shorter or longer at
// random, so that processes that poll together drift apart. It does not exceed the end of the
// holder's lock.
func (w *wait) pause(reply filllock.Reply) time.Duration {
	d := max(w.expected.pause(reply.Age), minPause)
	d = max(min(d, maxPause), crowd*w.quick)
	w.since = w.sent
	if w.complete = w.sub != nil && w.sub.Complete(w.since); w.complete {
		d = w.listeningPause(reply)
	}
	d = time.Duration(float64(d) * (0.75 + rand.Float64()/2))
	return min(d, reply.Left+time.Millisecond+rand.N(4*time.Millisecond))
}

// listeningPause returns how long to sleep if no wake-up comes. It is only worth a poll to find out
// that a wake-up was lost.
func (w *wait) listeningPause(reply filllock.Reply) time.Duration {
	if left := w.expected.late - reply.Age; left > 0 {
		return min(left+left/2+2*minJoinPause, listeningPause)
	}
	return listeningPause
}

// joinPause returns how long to sleep after a caller has joined, for which the value may already be
// there. It grows from 10 to 50 ms with the time waited, so that many new callers do not cause many
// commands.
func (w *wait) joinPause() time.Duration {
	return max(min(minJoinPause+time.Since(w.begun)/32, maxJoinPause), crowd*w.quick)
}

// wakePause returns how long to sleep after a wake-up, or after the subscription has become complete or
// ceased to be: not at all, unless the last wake-ups were of no use.
func (w *wait) wakePause(message bool) time.Duration {
	if message {
		w.woken++
	}
	if w.woken <= 1 {
		return 0
	}
	return min(minPause<<min(w.woken, 10), maxPause) - time.Since(w.sent)
}

// An event is what ends a pause.
type event int

const (
	paused      event = iota // the time is over
	granted                  // the fill has a slot
	interrupted              // the fill has ended: the cache was closed, or no caller waits
)

// pause sleeps for d, or less if a caller joins.
func (x *filling) pause(ctx context.Context, d time.Duration) event { return x.await(ctx, d, nil) }

// queuedPoll is the time between two polls of all queued fills of this cache together.
const queuedPoll = 250 * time.Millisecond

// queue waits for a slot, or until it is time to poll for a value from another process. The more
// fills are queued, the more rarely each of them polls: a queue of any length sends four commands a
// second.
func (x *filling) queue(ctx context.Context) event {
	x.fills.Queued(x.fill, true)
	begun := time.Now()
	defer func() {
		x.queued += time.Since(begun)
		x.fills.Queued(x.fill, false)
	}()
	granted := x.slot.Queue()
	return x.await(ctx, time.Duration(max(x.slots.Queued(), 1)*x.seat.fills())*queuedPoll, granted)
}

// await sleeps for d, or until slot receives a value, or a wake-up comes. If slot is nil, a caller
// that joins shortens the sleep unless a wake-up would do so; otherwise an invalidation of the key
// ends it.
func (x *filling) await(ctx context.Context, d time.Duration, slot <-chan struct{}) event {
	timer := time.NewTimer(d)
	defer timer.Stop()
	woken := false
	end, closing := time.Now().Add(d), x.closing
	if slot != nil && x.fill.Load.Awaited() {
		closing = nil // Close waits for the load that needs this one
	}
	for {
		select {
		case <-timer.C:
			if !woken {
				x.wait.woken = 0
			}
			return paused
		case <-slot:
			return granted
		case message := <-x.wait.wakeUp:
			x.wait.complete, woken = false, true
			timer.Reset(min(time.Until(end), x.wait.wakePause(message)))
		case <-closing:
			x.end(ctx, &result{err: ErrClosed}, flight.Always)
			return interrupted
		case <-x.fill.Wake:
			if x.fills.EndIfDeserted(x.fill, x.rest) {
				return interrupted
			}
			if slot != nil {
				return paused
			}
			if x.wait.complete {
				continue
			}
			timer.Reset(min(time.Until(end), x.wait.joinPause()))
		}
	}
}

// waited notes the end of a wait.
func (x *filling) waited(ctx context.Context) {
	x.wait.end()
	if x.wait.polls == 0 {
		return
	}
	x.counters.waits.Add(1)
	polls := x.wait.polls
	x.wait.polls = 0
	if t := x.trace.Load(); t.WaitDone != nil {
		t.WaitDone(ctx, WaitInfo{Key: x.fill.Key, Duration: time.Since(x.wait.begun), Polls: polls})
	}
}

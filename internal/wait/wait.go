// Package wait decides when a fill that waits for another process asks Redis again: it knows how long
// loads take, and listens to wake-ups.
package wait

import (
	"math/rand/v2"
	"time"

	"github.com/singlefill/singlefill/internal/filllock"
	"github.com/singlefill/singlefill/internal/pause"
)

// A Wait decides when a fill that waits for another process polls Redis.
//
// It polls rarely while the load cannot be over yet, and often when the load is about to end. The
// process remembers the range of load times of the key; the reply tells for how long the current
// load has run. Before the early end of the range, a pause is half of the time left to it, so a
// wrong guess costs at most half of what is left, and never more than MaxPause. Within the range, a
// Pause is a twelfth of its length. After it, or if no range is known, a pause is a fifth of the
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
// the quicker one of the last two counts, and the first one up to MaxPause.
//
// Waiters poll, although Redis wakes them. A wake-up is lost with its connection, and none is sent
// when the holder dies. One script tells a waiter that a value arrived, that the load failed, or
// that the holder died; no second source of truth can contradict it. A wake-up only brings the next
// poll forward. It carries no value: a client that may publish could forge one. docs/scale.md says what
// polling costs. See TestWait_NoConnection and TestGetOrLoad_KilledHolder.
//
// Fills of several keys that have one holder wait together. A wake-up brings forward the polls of its key only.
type Wait struct {
	Begun    time.Time
	Polls    int  // that found a lock held
	Eager    bool // a caller that joins brings the next poll forward, also while wake-ups come
	expected Estimate
	sent     time.Time     // when the last command was sent
	last     time.Duration // duration of the last command
	quick    time.Duration // duration of the quicker one of the last two
	Heard    Heard
}

// Heard is what a Wait has heard since its last command.
type Heard struct {
	complete bool      // every wake-up
	since    time.Time // when the command was sent
	woken    int       // wake-ups in a row that brought a poll forward
}

const (
	MinPause     = pause.Min
	MaxPause     = 250 * time.Millisecond
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

// New returns a wait that begins now for a load that takes expected.
func New(expected Estimate) Wait {
	return Wait{Begun: time.Now(), expected: expected, last: MaxPause / crowd}
}

// Expect changes how long the load takes.
func (w *Wait) Expect(e Estimate) { w.expected = e }

// Answered notes when a command was sent, and that it has been answered now.
func (w *Wait) Answered(sent time.Time) {
	took := time.Since(sent)
	w.sent, w.quick, w.last = sent, min(w.last, took), took
}

// Listen begins to listen before a pause, if the wait is long enough to be worth it. A connection
// costs the server as much as several polls. Where replies are slow because many processes wait, the
// queue of the server must not grow: only some of them, at random, listen before the same pause.
func (w *Wait) Listen(reply filllock.Reply, ears []*Ear) {
	d := w.expected.pause(reply.Age)
	short := d < listenAfter && w.Polls < listenAfterPolls || d < listenReplies*w.last
	if short || rand.N(w.last+1) > listenAfter {
		return
	}
	for _, e := range ears {
		e.listen()
	}
}

// Pause returns how long to sleep before the next poll. It does not exceed the end of the holder's lock.
//
// A waiter pauses for at least twice the time its last command took. A slow reply thus makes the
// wait longer, but the reply time is all that a waiter can know of thousands of others, and it keeps
// the queue of the server short. See TestWait_SlowServer.
func (w *Wait) Pause(reply filllock.Reply, ears []*Ear) time.Duration {
	d := max(w.expected.pause(reply.Age), MinPause)
	d = max(min(d, MaxPause), crowd*w.quick)
	w.Heard.since, w.Heard.complete = w.sent, true
	for _, e := range ears {
		w.Heard.complete = w.Heard.complete && e.complete(w.sent)
	}
	if w.Heard.complete {
		d = w.whileListening(reply)
	}
	return pause.WithinLease(pause.Vary(d, pause.Jitter), reply.Left)
}

// whileListening returns how long to sleep if no wake-up comes. It is only worth a poll to find out
// that a wake-up was lost.
func (w *Wait) whileListening(reply filllock.Reply) time.Duration {
	if left := w.expected.late - reply.Age; left > 0 {
		return min(left+left/2+2*minJoinPause, listeningPause)
	}
	return listeningPause
}

// Joined returns when to ask for a caller that has joined, if that is before until.
func (w *Wait) Joined(until time.Time) time.Time {
	if at := time.Now().Add(w.joinPause()); w.hurries() && at.Before(until) {
		return at
	}
	return until
}

// hurries reports whether a caller that joins brings the next poll forward: a wake-up would not.
func (w *Wait) hurries() bool { return !w.Heard.complete || w.Eager }

// joinPause returns how long to sleep after a caller has joined, for which the value may already be
// there. It grows from 10 to 50 ms with the time waited, so that many new callers do not cause many
// commands.
func (w *Wait) joinPause() time.Duration {
	return max(min(minJoinPause+time.Since(w.Begun)/32, maxJoinPause), crowd*w.quick)
}

// wakePause returns how long to sleep after a wake-up, or after the subscription has become complete or
// ceased to be: not at all, unless the last wake-ups were of no use.
func (w *Wait) wakePause(message bool) time.Duration {
	if message {
		w.Heard.woken++
	}
	return pause.AfterWakeUps(w.Heard.woken-1, MaxPause) - time.Since(w.sent)
}

// An Event is what ends a sleep.
type Event int

const (
	Paused      Event = iota // the time is over
	Woken                    // an ear has been told something
	Interrupted              // no caller waits
	Closed                   // the cache was closed
)

// A Look is what there is to see after a wake-up.
type Look struct {
	Deserted      bool // no caller waits
	Joined        bool // a caller has joined, or a key was invalidated
	Told, Message bool // an ear has been told something, a message
}

// Sleep sleeps for d, or until closing is closed, or a wake-up comes. woken receives a value when there is something to
// look at. A caller that has joined shortens the sleep unless a wake-up would do so.
func (w *Wait) Sleep(d time.Duration, closing, woken <-chan struct{}, look func() Look) Event {
	timer := time.NewTimer(d)
	defer timer.Stop()
	event := Paused
	end := time.Now().Add(d)
	for {
		select {
		case <-timer.C:
			if event == Paused {
				w.Heard.woken = 0
			}
			return event
		case <-closing:
			return Closed
		case <-woken:
			seen := look()
			switch {
			case seen.Deserted:
				return Interrupted
			case seen.Told:
				event, w.Heard.complete = Woken, false
				timer.Reset(min(time.Until(end), w.wakePause(seen.Message)))
			case seen.Joined && w.hurries():
				timer.Reset(min(time.Until(end), w.joinPause()))
			}
		}
	}
}

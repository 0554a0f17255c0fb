package lock

import (
	"context"
	"slices"
	"time"

	"github.com/singlefill/singlefill/internal/pause"
	"github.com/singlefill/singlefill/internal/wake"
)

// The first waiter of a waitQueue listens for all of them. Each command that frees the lock for a
// waiter wakes one waiter: the first in the queue of a fair mutex; of a mutex or semaphore the waiter
// with the reservation, or else the listening waiter that has waited longest. The waiter that is
// woken asks at once. If no client received the message, the next waiter is woken. A waiter may also
// be frozen, so one more, the newest, gets a message without a token, and asks after the longest
// pause that there would be without wake-ups.
//
// Each waitQueue has its own channel: its name ends with the first twelve characters of the tokens.
// One channel for all waiters would be simpler, but each release would wake every process to ignore
// it: with fifty processes on two cores a hand-over took 4 to 9 ms, now it takes 1.
//
// A mutex has no queue on the server, so waiters that listen put themselves into the set waiting; a
// release takes out the one it wakes, so that a dead one costs one wake-up only. A waiter that was
// taken out of the set and has heard nothing knows that messages get lost: its process polls for a
// minute; but not if so many wait that the set is full, and drops the latest. Without a message the first waiter asks
// rarely, to find that out. The scripts do not name
// what waking needs among their rights: it may be refused. See TestWakeUp_AtTheRelease,
// TestWakeUp_DeadWaiter, TestWakeUp_NobodyHears, TestWakeUp_Crowd, TestWakeUp_Forged.
const (
	// A waitQueue listens from this busy answer to its first waiter on: a short wait opens nothing.
	listenAfter = 2

	// resubscribeAfter is how long a waitQueue without a complete subscription waits until it
	// subscribes again.
	resubscribeAfter = time.Minute

	// stillSubscribed is for how long it costs no command to listen again.
	stillSubscribed = time.Second
)

// listening is the state of the subscription of a waitQueue.
type listening struct {
	sub      *wake.Subscription // nil: it does not listen
	opened   time.Time          // when it last began to listen
	closed   time.Time          // when it last ceased to listen
	messages int                // received, and changes of the subscription
	useless  int                // wake-ups since the lock was last seen to change hands
}

// A nextAsk is when an attempt asks next. Each command begins a new one.
type nextAsk struct {
	at     time.Time // zero: not known while the command is in flight
	latest time.Time // even if messages put it off
	woken  bool      // no message puts it off
}

// asked is a command of an attempt that waits.
type asked struct {
	at       time.Time
	listens  bool // it asks to be woken
	messages int  // received before
}

// A quiet is what an attempt knows from its last busy answer.
type quiet struct {
	asked              // the command
	complete bool      // a message will tell when the lock is released to this attempt
	crowded  bool      // so many wait that it may not be among those that a release wakes
	until    time.Time // the end of the holder's lease, if it is not renewed
	ahead    int64     // waiters ahead; -1: unknown
}

// sleep returns when it is time to ask, or ctx ends: after d, earlier when the attempt is woken.
func (q *waitQueue) sleep(ctx context.Context, a *attempt, d time.Duration) {
	a.waited = true
	timer := time.NewTimer(q.schedule(a, d))
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-a.wake:
		case <-ctx.Done():
			return
		}
		left := q.untilAsk(a)
		if left <= 0 {
			return
		}
		timer.Reset(left)
	}
}

// schedule makes the attempt ask after d at the latest, and returns the time until then.
func (q *waitQueue) schedule(a *attempt, d time.Duration) time.Duration {
	q.mu.Lock()
	defer q.mu.Unlock()
	next := &a.next
	next.latest = time.Now().Add(d)
	if next.at.IsZero() || next.latest.Before(next.at) {
		next.at = next.latest
	}
	return time.Until(next.at)
}

func (q *waitQueue) untilAsk(a *attempt) time.Duration {
	q.mu.Lock()
	defer q.mu.Unlock()
	return time.Until(a.next.at)
}

// wakeUp makes the attempt ask at once. The caller holds the mutex of the waitQueue.
func (a *attempt) wakeUp() { a.wakeUpAt(time.Now()) }

// wakeUpAt makes the attempt ask at that time, or earlier. The caller holds the mutex of the
// waitQueue.
func (a *attempt) wakeUpAt(at time.Time) {
	a.next.woken = true
	if a.next.at.IsZero() || at.Before(a.next.at) {
		a.next.at = at
	}
	a.notify()
}

// notify makes the attempt look for what to do.
func (a *attempt) notify() {
	select {
	case a.wake <- struct{}{}:
	default:
	}
}

// prepare prepares a command of the attempt. The first waiter asks to be woken if it would receive the message.
// The caller holds mu.
func (q *waitQueue) prepare(a *attempt) {
	if q.isFirst(a) && q.sub == nil && time.Since(q.closed) < stillSubscribed {
		q.listen(a)
	}
	now := time.Now()
	a.next, a.asked = nextAsk{}, asked{at: now, listens: q.isFirst(a) && q.complete(now), messages: q.messages}
}

// notePause notes what a busy answer says about the time until the next one. The caller holds mu.
func (q *waitQueue) notePause(a *attempt, r reply, changed bool) {
	if changed || r.free {
		q.useless = 0
	}
	q.noteMissed(a, r)
	if q.isFirst(a) {
		a.busy++
		lost := !q.complete(a.asked.at) && time.Since(q.opened) > resubscribeAfter
		if q.sub == nil && a.busy >= listenAfter || q.sub != nil && lost {
			q.listen(a)
		}
	}
	complete := a.asked.listens && !r.free && q.complete(a.asked.at)
	a.quiet = quiet{asked: a.asked, complete: complete, until: a.asked.at.Add(r.left()), ahead: r.ahead}
	a.quiet.crowded = r.place > 1 && !a.kind.queues()
}

// noteMissed notes it if the attempt should have received a message before this reply, and has not. The
// caller holds mu.
func (q *waitQueue) noteMissed(a *attempt, r reply) {
	missed := r.place == 1 // a release has taken it out of the waiting
	if a.kind.queues() {   // the lock was released to it
		missed = r.state == held && a.quiet.ahead == 0 && time.Now().Before(a.quiet.until)
	}
	if missed && a.quiet.complete && !a.quiet.crowded && q.messages == a.quiet.messages {
		q.sub.Missed(a.quiet.at)
	}
}

// closeEar ends listening if there is no waiter. The caller holds mu.
func (q *waitQueue) closeEar() {
	if q.sub != nil && len(q.waiters) == 0 {
		q.sub.Close()
		q.sub, q.closed = nil, time.Now()
	}
}

// listen begins to listen. The caller holds mu.
func (q *waitQueue) listen(a *attempt) {
	if q.sub != nil {
		q.sub.Close()
	}
	q.sub, q.opened = a.client.Listen(a.keys.lock+":"+q.id, q.received), time.Now()
}

// complete reports whether the waitQueue has received every message since then. The caller holds mu.
func (q *waitQueue) complete(then time.Time) bool { return q.sub != nil && q.sub.Complete(then) }

// received is called for each message, and when the subscription changes.
func (q *waitQueue) received(token string, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.messages++
	if len(q.waiters) == 0 {
		return
	}
	first := q.waiters[0]
	switch {
	case !ok:
		first.wakeUp()
	case slices.ContainsFunc(q.waiters, func(a *attempt) bool { return a.token == token }):
		if !first.next.woken {
			first.wakeUpAt(first.asked.at.Add(pause.AfterWakeUps(q.useless, maxPause)))
			q.useless++
		}
	default:
		first.putOff()
	}
}

// putOff makes the attempt ask after the longest pause there would be without wake-ups: the lock is
// free at this moment, and another waiter was woken for it. The next such message puts that off, but
// not beyond the time at which the attempt would ask without a message. The caller holds the mutex of
// the waitQueue.
func (a *attempt) putOff() {
	next := &a.next
	if next.woken {
		return
	}
	at := time.Now().Add(vary(maxPause + time.Duration(max(a.quiet.ahead, 0))*maxPause/16))
	if !next.latest.IsZero() && next.latest.Before(at) {
		at = next.latest
	}
	earlier := at.Before(next.at)
	next.at = at
	if earlier { // otherwise the attempt looks when it would have asked
		a.notify()
	}
}

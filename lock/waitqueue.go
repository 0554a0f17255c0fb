package lock

import (
	"context"
	"crypto/rand"
	"math"
	"slices"
	"sync"
	"time"
)

// A waitQueue has the waiters of one lock in order of arrival, or for a fair mutex in the order of the
// queue on the server. Only the first one asks Redis, so a thousand waiters of a process send what one
// sends.
//
// Each waiter of a fair mutex still has its own place in the queue of the server, for which it asks
// first itself. The command of the first waiter carries the tokens of the others to keep their places.
// See TestShared_ManyLockers and TestNewFairMutex_OrderInOneProcess.
type waitQueue struct {
	id string // begins the tokens of the attempts, and ends the name of the channel

	mu      sync.Mutex // taken before wake.Listener.mu; the Listener does not hold its mutex while it delivers messages
	waiters []*attempt // protected by mu, as all fields below
	arrived int64      // number of waiters so far
	kept    time.Time  // when the places in the server's queue were last prolonged
	bypass  bypass

	lastAnswer time.Time
	news       news
	why        error // of the last command, if it failed
	busy       reply // the last busy answer

	listening
}

// news is what the last command of a waitQueue has shown.
type news int

const (
	none     news = iota // no command has ended since it had no waiters
	answered             // the lock is busy
	silent               // the command failed
)

// A bypass counts the grants to other processes since the last grant to this one.
type bypass struct {
	since int64 // the server's time at the first answer; 0: there was none
	last  int64 // the last fence
	seen  int
}

const (
	// unplaced is the place of a waiter that still needs one from the server.
	unplaced = math.MaxInt64

	// maxBypasses is the number of grants to other processes after which a waiter reserves the
	// next.
	maxBypasses = 2
)

// idLen is what the scripts take from a token for the name of a channel.
const idLen = 12

// newToken returns a token for an attempt. It is as unique as rand.Text, and ends with the holder's name.
func (q *waitQueue) newToken(holder string) string {
	return q.id + rand.Text()[idLen:tokenLen] + holder
}

// join makes the attempt the last waiter.
func (q *waitQueue) join(a *attempt) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiters) == 0 {
		q.news, q.why, q.busy = none, nil, reply{}
	}
	q.arrived++
	a.place = q.arrived
	if a.kind.queues() {
		a.place = unplaced
	}
	q.insert(a)
}

// leave removes the attempt. granted tells that it leaves with a lease.
func (q *waitQueue) leave(a *attempt, granted bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.remove(a)
	if !a.answered { // the places that its command was to keep are kept by the next one
		q.kept = time.Time{}
	}
	if granted {
		q.noteAnswer()
		q.useless = 0
	}
	if granted || len(q.waiters) == 0 {
		q.bypass = bypass{}
	}
	a.silent = a.failed != nil || q.news == silent
	q.closeEar()
}

// awaitTurn waits until the attempt has to ask: when it is the first, or needs a place. It returns
// false when ctx has ended or the attempt has failed.
func (q *waitQueue) awaitTurn(ctx context.Context, a *attempt) bool {
	for ctx.Err() == nil {
		q.mu.Lock()
		failed := a.failed != nil
		asks := !failed && (q.isFirst(a) || a.place == unplaced && q.news != silent)
		q.mu.Unlock()
		if failed || asks {
			return asks
		}
		a.waited = true
		select {
		case <-a.wake:
		case <-ctx.Done():
		}
	}
	return false
}

// request returns what the attempt has to ask for.
func (q *waitQueue) request(a *attempt) request {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.prepare(a)
	r := request{enqueue: true}
	if !a.kind.queues() {
		r.listens, r.reserves, r.waitingSince = a.asked.listens, q.bypass.seen >= maxBypasses, q.bypass.since
		return r
	}
	if q.isFirst(a) && time.Since(q.kept) > a.opts.WaiterTTL/8 {
		q.kept = time.Now()
		for _, other := range q.waiters[1:] {
			if other.place != unplaced {
				r.queued = append(r.queued, other.token)
			}
		}
	}
	return r
}

// noteBusy notes that the server has answered the attempt, and that the lock is busy.
func (q *waitQueue) noteBusy(a *attempt, r reply) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.noteAnswer()
	q.busy = r
	b := &q.bypass
	if b.since == 0 {
		b.since, b.last = r.lastFence+r.age.Microseconds(), r.lastFence
	}
	changed := r.lastFence != b.last
	if changed {
		b.last = r.lastFence
		b.seen++
	}
	q.notePause(a, r, changed)
	if a.kind.queues() && r.place != a.place && a.failed == nil {
		q.move(a, r.place)
	}
	for _, token := range r.lost {
		if at := slices.IndexFunc(q.waiters, func(w *attempt) bool { return w.token == token }); at >= 0 {
			other := q.waiters[at]
			q.move(other, unplaced)
			other.wakeUp()
		}
	}
}

// noteHeld notes that the attempt has got a lease.
func (q *waitQueue) noteHeld(a *attempt, r reply) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.noteMissed(a, r)
}

// noteAnswer notes that the server answers. The caller holds mu.
func (q *waitQueue) noteAnswer() {
	before := q.news
	q.news, q.why, q.lastAnswer = answered, nil, time.Now()
	if before != silent {
		return
	}
	for _, w := range q.waiters {
		if w.place == unplaced {
			w.wakeUp()
		}
	}
}

// noteFailure notes that a command of the attempt has failed. It reports whether the attempt goes
// on. Attempts with a deadline go on. The others go on for TTL after the last answer, as long as a lease could outlast
// the failure, if the server has answered while they waited. Otherwise they go on for RedisTimeout, which is the time
// of their own command, or of most of another's.
func (q *waitQueue) noteFailure(a *attempt, why error) (goesOn bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.news, q.why, q.kept = silent, why, time.Time{}
	for _, w := range slices.Clone(q.waiters) {
		patient := time.Since(q.lastAnswer) < a.opts.TTL
		if q.lastAnswer.Before(w.begun) {
			patient = w != a && time.Since(w.begun) < a.opts.RedisTimeout*7/10
		}
		if !patient && !w.hasDeadline {
			w.failed = why
			q.remove(w)
			w.wakeUp()
		}
	}
	return a.failed == nil
}

// reason returns why the attempt has no lease: the last failure, or else the last busy answer.
func (q *waitQueue) reason(a *attempt) (last news, r reply, why error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if a.failed != nil {
		return silent, reply{}, a.failed
	}
	return q.news, q.busy, q.why
}

// wakeFirst makes the first waiter ask at once, unless a message will tell it.
func (q *waitQueue) wakeFirst() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiters) > 0 && !q.complete(q.waiters[0].asked.at) {
		q.waiters[0].wakeUp()
	}
}

// isFirst reports whether the attempt asks for all. The caller holds mu.
func (q *waitQueue) isFirst(a *attempt) bool { return len(q.waiters) > 0 && q.waiters[0] == a }

// move gives the attempt another place. The caller holds mu.
func (q *waitQueue) move(a *attempt, place int64) {
	q.remove(a)
	a.place = place
	q.insert(a)
}

// remove takes the attempt out, and wakes the waiter that is now the first. The caller holds mu.
func (q *waitQueue) remove(a *attempt) {
	at := slices.Index(q.waiters, a)
	if at < 0 {
		return
	}
	q.waiters = slices.Delete(q.waiters, at, at+1)
	if at == 0 && len(q.waiters) > 0 {
		q.waiters[0].wakeUp()
	}
}

// insert puts the attempt behind all waiters whose place is not after its own. The caller holds mu.
func (q *waitQueue) insert(a *attempt) {
	at := len(q.waiters)
	for at > 0 && q.waiters[at-1].place > a.place {
		at--
	}
	q.waiters = slices.Insert(q.waiters, at, a)
}

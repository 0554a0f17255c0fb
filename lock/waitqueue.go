package lock

import (
	"cmp"
	"context"
	"crypto/rand"
	"math"
	"slices"
	"sort"
	"strings"
	"sync"
	"time"
)

// A waitQueue has the waiters of one lock in order of arrival, or for a fair mutex in the order of the
// queue on the server. Only the first one asks Redis, so a thousand waiters of a process send what one
// sends.
//
// Each waiter of a fair mutex still has its own place in the queue of the server. The command of the
// first waiter takes places for waiters that have none, a hundred at a time. It keeps the places of
// all: the server counts a process as alive, not a waiter. So what one command does is bounded, however many
// wait, and five thousand callers that arrive together send some fifty commands: a release waits behind
// one of them. See TestShared_ManyLockers, TestNewFairMutex_OrderInOneProcess and
// TestAcquire_ManyInOneProcess.
//
// The server may lose places, by a failover for example. Each answer tells the first waiter its own
// place. Its commands also compare the places of the others, a hundred at a time. If a waiter has lost
// its place, the first one asks for all places again. See TestNewFairMutex_LostPlaces.
type waitQueue struct {
	id string // begins the tokens of the attempts, and ends the name of the channel

	mu      sync.Mutex // taken before wake.Listener.mu; the Listener does not hold its mutex while it delivers messages
	waiters []*attempt // protected by mu, as all fields below
	arrived int64      // number of waiters so far
	compare compare
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

// A compare tells which places in the queue of the server are compared next.
type compare struct {
	from int64     // the place
	last time.Time // when places were last compared
}

// A taken tells what commands of other attempts may have taken for an attempt.
type taken struct {
	place     bool // in the queue of the server
	inFlight  bool // a command that takes it has not ended
	inTransit bool // a command to take it was not answered and may still arrive
}

// A bypass counts the grants to other processes since the last grant to this one.
type bypass struct {
	since int64 // the server's time at the first answer; 0: there was none
	last  int64 // the last fence
	seen  int
}

const (
	// unplaced is the place of a waiter that still needs one from the server.
	unplaced = math.MaxInt64

	// maxOthers bounds the tokens of other waiters in a command. The server needs some 3 µs for each.
	maxOthers = 100

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

// join makes the attempt the last waiter. The first one takes a place for it at once, unless Redis does
// not answer.
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
	q.waiters = append(q.waiters, a)
	if a.kind.queues() && q.news != silent {
		q.waiters[0].wakeUp()
	}
}

// leave removes the attempt. granted tells that it leaves with a lease.
func (q *waitQueue) leave(a *attempt, granted bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.remove(a)
	q.noteEnd(a)
	a.hasPlace = a.hasPlace || a.taken.place
	a.inTransit = a.inTransit || a.taken.inFlight || a.taken.inTransit
	if a.asked.at.IsZero() { // only other attempts have asked
		a.answered = q.news == answered
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

// awaitTurn waits until the attempt is the first. It returns false when ctx has ended or the attempt has
// failed.
func (q *waitQueue) awaitTurn(ctx context.Context, a *attempt) bool {
	for ctx.Err() == nil {
		q.mu.Lock()
		failed := a.failed != nil
		asks := !failed && q.isFirst(a)
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
	a.others = slices.Clone(q.others(a))
	for _, other := range a.others {
		other.taken.place, other.taken.inFlight = true, true
		r.others = append(r.others, other.token)
	}
	return r
}

// others returns the waiters without a place, or else those whose places are compared next, or none if others were
// compared a short time ago. The caller holds mu.
func (q *waitQueue) others(a *attempt) []*attempt {
	if !q.isFirst(a) {
		return nil
	}
	from := max(1, q.from(unplaced))
	if from == len(q.waiters) {
		if time.Since(q.compare.last) <= a.opts.WaiterTTL/8 {
			return nil
		}
		if from = max(1, q.from(q.compare.from)); from == len(q.waiters) {
			from = 1
		}
	}
	return q.waiters[from:min(from+maxOthers, len(q.waiters))]
}

// from returns the index of the first waiter with that place or a later one. The caller holds mu.
func (q *waitQueue) from(place int64) int {
	return sort.Search(len(q.waiters), func(i int) bool { return q.waiters[i].place >= place })
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
	if a.kind.queues() {
		q.notePlaces(a, r)
	}
	q.noteEnd(a)
}

// notePlaces notes the places of the attempt and of those that its command was to place. The caller holds mu.
func (q *waitQueue) notePlaces(a *attempt, r reply) {
	changed, lost := false, false
	note := func(w *attempt, place int64) {
		changed = changed || w.place != place
		lost = lost || w.place != place && w.place != unplaced
		w.place = place
	}
	if r.state == busy {
		note(a, r.place)
	}
	for i, place := range r.places[:min(len(r.places), len(a.others))] {
		note(a.others[i], place)
		q.compare = compare{place + 1, time.Now()}
	}
	if lost {
		for _, w := range q.waiters {
			if w != a && !slices.Contains(a.others, w) {
				w.place = unplaced
			}
		}
	}
	if changed {
		slices.SortStableFunc(q.waiters, func(v, w *attempt) int { return cmp.Compare(v.place, w.place) })
	}
	if n := len(q.waiters); n > 0 && (q.waiters[0] != a || q.waiters[n-1].place == unplaced) {
		q.waiters[0].wakeUp()
	}
}

// noteEnd notes that the last command of the attempt has ended. The caller holds mu.
func (q *waitQueue) noteEnd(a *attempt) {
	for _, w := range a.others {
		w.taken.inFlight = false
		w.taken.inTransit = w.taken.inTransit || a.inTransit
	}
	a.others = nil
}

// isStray reports whether the lock is kept for a token of this process that no waiter has any more. A late
// command may have brought it back, or a failover. The server takes it for alive as long as this process is.
func (q *waitQueue) isStray(r reply) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return r.free && strings.HasPrefix(r.holder, q.id) &&
		!slices.ContainsFunc(q.waiters, func(w *attempt) bool { return w.token == r.holder })
}

// noteHeld notes that the attempt has got a lease.
func (q *waitQueue) noteHeld(a *attempt, r reply) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.noteMissed(a, r)
	if a.kind.queues() {
		q.notePlaces(a, r)
	}
}

// noteAnswer notes that the server answers. The caller holds mu.
func (q *waitQueue) noteAnswer() {
	q.news, q.why, q.lastAnswer = answered, nil, time.Now()
}

// noteFailure notes that a command of the attempt has failed. It reports whether the attempt goes
// on. Attempts with a deadline go on. The others go on for TTL after the last answer, as long as a lease could outlast
// the failure, if the server has answered while they waited. Otherwise they go on for RedisTimeout, which is the time
// of their own command, or of most of another's.
func (q *waitQueue) noteFailure(a *attempt, why error) (goesOn bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.news, q.why = silent, why
	q.noteEnd(a)
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

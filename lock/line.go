package lock

import (
	"context"
	"math"
	"slices"
	"sync"
	"time"
)

// A line has the waiters of one Locker, in the order in which they came, or, of a fair mutex, in
// that of the queue on the server. Only the first one asks, so a thousand waiters of a process send
// what one sends.
type line struct {
	mu      sync.Mutex
	waiters []*attempt // protected by mu, as all below
	came    int64      // how many have come
	kept    time.Time  // when the places in the queue were last kept
	bypass  bypass
	heard   time.Time // when the server answered last
	silent  bool      // it has not answered since
	why     error     // why a lease cannot be had, if not because it is busy
}

// A bypass is what a line has seen of the grants of others, since its own last one.
type bypass struct {
	since int64 // the server's time at the first answer; 0: there was none
	last  int64 // the last fence
	seen  int
}

const (
	// unplaced is the place of a waiter that has yet to get one from the server.
	unplaced = math.MaxInt64

	// patience is how many grants to others a line bears before it reserves the next one for
	// itself.
	patience = 2
)

// enter makes the attempt the last of the line.
func (l *line) enter(a *attempt) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.came++
	a.place = l.came
	if a.kind.queues() {
		a.place = unplaced
	}
	l.insert(a)
}

// leave takes the attempt out. granted tells that it goes because it was granted a lease.
func (l *line) leave(a *attempt, granted bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.remove(a)
	if granted {
		l.answered(nil)
	}
	if granted || len(l.waiters) == 0 {
		l.bypass = bypass{}
	}
}

func (l *line) insert(a *attempt) {
	at := len(l.waiters)
	for at > 0 && l.waiters[at-1].place > a.place {
		at--
	}
	l.waiters = slices.Insert(l.waiters, at, a)
}

// remove takes the attempt out, and wakes the one that is the first then.
func (l *line) remove(a *attempt) {
	at := slices.Index(l.waiters, a)
	if at < 0 {
		return
	}
	l.waiters = slices.Delete(l.waiters, at, at+1)
	if at == 0 && len(l.waiters) > 0 {
		l.waiters[0].wakeUp()
	}
}

// move gives the attempt another place.
func (l *line) move(a *attempt, place int64) {
	l.remove(a)
	a.place = place
	l.insert(a)
}

// wakeFirst makes the first waiter ask at once.
func (l *line) wakeFirst() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.waiters) > 0 {
		l.waiters[0].wakeUp()
	}
}

// await waits until the attempt is to ask: when it is the first, or needs a place. It returns false
// when ctx has ended, or the attempt is over.
func (l *line) await(ctx context.Context, a *attempt) bool {
	for ctx.Err() == nil {
		l.mu.Lock()
		over := a.over != nil
		asks := !over && (l.waiters[0] == a || a.place == unplaced && !l.silent)
		l.mu.Unlock()
		if over || asks {
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

// question returns what the attempt is to ask.
func (l *line) question(a *attempt) question {
	l.mu.Lock()
	defer l.mu.Unlock()
	q := question{wait: true}
	if !a.kind.queues() {
		if l.bypass.seen >= patience {
			q.since = l.bypass.since
		}
		return q
	}
	if len(l.waiters) > 0 && l.waiters[0] == a && time.Since(l.kept) > a.opts.WaiterTTL/8 {
		l.kept = time.Now()
		for _, other := range l.waiters[1:] {
			if other.place != unplaced {
				q.others = append(q.others, other.token)
			}
		}
	}
	return q
}

// busy notes an answer to the attempt.
func (l *line) busy(a *attempt, r reply) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.answered(nil)
	b := &l.bypass
	if b.since == 0 {
		b.since, b.last = r.last+r.age.Microseconds(), r.last
	}
	if r.last != b.last {
		b.last = r.last
		b.seen++
	}
	if a.kind.queues() && r.place != a.place && a.over == nil {
		l.move(a, r.place)
	}
	for _, token := range r.lost {
		if at := slices.IndexFunc(l.waiters, func(w *attempt) bool { return w.token == token }); at >= 0 {
			other := l.waiters[at]
			l.move(other, unplaced)
			other.wakeUp()
		}
	}
}

// conflicts notes that the holders disagree with the line. It returns whether the line waits for
// them to go: it was there before them.
func (l *line) conflicts(why error) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.answered(why)
	return l.bypass.since != 0
}

// answered notes that the server is there.
func (l *line) answered(why error) {
	l.why, l.heard = why, time.Now()
	if !l.silent {
		return
	}
	l.silent = false
	for _, w := range l.waiters {
		if w.place == unplaced {
			w.wakeUp()
		}
	}
}

// endures notes that a command of the attempt has failed, and reports whether the attempt goes on.
// All go on that have a deadline. The others do so if there was an answer while they waited, for
// TTL after the last one: for as long as a lease could endure it.
func (l *line) endures(a *attempt, why error) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.silent, l.why, l.kept = true, why, time.Time{}
	for _, w := range slices.Clone(l.waiters) {
		if !w.deadline && (l.heard.Before(w.begun) || time.Since(l.heard) >= a.opts.TTL) {
			w.over = why
			l.remove(w)
			w.wakeUp()
		}
	}
	return a.over == nil
}

// reason returns why the attempt, which ends, could not have a lease: nil if it was busy. silent
// tells that the last command has failed.
func (l *line) reason(a *attempt) (why error, silent bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if a.over != nil {
		return a.over, true
	}
	return l.why, l.silent
}

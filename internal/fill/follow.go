package fill

import (
	"cmp"
	"context"
	"errors"
	"slices"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/filllock"
	"github.com/singlefill/singlefill/internal/foreign"
	"github.com/singlefill/singlefill/internal/value"
)

// maxUnanswered is how many commands of one fill may stay unanswered while the server answers
// others.
const maxUnanswered = 2

// An answered has the answers of Redis.
type answered struct {
	asking
	questions []*question
}

// A way is where a fill goes after an answer. Fills of a set with the same way stay together.
type way struct {
	to     goal
	holder string // of the lock, whom a fill waits for: its locks end at one time
	apart  int    // fills with different numbers do not go together; 0: the fill has an answer
}

// A goal is the next phase of a fill. They are in the order in which a set prefers them to parting with its fills.
type goal int

const (
	toLoad goal = iota
	toAsk
	toQueue
	toPause
	toEnd
)

// run goes the ways of the fills. Where these part, it goes on with a load, or else with the fills that ask or wait
// for a slot: they may hold the slot of the set.
func (a answered) run() phase {
	unanswered := 0
	for _, q := range a.questions {
		if q.way = a.decided(q); q.way.to == toEnd {
			a.release(q.filling)
		} else if q.way.apart > 0 {
			unanswered++
			q.way.apart = unanswered
		}
	}
	for _, q := range a.questions {
		if q.way.apart > 0 { // if none was answered, they may have had too much to say together
			q.way.apart = 1 + (q.way.apart-1)*parts/unanswered*(unanswered/len(a.questions))
		}
	}
	going := slices.DeleteFunc(a.questions, func(q *question) bool { return q.way.to == toEnd })
	if len(going) < len(a.fills) {
		a.fills = fillsOf(going)
	}
	if len(going) == 0 {
		return a.over()
	}
	if first := going[0].way; !slices.ContainsFunc(going, func(q *question) bool { return q.way != first }) {
		return a.enter(a.acquiring, first, going)
	}
	var ways []way
	together := make(map[way][]*question)
	for _, q := range going {
		if together[q.way] == nil {
			ways = append(ways, q.way)
		}
		together[q.way] = append(together[q.way], q)
	}
	mine := slices.MinFunc(ways, func(a, b way) int { return cmp.Compare(a.to, b.to) })
	for _, w := range ways {
		if w != mine {
			y := a.split(fillsOf(together[w]))
			y.goOn(a.enter(y, w, together[w]))
		}
	}
	return a.enter(a.acquiring, mine, together[mine])
}

// parts is in how many parts a set asks again of which no fill was answered.
const parts = 4

// enter enters a way with a set of its fills.
func (a answered) enter(on *acquiring, w way, questions []*question) phase {
	if !slices.ContainsFunc(questions, func(q *question) bool { return q.step != waitForLock && q.step != waitForSlot }) {
		on.lastAsked = slices.MinFunc(questions, func(a, b *question) int { return cmp.Compare(a.stamp, b.stamp) }).stamp
	}
	switch w.to {
	case toLoad:
		return newLoading(on, questions)
	case toQueue:
		return queueing{acquiring: on}
	case toPause:
		return on.beginPause(w.holder, questions)
	}
	if w.apart > 0 {
		on.unanswered++
	}
	queue := slices.ContainsFunc(questions, func(q *question) bool { return q.step == waitForSlot })
	return asking{acquiring: on, queue: queue || a.queue}
}

// newLoading returns the load of fills that have locks, or of which Redis did not answer.
func newLoading(a *acquiring, questions []*question) loading {
	ctx, cancel := context.WithTimeout(a.ctx, a.LoadTimeout)
	r := &running{Filler: a.Filler, items: make([]*item, len(questions)), load: a.load, context: ctx, cancel: cancel}
	r.sets.Store(1)
	all := make([]item, len(questions))
	for i, q := range questions {
		o := &all[i]
		r.items[i] = o
		o.filling, o.of, o.queued, o.unlocked, o.replaces, o.rest = q.filling, r, a.queued, q.answer.Err, q.answer.Value.Known, value.RefreshRest
		if o.unlocked != nil {
			o.rest = maxRest
		}
	}
	a.call = r
	return loading{a.set}
}

// decided finds the way of a fill. It panics for a command in which a function of the user has not returned.
func (a answered) decided(q *question) way {
	r, err := q.answer.Value, q.answer.Err
	_, failed := err.(*foreign.Failure)
	switch {
	case err == nil:
		q.step = decide(r, view{wanted: q.wanted, servable: a.suffices(q.filling)})
		return a.take(q)
	case failed:
		panic(err)
	case q.stamp > 0 && a.worthAsking(q):
		return way{to: toAsk, apart: 1}
	}
	return way{to: a.unreached(q)}
}

// suffices reports whether what the key holds can end the fill.
func (a answered) suffices(f *filling) bool {
	return f.old.Freshness >= value.Revalidate && !(a.from.Anew && f.newSince == 0)
}

// worthAsking reports whether to ask again after a command without an answer: callers wait, and the
// server answers other commands. It has answered a command that was late, since this process was held up.
func (a answered) worthAsking(q *question) bool {
	err := q.answer.Err
	return a.unanswered+1 < maxUnanswered && q.wanted &&
		(client.Late(err) || client.Unreachable(err) && !a.Client.Silent(q.lock.Keys.Lock))
}

// unreached is called when Redis did not answer: the source serves the callers. A refresh without callers ends, and
// a fill that only brings a newer value ends, too, since that could not be stored: callers that need a value join
// again.
func (a answered) unreached(q *question) goal {
	switch {
	case q.Refresh && a.deserted(q.filling, maxRest):
		return toEnd
	case a.from.Anew:
		a.end(q.filling, &Result{StoreErr: q.answer.Err}, 0, maxRest)
		return toEnd
	case !a.slot.Try(true):
		return toQueue
	}
	a.waited(q.filling)
	return toLoad
}

// take takes a step.
func (a answered) take(q *question) way {
	reply := q.answer.Value
	rest := cmp.Or(min(reply.Left, maxRest), value.RefreshRest)
	switch f := q.filling; q.step {
	case takeValue:
		a.found(f)
		a.times.Note(f.Key, f.old.Entry.LoadTime)
		r := &Result{Found: f.old.Found}
		if r.Freshness == value.Fresh { // Expire stores the old value again
			r.NewSince = f.newSince
		}
		a.end(f, r, q.stamp, rest)
		return way{to: toEnd}
	case takeFailure:
		a.found(f)
		// Callers that had joined when the lock was last seen held have waited for that load.
		err := a.User.RemoteError(f.Key, reply.Text)
		r := &Result{Found: value.Found{Err: err}, Failed: err != value.ErrNotFound, NoStale: errors.Is(err, ErrNoStale)}
		r.Resting, r.NewSince = reply.Left > 0, a.lastAsked
		validFrom := a.lastAsked
		if reply.Left > 0 && q.query.For == filllock.Unusable { // it is remembered
			validFrom = q.stamp
		}
		a.end(f, r, validFrom, rest)
		return way{to: toEnd}
	case takeLock:
		if a.slot.Held() || a.slot.Try(false) {
			a.waited(f)
			return way{to: toLoad}
		}
		// The server executed an earlier command to lock only now, and the slot has been given back
		// since.
		a.giveUp(f)
		a.lockAnew([]*filling{f})
	case retryNew:
		a.lockAnew([]*filling{f})
	case waitForLock:
		return way{to: toPause, holder: reply.Text}
	case leaveKey:
		if a.deserted(f, rest) {
			return way{to: toEnd}
		}
	}
	return way{to: toAsk}
}

// found notes that the load has ended for which a fill has waited.
func (a answered) found(f *filling) {
	if f.ear != nil {
		f.ear.Found(a.wait.Heard)
	}
}

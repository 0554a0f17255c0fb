package fill

import (
	"context"
	"slices"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/filllock"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/foreign"
	"github.com/singlefill/singlefill/internal/value"
	"github.com/singlefill/singlefill/internal/wait"
)

// Join joins the fills of keys, or starts fills, which load together. found returns what the call has found for
// waits[i], which is not changed any more; it is called only for a fill that starts. A fill has a detached context, and
// its load, once begun, goes on when all callers have left: impatient callers of a slow source would keep its key cold
// for ever, and other processes would wait for a load that never succeeds. Before that, a fill that no caller wants
// ends: see deserted.
func (f *Filler) Join(ctx context.Context, call *flight.Caller, waits []*flight.Waiter[Result],
	found func(i int) *value.Lookup, from Source) {
	f.Fills.Join(call, waits, func(of []int, fills []*flight.Fill[Result]) (run func(*flight.Load)) {
		x := f.newSet(client.Detach(ctx), from, fills, func(k int) *value.Lookup { return found(of[k]) })
		return func(l *flight.Load) { x.start(l, beginning{x}) }
	})
}

// A beginning is the first turn of a set.
type beginning struct{ *set }

func (b beginning) run() phase {
	for _, f := range b.fills {
		if f.Refresh && f.old.Data != nil {
			b.Store.Decode(b.ctx, f.old, f.old.Data, time.Now()) // the reader owns its value
		}
	}
	first := b.fills[0] // the awaited load takes as long as the loads of its key
	a := &acquiring{set: b.set, wait: wait.New(b.times.Estimate(first.Key, first.old.Entry.LoadTime))}
	a.wait.Eager = b.from.Anew // a poll proves to earlier callers that the awaited load ends after their calls
	// With MaxFleetLoads the lock is asked for first: a slot costs two commands then.
	return asking{acquiring: a, queue: !b.Slots.Leased(), first: true}
}

// An acquiring is what a set knows until it loads.
type acquiring struct {
	*set
	wait       wait.Wait
	awaited    string       // token of the holder that the fills have waited for
	lastAsked  flight.Stamp // the locks were seen held, or free, as of this stamp
	unanswered int          // commands without an answer
	queued     time.Duration
	polled     time.Time // when it left the queue last, to ask
}

// An asking asks Redis for entries or for locks. One command does both: it tells a waiter that the value arrived,
// that the load failed, or that the holder died. Between two commands the set holds no connection, and no slot
// while another process holds the locks.
//
// A refresh that no caller waits for asks once. It leaves the key to its holder, and the slots to
// loads that callers wait for.
type asking struct {
	*acquiring
	queue bool // waits for a slot before the command
	first bool // the set has sent no command before
}

// A question is what a fill asks in one turn, and what follows from the answer.
type question struct {
	*filling
	wanted bool // a caller waits for this fill
	query  filllock.Query

	answer filllock.Answer
	stamp  flight.Stamp // from before the command: what the answer says of the key is true as of then; 0: none was sent
	step   step
	way    way
}

func (a asking) run() phase {
	wanted, away := false, false
	questions := a.questions()
	for _, q := range questions {
		wanted, away = wanted || q.wanted, away || a.Client.Away(q.lock.Keys.Lock)
	}
	if wanted && a.Slots.Leased() { // the others ask for a lease at once, or not at all
		var some []*filling
		questions = slices.DeleteFunc(questions, func(q *question) bool {
			if !q.wanted {
				some = append(some, q.filling)
			}
			return !q.wanted
		})
		if len(some) > 0 {
			y := a.split(some)
			y.goOn(asking{y, a.queue, a.first})
		}
	}
	take := a.trySlot(wanted)
	if !take {
		questions = slices.DeleteFunc(questions, func(q *question) bool { return !q.wanted && a.deserted(q.filling, maxRest) })
		if len(questions) < len(a.fills) {
			a.fills = fillsOf(questions)
		}
		switch {
		case len(a.fills) == 0:
			return a.over()
		case a.queue && !away:
			return queueing{acquiring: a.acquiring}
		}
	}
	for _, q := range questions {
		q.query.Take = take
	}
	sent := time.Now()
	var parts [][]*question
	if len(questions) > 1 {
		parts = inParts(a.set, questions)
	}
	if len(parts) > 1 {
		questions = a.askTogether(parts)
	} else {
		a.getOrLock(questions)
	}
	a.wait.Answered(sent)
	return answered{a, questions}
}

// questions returns the questions of the fills.
func (a asking) questions() []*question {
	all, questions := make([]question, len(a.fills)), make([]*question, len(a.fills)) // two allocations
	for i, f := range a.fills {
		q := &all[i]
		questions[i] = q
		q.filling, q.wanted = f, !f.Refresh || a.Fills.Wanted(f.Fill)
		q.query = filllock.Query{Known: entry.Header(f.old.Data), Awaited: a.awaited, For: filllock.Unusable, Spared: true}
		switch { // what the callers can do with the entry that the key holds
		case !q.wanted:
			q.query.For = filllock.Served
		case a.Store.Servable(&f.old.Found, time.Now()):
			q.query.For = filllock.Fallback
		}
	}
	return questions
}

// trySlot takes a slot if one is free.
func (a asking) trySlot(wanted bool) bool {
	if wanted {
		return a.slot.Try(false)
	}
	return a.slot.TryLease(a.ctx)
}

// gather is how long fills that have their answers wait for a server that has given none.
const gather = 5 * time.Millisecond

// askTogether asks several servers at the same time. If none of them has answered for a moment, the fills that have no
// answers become another set: their locks are not held, or may be held by others, and no lock is held while another
// one is awaited. It returns the questions that have answers.
func (a asking) askTogether(parts [][]*question) (answers []*question) {
	sent, replies := time.Now(), make([]chan struct{}, len(parts))
	arrived := make(chan struct{}, len(parts))
	for i, part := range parts {
		replies[i] = make(chan struct{})
		foreign.Go(func() { a.getOrLock(part) }, func(failed *foreign.Failure) {
			for _, q := range part {
				if failed != nil {
					q.answer.Err = failed
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
		break
	}
	for i, part := range parts {
		select {
		case <-replies[i]:
			answers = append(answers, part...)
		default:
			y := asking{acquiring: a.split(fillsOf(part)), queue: a.queue}
			a.Fills.Run(y.load, func(*flight.Load) {
				<-replies[i]
				y.wait.Answered(sent)
				y.set.run(answered{y, part})
			})
		}
	}
	return answers
}

// split is split of a set that loads not yet.
func (a *acquiring) split(some []*filling) *acquiring {
	other := *a
	other.set = a.set.split(some)
	return &other
}

// end ends the wait of a fill for another process, and the fill.
func (a *acquiring) end(f *filling, r *Result, validFrom flight.Stamp, rest time.Duration) {
	a.waited(f) // WaitDone comes before the callers continue
	a.set.end(f, r, validFrom, rest)
}

// waited notes the end of a wait.
func (a *acquiring) waited(f *filling) {
	if f.ear != nil {
		f.ear.Close()
	}
	if f.polls == 0 {
		return
	}
	polls := f.polls
	f.polls = 0
	a.Events.WaitDone(a.ctx, f.Key, a.wait.Begun, polls)
}

// deserted ends a fill that no caller wants. It reports whether the fill has ended.
func (a *acquiring) deserted(f *filling, rest time.Duration) bool {
	ended := a.Fills.EndIfDeserted(f.Fill, rest)
	if ended {
		a.waited(f)
		a.release(f)
	}
	return ended
}

// drop ends fills that no caller wants. It reports whether none is left.
func (a *acquiring) drop() (none bool) {
	a.fills = slices.DeleteFunc(slices.Clone(a.fills), func(f *filling) bool { return a.deserted(f, maxRest) })
	return len(a.fills) == 0
}

// failClosed ends the fills since the cache was closed.
func (a *acquiring) failClosed() phase {
	for _, f := range a.fills {
		a.end(f, &Result{Found: value.Found{Err: flight.ErrClosed}}, flight.Always, 0)
	}
	return a.over()
}

package fill

import (
	"cmp"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/filllock"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/near"
	"github.com/singlefill/singlefill/internal/value"
)

// getOrLock sends one pipeline: for each key it looks for an entry and, if the query says so, takes the lock if no
// process holds it.
func (a asking) getOrLock(questions []*question) {
	key, within := questions[0].lock.Keys.Lock, a.Client.Timeout
	for _, q := range questions {
		if a.first && q.old.RedisErr != nil && a.Client.Silent(key) {
			within = min(within, a.Client.Timeout-q.old.Asked)
		}
	}
	if within < time.Millisecond || a.Client.Away(key) {
		for _, q := range questions {
			q.answer.Err = cmp.Or(a.Client.Refusal(key), client.ErrAway)
		}
		return
	}
	n := len(questions)
	generations, queries := make([]near.Generation, n), make([]filllock.Query, n)
	for i, q := range questions {
		generations[i], queries[i] = a.Store.Generation(q.lock.Keys.Value), q.query
		queries[i].Lock = q.lock
	}
	stamp := a.Fills.Now()
	answers := filllock.GetOrLock(a.ctx, within, queries)
	for i, q := range questions {
		q.takes(answers[i], stamp)
	}
	for i, q := range questions {
		if r := q.answer.Value; q.answer.Err == nil && r.Status == filllock.Hit {
			l := &value.Lookup{Key: q.Key}
			a.Store.Decode(a.ctx, l, []byte(r.Text), time.Now())
			l.Kept(r.Kept)
			a.Store.Keep(l, generations[i])
			q.old, q.newSince, q.oldSince = l, q.oldSince, stamp
		}
	}
}

// takes takes the answer to a command that was sent after a stamp.
func (q *question) takes(a filllock.Answer, stamp flight.Stamp) {
	r := a.Value
	q.answer, q.stamp = a, stamp
	q.holds = a.Err == nil && r.Status == filllock.Locked
	if a.Err == nil && r.Status != filllock.Hit {
		q.oldSince = stamp
		if !r.Known && q.old.Freshness != value.Expired {
			old := *q.old // which the call that began the fill still reads
			old.Freshness = value.Expired
			q.old = &old
		}
	}
}

package fill

import (
	"cmp"
	"context"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/filllock"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/value"
)

// maxUnanswered is how many commands of one fill may stay unanswered while the server answers
// others.
const maxUnanswered = 2

// getOrLock sends one pipeline: for each key it looks for an entry and, if take is set, takes the lock if no process
// holds it.
func (x *Parts) getOrLock(ctx context.Context, fills []*filling, take bool) {
	key, within := fills[0].lock.Keys.Lock, x.Client.Timeout
	for _, f := range fills {
		within = min(within, f.within)
	}
	if away := within < time.Millisecond || x.Client.Away(key); away {
		for _, f := range fills {
			f.unanswered, f.reply = maxUnanswered, filllock.Answer{Err: cmp.Or(x.Client.Refusal(key), client.ErrAway)}
		}
		return
	}
	keys, locks, queries := make([]string, len(fills)), make([]*filllock.Lock, len(fills)), make([]filllock.Query, len(fills))
	for i, f := range fills {
		f.asksFor = x.purpose(f)
		queries[i] = filllock.Query{Known: entry.Header(f.old.Data), Awaited: f.awaited, Take: take, For: f.asksFor, Spared: true}
		locks[i], keys[i] = f.lock, f.lock.Keys.Value
	}
	stamp := x.Fills.Now()
	x.Store.During(keys, func(keep func(int, *value.Lookup)) {
		replies := filllock.GetOrLock(ctx, within, locks, queries)
		for i, f := range fills {
			f.takes(replies[i], stamp)
		}
		for i, f := range fills {
			if r := f.reply.Value; f.reply.Err == nil && r.Status == filllock.Hit {
				l := &value.Lookup{Key: f.key}
				x.Store.Decode(ctx, l, []byte(r.Text), time.Now())
				l.Kept(r.Kept)
				keep(i, l)
				f.old, f.newSince, f.oldSince = l, f.oldSince, stamp
			}
		}
	})
}

// takes takes the reply to a command that was sent after a stamp.
func (f *filling) takes(reply filllock.Answer, stamp flight.Stamp) {
	r := reply.Value
	f.reply, f.stamp = reply, stamp
	f.holds = reply.Err == nil && r.Status == filllock.Locked
	f.replaces = f.holds && r.Known
	if reply.Err == nil && r.Status != filllock.Hit {
		f.oldSince = stamp
		if !r.Known && f.old.Freshness != value.Expired {
			old := *f.old // which the call that began the fill still reads
			old.Freshness = value.Expired
			f.old = &old
		}
	}
}

// purpose tells the script what the callers can do with the entry that the key holds.
func (x *Parts) purpose(f *filling) string {
	switch {
	case !f.wanted:
		return filllock.Served
	case x.Store.Servable(&f.old.Found, time.Now()):
		return filllock.Fallback
	}
	return filllock.Unusable
}

package fill

import (
	"cmp"
	"context"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/filllock"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/foreign"
	"github.com/singlefill/singlefill/internal/tags"
	"github.com/singlefill/singlefill/internal/value"
)

// store is the last turn of a load. Another set stores the keys of another server.
func (x *set) store(ctx context.Context) state {
	if len(x.fills) == 0 {
		return x.over(ctx)
	}
	parts := client.InParts(x.Client, x.fills, func(f *filling) string { return f.lock.Keys.Lock })
	for _, others := range parts[1:] {
		x.split(others).goOn(ctx, storing)
	}
	x.fills = parts[0]
	var locked []*filling
	for _, f := range x.fills {
		x.prepare(f)
	}
	for _, f := range x.fills {
		if f.unlocked {
			x.share(ctx, f)
		} else {
			locked = append(locked, f)
		}
	}
	if len(locked) > 0 {
		x.commit(ctx, locked)
	}
	for _, f := range x.fills {
		x.loadDone(ctx, f)
	}
	return x.over(ctx)
}

// count counts what has become of a load.
func (x *set) count(o *outcome) { x.Events.CountLoad(&o.info, o.NotFound) }

// loadDone tells what has become of a load.
func (x *set) loadDone(ctx context.Context, f *filling) {
	if call := f.outcome.call; call != nil {
		ctx = call.Context
	}
	x.Events.LoadDone(ctx, f.outcome.info)
}

// share gives the outcome of a load without the lock to the callers of this process. It is not stored: this process
// may have missed a Delete.
func (x *set) share(ctx context.Context, f *filling) {
	o, r := &f.outcome, f.outcome.result
	validFrom := f.began
	if r.Failed {
		validFrom = x.Fills.Now() // callers that joined during the load have waited for its failure
	}
	r.Unverified, r.StoreErr = true, f.away
	if o.NoStale {
		x.Store.Forget(f.key)
	}
	x.count(o) // before the callers continue
	x.end(ctx, f, r, validFrom)
}

// commit stores the outcomes of a load, or releases the locks, and hands the outcomes to the callers. The keys are on
// one server.
func (x *set) commit(ctx context.Context, fills []*filling) {
	keys := make([]string, len(fills))
	for i, f := range fills {
		keys[i] = f.lock.Keys.Value
	}
	stamp := x.Fills.Now()
	if err := x.Client.Refusal(fills[0].lock.Keys.Lock); err != nil {
		for _, f := range fills {
			f.outcome.err = err
		}
	} else {
		x.Store.During(keys, func(keep func(int, *value.Lookup)) {
			x.storeOrRelease(ctx, fills)
			for i, f := range fills {
				if o := &f.outcome; o.err == nil && o.info.Stored {
					if l := x.Store.Stored(f.key, o.data, o.entry, o.Life); l != nil {
						keep(i, l)
					}
				}
			}
		})
	}
	x.dropped(ctx, fills)
	var unreached []*filling
	for _, f := range fills {
		if client.Unreachable(f.outcome.err) {
			unreached = append(unreached, f) // counted when it is known whether the second attempt stores it
		} else {
			f.holds = false
			x.count(&f.outcome) // before the callers continue
		}
		x.handOver(ctx, f, stamp)
	}
	if len(unreached) > 0 { // once more, or for the first time, now that no caller waits
		x.storeOrRelease(ctx, unreached)
		x.dropped(ctx, unreached)
	}
	for _, f := range unreached {
		x.count(&f.outcome)
	}
	for _, f := range fills {
		// A value that the server never accepts, for example a value that is too large, must not keep the
		// lock, nor must a server that refuses writes for a moment.
		f.lock.InDoubt, f.holds = f.lock.InDoubt || f.outcome.err != nil, false
	}
}

// prepare decides what to tell Redis and the callers.
func (x *set) prepare(f *filling) {
	o := &f.outcome
	o.data, o.note = x.encode(f)
	if f.unlocked { // callers decode their copies
		o.entry.ID = 0
		o.result = o.newResult()
		return
	}
	if err := x.takeTags(f); err != nil {
		o.data, o.untagged = nil, true
		if o.superseded = f.superseded.Load(); o.superseded { // which has ended the read of the sequences
			o.info.Fenced = true
		} else {
			o.info.StoreErr = err
		}
	}
	o.result = o.newResult()
	if o.superseded {
		o.note = filllock.ReleaseNote{} // waiters in other processes load, rather than fail with this
	} else if o.data == nil && !o.note.Drop && !foreign.Is(o.Err, flight.ErrClosed) {
		x.backOff(f)
	}
}

// handOver hands an outcome to the callers.
func (x *set) handOver(ctx context.Context, f *filling, stamp flight.Stamp) {
	o, r := &f.outcome, f.outcome.result
	r.StoreErr = cmp.Or(o.info.StoreErr, o.err)
	switch {
	case o.err == nil && o.ours: // this proves that the key has not been invalidated since the load began
		f.oldSince, r.NewSince = stamp, stamp
		x.end(ctx, f, r, stamp)
	case r.Failed && !x.mayServeOld(f): // callers that joined during the load have waited for its failure
		x.end(ctx, f, r, stamp)
	default:
		r.Unverified = o.err != nil
		x.end(ctx, f, r, f.began)
	}
}

// encode returns the entry to store for an outcome, or nil and the note with which to release the
// lock.
func (x *set) encode(f *filling) (data []byte, note filllock.ReleaseNote) {
	o := &f.outcome
	typ, storeErr := x.Store.Type, &o.info.StoreErr
	switch {
	case o.Err == nil:
		o.entry.Payload, *storeErr = typ.Encode(f.key, o.Value)
		o.entry.Format = typ.Formats.Written
	case o.NotFound:
		o.Life, note.Failure, note.Drop = x.Store.LifeOfNotFound(), filllock.NotFoundRecord, o.NoStale
	case foreign.Is(o.Err, flight.ErrClosed):
		return nil, note // this process is closing; other processes can still load
	default:
		note.Failure = filllock.Failure{Name: x.User.NameOf(o.Err), Text: o.Text, NoStale: o.NoStale}.Record()
		note.Drop = o.NoStale
		if !o.Passing {
			note.Remember = x.FailureTTL
		}
		return nil, note
	}
	o.entry.NotFound, o.entry.LoadTime, o.entry.WrittenAt = o.NotFound, o.info.Duration, time.Now()
	o.entry.FreshUntil, o.entry.Version = o.entry.WrittenAt.Add(o.Life), typ.Policy.Version
	if *storeErr == nil {
		data, *storeErr = o.entry.Encode()
	}
	if *storeErr != nil {
		o.entry.Payload = nil
		return nil, note
	}
	o.entry.ID = entry.IDOf(data)
	o.entry.Payload = data[o.entry.PayloadAt():] // the codec may have returned memory of the value itself
	if o.Life < time.Millisecond {
		note.Drop = true // remove the old entry, too
		return nil, note
	}
	return data, note
}

// dropped makes memory forget the old values that Redis has dropped, or may have: the release has been answered with
// an error, and if it was refused, the reply to its first copy may have been lost. With ErrNoStale other processes must
// forget the values, too.
func (x *set) dropped(ctx context.Context, fills []*filling) {
	var sure, unsure []*filling
	for _, f := range fills {
		o := &f.outcome
		if !o.note.Drop {
			continue
		}
		switch x.Store.Forget(f.key); {
		case !o.NoStale:
		case o.err == nil:
			sure = append(sure, f)
		default:
			unsure = append(unsure, f)
		}
	}
	x.record(ctx, sure, nil)
	if len(unsure) > 0 {
		x.record(ctx, unsure, unsure[0].outcome.err)
	}
}

// record tells the memory of other processes that values have been dropped by a command that was answered with err.
func (x *set) record(ctx context.Context, fills []*filling, err error) {
	if len(fills) == 0 {
		return
	}
	pairs := make([]filllock.Pair, len(fills))
	for i, f := range fills {
		pairs[i] = f.lock.Keys
	}
	err = x.Keys.Record(ctx, pairs, err)
	for _, f := range fills {
		f.outcome.info.StoreErr = err
	}
}

// mayServeOld reports whether there is an old value that may be served in place of the outcome, a failure.
func (x *set) mayServeOld(f *filling) bool {
	return !f.outcome.NoStale && x.Store.Servable(&f.old.Found, time.Now())
}

// takeTags takes the tags of what a load has brought.
func (x *set) takeTags(f *filling) (err error) {
	o := &f.outcome
	if x.Tags == nil || o.failed() {
		return nil
	}
	if o.tags, err = x.Store.TagsOf(f.key, o.Value); err != nil {
		return err
	}
	return x.since.Missing(o.tags)
}

// backOff keeps the fleet off the source for RetryAfter, if there is an old value to serve.
func (x *set) backOff(f *filling) {
	if x.Store.Servable(&f.old.Found, time.Now()) {
		f.outcome.note.RetryAfter = x.RetryAfter
		f.rest = min(x.RetryAfter, maxRest)
	}
}

// storeOrRelease stores data and releases the lock in one step, for each fill. Without data, or if the server
// refuses to store it, or if one of its tags has been invalidated, it only releases the lock.
func (x *set) storeOrRelease(ctx context.Context, fills []*filling) {
	var told []*filling
	var acts []filllock.Act
	failed := x.noteTags(ctx, fills)
	for _, f := range fills {
		o, err := &f.outcome, failed[f.key]
		o.ours, o.err = err == nil && !o.untagged, nil
		switch {
		case o.ours:
		case err == nil || err == tags.ErrInvalidated: // waiters in other processes load, as after a Delete
			o.info.Fenced = o.info.Fenced || o.data != nil
			o.data, o.note = nil, filllock.ReleaseNote{}
		case client.Unreachable(err):
			o.info.StoreErr, o.err = err, err
			continue
		default:
			o.info.StoreErr, o.data = err, nil
			x.backOff(f)
		}
		told, acts = append(told, f), append(acts, x.act(f))
	}
	refused := x.do(ctx, told, acts)
	acts = nil
	for _, f := range refused { // the server would refuse the next value, too
		f.outcome.data = nil
		x.backOff(f)
		acts = append(acts, x.act(f))
	}
	x.do(ctx, refused, acts)
}

// act stores data, or releases the lock.
func (x *set) act(f *filling) filllock.Act {
	if f.outcome.data == nil {
		return f.lock.Release(f.outcome.note)
	}
	store := f.lock.Store(f.outcome.data, x.Store.KeptFor(f.outcome.Life))
	return store.Tagged(x.Tags.Tagging(f.key, f.outcome.tags, x.since))
}

// do carries out acts, one of each fill. It returns the fills whose values the server has refused.
func (x *set) do(ctx context.Context, fills []*filling, acts []filllock.Act) (refused []*filling) {
	stored := false
	for len(acts) > 0 {
		n := client.Carried(len(acts), func(i int) int { return len(fills[i].outcome.data) })
		answered, away := false, error(nil)
		for i, done := range filllock.Do(ctx, x.Client.Timeout, acts[:n]...) {
			o := &fills[i].outcome
			o.ours, o.err = o.ours && done.Value, done.Err
			if o.data != nil {
				o.info.Stored, o.info.Fenced, o.info.StoreErr = done.Value, done.Err == nil && !done.Value, done.Err
				stored = stored || done.Value
			}
			switch {
			case client.Unreachable(done.Err):
				away = done.Err
			case done.Err != nil && o.data != nil:
				o.ours, refused = true, append(refused, fills[i])
			}
			answered = answered || !client.Unreachable(done.Err)
		}
		if fills, acts = fills[n:], acts[n:]; !answered { // the others are not sent now
			for _, f := range fills {
				o := &f.outcome
				if o.ours, o.err = false, away; o.data != nil {
					o.info.StoreErr = away
				}
			}
			break
		}
	}
	if stored {
		_ = x.Tags.Stored(ctx, x.noted, true) // a failure is traced
	}
	return refused
}

// noteTags notes the tags of what a load has brought, also if it is not to be stored: a DeleteTag that comes
// later then finds the key, and the lock that the fill still holds. It returns why keys have not been noted.
func (x *set) noteTags(ctx context.Context, fills []*filling) (failed map[string]error) {
	var notes []tags.Note
	for _, f := range fills {
		if o := &f.outcome; !o.untagged && len(o.tags) > 0 {
			notes = append(notes, tags.Note{Key: f.key, Tags: o.tags, Life: x.Store.KeptFor(o.Life)})
		}
	}
	if x.noted = nil; len(notes) > 0 {
		x.noted, failed = x.Tags.NoteEach(ctx, notes, x.since)
	}
	return failed
}

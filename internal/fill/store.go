package fill

import (
	"cmp"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/event"
	"github.com/singlefill/singlefill/internal/filllock"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/foreign"
	"github.com/singlefill/singlefill/internal/near"
	"github.com/singlefill/singlefill/internal/tags"
	"github.com/singlefill/singlefill/internal/value"
)

// A storing hands the outcomes of a load to Redis and to the callers.
type storing struct {
	*set
	items []*item // of the fills
}

// An outcome is how a load ended, and what happened to its value.
type outcome struct {
	Outcome
	info     event.LoadInfo
	entry    entry.Entry // of Value, or of ErrNotFound
	tags     []string    // of Value
	untagged bool        // its tags are not known, or cannot be proved

	// To be told to Redis.
	data []byte // of entry; nil: the lock is released with note
	note filllock.ReleaseNote
	ours bool  // the fill still held the lock, and no tag had been invalidated
	err  error // Redis has not been told
}

func (o *outcome) failed() bool { return o.Err != nil && !o.NotFound }

func (o *outcome) newResult() *Result {
	found := value.Found{Value: o.Value, Entry: o.entry, At: o.entry.WrittenAt, Freshness: value.Fresh, Err: o.Err}
	return &Result{Found: found, Failed: o.failed(), NoStale: o.NoStale}
}

// run is the last turn of a load. Another set stores the keys of another server.
func (s storing) run() phase {
	items := s.items
	if len(items) > 1 {
		parts := inParts(s.set, items)
		for _, others := range parts[1:] {
			y := s.split(fillsOf(others))
			y.goOn(storing{y, others})
		}
		items = parts[0]
	}
	var locked []*item
	for _, f := range items {
		s.prepare(f)
	}
	for _, f := range items {
		if f.unlocked != nil {
			s.share(f)
		} else {
			locked = append(locked, f)
		}
	}
	if len(locked) > 0 {
		s.commit(locked)
	}
	for _, f := range items {
		s.loadDone(f)
	}
	return s.over()
}

// count counts what has become of a load.
func (s storing) count(o *outcome) { s.Events.CountLoad(&o.info, o.NotFound) }

// loadDone tells what has become of a load.
func (s storing) loadDone(f *item) {
	ctx := s.ctx
	if call := f.Call.Load(); call != nil {
		ctx = call.Context
	}
	s.Events.LoadDone(ctx, f.outcome.info)
}

// share gives the outcome of a load without the lock to the callers of this process. It is not stored: this process
// may have missed a Delete.
func (s storing) share(f *item) {
	o, r, validFrom := &f.outcome, f.outcome.newResult(), f.began
	if r.Failed {
		validFrom = s.Fills.Now() // callers that joined during the load have waited for its failure
	}
	r.Unverified, r.StoreErr = true, f.unlocked
	if o.NoStale {
		s.Store.Forget(f.Key)
	}
	s.count(o) // before the callers continue
	s.end(f.filling, r, validFrom, f.rest)
}

// commit stores the outcomes of a load, or releases the locks, and hands the outcomes to the callers. The keys are on
// one server.
func (s storing) commit(fills []*item) {
	generations := make([]near.Generation, len(fills))
	for i, f := range fills {
		generations[i] = s.Store.Generation(f.lock.Keys.Value)
	}
	stamp := s.Fills.Now()
	if err := s.Client.Refusal(fills[0].lock.Keys.Lock); err != nil {
		for _, f := range fills {
			f.outcome.err = err
		}
	} else {
		s.storeOrRelease(fills)
		for i, f := range fills {
			if o := &f.outcome; o.err == nil && o.info.Stored {
				if l := s.Store.Stored(f.Key, o.data, o.entry, o.Life); l != nil {
					s.Store.Keep(l, generations[i])
				}
			}
		}
	}
	s.dropped(fills)
	var unreached []*item
	for _, f := range fills {
		if client.Unreachable(f.outcome.err) {
			unreached = append(unreached, f) // counted when it is known whether the second attempt stores it
		} else {
			f.holds = false
			s.count(&f.outcome) // before the callers continue
		}
		s.handOver(f, stamp)
	}
	if len(unreached) > 0 { // once more, or for the first time, now that no caller waits
		s.storeOrRelease(unreached)
		s.dropped(unreached)
	}
	for _, f := range unreached {
		s.count(&f.outcome)
	}
	for _, f := range fills {
		// A value that the server never accepts, for example a value that is too large, must not keep the
		// lock, nor must a server that refuses writes for a moment.
		f.lock.InDoubt, f.holds = f.lock.InDoubt || f.outcome.err != nil, false
	}
}

// prepare decides what to tell Redis and the callers.
func (s storing) prepare(f *item) {
	o := &f.outcome
	o.data, o.note = s.encode(f)
	if f.unlocked != nil { // callers decode their copies
		o.entry.ID = 0
		return
	}
	err := s.takeTags(f)
	superseded := f.superseded.Load() && (o.Err != nil || err != nil) // which has ended the read of the sequences
	if err != nil {
		o.data, o.untagged = nil, true
		if o.info.Fenced = superseded; !superseded {
			o.info.StoreErr = err
		}
	}
	if superseded {
		o.note = filllock.ReleaseNote{} // waiters in other processes load, rather than fail with this
	} else if o.data == nil && !o.note.Drop && !foreign.Is(o.Err, flight.ErrClosed) {
		s.backOff(f)
	}
}

// handOver hands an outcome to the callers.
func (s storing) handOver(f *item, stamp flight.Stamp) {
	o, r := &f.outcome, f.outcome.newResult()
	r.StoreErr = cmp.Or(o.info.StoreErr, o.err)
	switch {
	case o.err == nil && o.ours: // this proves that the key has not been invalidated since the load began
		f.oldSince, r.NewSince = stamp, stamp
		s.end(f.filling, r, stamp, f.rest)
	case r.Failed && !s.mayServeOld(f): // callers that joined during the load have waited for its failure
		s.end(f.filling, r, stamp, f.rest)
	default:
		r.Unverified = o.err != nil
		s.end(f.filling, r, f.began, f.rest)
	}
}

// encode returns the entry to store for an outcome, or nil and the note with which to release the
// lock.
func (s storing) encode(f *item) (data []byte, note filllock.ReleaseNote) {
	o := &f.outcome
	typ, storeErr := s.Store.Type, &o.info.StoreErr
	switch {
	case o.Err == nil:
		o.entry.Payload, *storeErr = typ.Encode(f.Key, o.Value)
		o.entry.Format = typ.Formats.Written
	case o.NotFound:
		o.Life, note.Failure, note.Drop = s.Store.LifeOfNotFound(), filllock.NotFoundRecord, o.NoStale
	case foreign.Is(o.Err, flight.ErrClosed):
		return nil, note // this process is closing; other processes can still load
	default:
		note.Failure = filllock.Failure{Name: s.User.NameOf(o.Err), Text: o.Text, NoStale: o.NoStale}.Record()
		note.Drop = o.NoStale
		if !o.Passing {
			note.Remember = s.FailureTTL
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
func (s storing) dropped(fills []*item) {
	var sure, unsure []*item
	for _, f := range fills {
		o := &f.outcome
		if !o.note.Drop {
			continue
		}
		switch s.Store.Forget(f.Key); {
		case !o.NoStale:
		case o.err == nil:
			sure = append(sure, f)
		default:
			unsure = append(unsure, f)
		}
	}
	s.record(sure, nil)
	if len(unsure) > 0 {
		s.record(unsure, unsure[0].outcome.err)
	}
}

// record tells the memory of other processes that values have been dropped by a command that was answered with err.
func (s storing) record(fills []*item, err error) {
	if len(fills) == 0 {
		return
	}
	pairs := make([]filllock.Pair, len(fills))
	for i, f := range fills {
		pairs[i] = f.lock.Keys
	}
	err = s.Keys.Record(s.ctx, pairs, err)
	for _, f := range fills {
		f.outcome.info.StoreErr = err
	}
}

// mayServeOld reports whether there is an old value that may be served in place of the outcome, a failure.
func (s storing) mayServeOld(f *item) bool {
	return !f.outcome.NoStale && s.Store.Servable(&f.old.Found, time.Now())
}

// takeTags takes the tags of what a load has brought.
func (s storing) takeTags(f *item) (err error) {
	o := &f.outcome
	if s.Tags == nil || o.failed() {
		return nil
	}
	if o.tags, err = s.Store.TagsOf(f.Key, o.Value); err != nil {
		return err
	}
	return s.call.since.Missing(o.tags)
}

// backOff keeps the fleet off the source for RetryAfter, if there is an old value to serve.
func (s storing) backOff(f *item) {
	if s.Store.Servable(&f.old.Found, time.Now()) {
		f.outcome.note.RetryAfter = s.RetryAfter
		f.rest = min(s.RetryAfter, maxRest)
	}
}

// storeOrRelease stores data and releases the lock in one step, for each fill. Without data, or if the server
// refuses to store it, or if one of its tags has been invalidated, it only releases the lock.
func (s storing) storeOrRelease(fills []*item) {
	var told []*item
	var acts []filllock.Act
	noted, failed := s.noteTags(fills)
	for _, f := range fills {
		o, err := &f.outcome, failed[f.Key]
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
			s.backOff(f)
		}
		told, acts = append(told, f), append(acts, s.act(f))
	}
	refused := s.do(told, acts, noted)
	acts = nil
	for _, f := range refused { // the server would refuse the next value, too
		f.outcome.data = nil
		s.backOff(f)
		acts = append(acts, s.act(f))
	}
	s.do(refused, acts, noted)
}

// act stores data, or releases the lock.
func (s storing) act(f *item) filllock.Act {
	if f.outcome.data == nil {
		return f.lock.Release(f.outcome.note)
	}
	store := f.lock.Store(f.outcome.data, s.Store.KeptFor(f.outcome.Life))
	return store.Tagged(s.Tags.Tagging(f.Key, f.outcome.tags, s.call.since))
}

// do carries out acts, one of each fill. It returns the fills whose values the server has refused.
func (s storing) do(fills []*item, acts []filllock.Act, noted *tags.Noted) (refused []*item) {
	stored := false
	for len(acts) > 0 {
		n := client.Carried(len(acts), func(i int) int { return len(fills[i].outcome.data) })
		answered, away := false, error(nil)
		for i, done := range filllock.Do(s.ctx, s.Client.Timeout, acts[:n]...) {
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
		_ = s.Tags.Stored(s.ctx, noted, true) // a failure is traced
	}
	return refused
}

// noteTags notes the tags of what a load has brought, also if it is not to be stored: a DeleteTag that comes
// later then finds the key, and the lock that the fill still holds. It returns what has been noted, nil: there are no
// tags, and why keys have not been.
func (s storing) noteTags(fills []*item) (noted *tags.Noted, failed map[string]error) {
	var notes []tags.Note
	for _, f := range fills {
		if o := &f.outcome; !o.untagged && len(o.tags) > 0 {
			notes = append(notes, tags.Note{Key: f.Key, Tags: o.tags, Life: s.Store.KeptFor(o.Life)})
		}
	}
	if len(notes) == 0 {
		return nil, nil
	}
	return s.Tags.NoteEach(s.ctx, notes, s.call.since)
}

package fill

import (
	"cmp"
	"context"
	"sync"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/event"
	"github.com/singlefill/singlefill/internal/filllock"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/foreign"
	"github.com/singlefill/singlefill/internal/tags"
	"github.com/singlefill/singlefill/internal/value"
)

// A Result is how a fill ended.
type Result struct {
	value.Found
	Failed     bool         // Err is the failure of a load
	NoStale    bool         // and no old value may be served in its place
	Unverified bool         // Redis did not tell whether the value was invalidated while it was loaded
	Old        *value.Found // fallback in place of Err; nil: there is none
	OldSince   flight.Stamp // the key is known to have held Old as of this stamp
	NewSince   flight.Stamp // the load that brought it ended after this stamp; 0: that is not known
	Resting    bool         // Err is that of an earlier load, and it is too early for another one
	StoreErr   error        // why the value has not been stored, or may not have been

	decode   sync.Once
	pristine any
}

// Pristine returns a value that nobody owns, for the callers that do not own Value to clone. A clone takes less than
// half of the time of decoding a map, a sixth for a slice of structs, and almost none for a flat struct. Pristine
// returns nil if the entry cannot be decoded.
func (r *Result) Pristine(t *value.Type, key string) any {
	r.decode.Do(func() {
		if r.Err == nil && r.Entry.Payload != nil {
			r.pristine, _ = t.DecodeEntry(key, &r.Entry)
		}
	})
	return r.pristine
}

// An outcome is how a load ended, and what happened to its value.
type outcome struct {
	Outcome
	info       event.LoadInfo
	entry      entry.Entry  // of Value, or of ErrNotFound
	tags       []string     // of Value
	untagged   bool         // its tags are not known, or cannot be proved
	superseded bool         // the load was cancelled because no caller could have had its value
	call       *flight.Call // of the Loader; nil: there was none
}

func (o *outcome) failed() bool { return o.Err != nil && !o.NotFound }

func (o *outcome) result() *Result {
	found := value.Found{Value: o.Value, Entry: o.entry, At: o.entry.WrittenAt, Freshness: value.Fresh, Err: o.Err}
	return &Result{Found: found, Failed: o.failed(), NoStale: o.NoStale}
}

// store is the last turn of a load.
func (x *filling) store(ctx context.Context) state {
	if x.load.unlocked {
		x.share(ctx)
	} else {
		x.commit(ctx)
	}
	x.told(ctx)
	return ended
}

// share gives the outcome of a load without the lock to the callers of this process. It is not stored: this process
// may have missed a Delete.
func (x *filling) share(ctx context.Context) {
	o := &x.outcome
	x.encode(o) // callers decode their copies from it
	o.entry.ID = 0
	r := o.result()
	validFrom := x.load.began
	if r.Failed {
		validFrom = x.Fills.Now() // callers that joined during the load have waited for its failure
	}
	r.Unverified, r.StoreErr = true, x.away
	if o.NoStale {
		x.Store.Forget(x.fill.Key)
	}
	x.end(ctx, r, validFrom)
}

// commit stores the outcome of a load, or releases the lock, in one command, and hands the outcome to the callers.
func (x *filling) commit(ctx context.Context) {
	o := &x.outcome
	data, note := x.encode(o)
	if err := x.takeTags(o); err != nil {
		data, o.info.StoreErr, o.untagged = nil, err, true
	}
	r := o.result()
	if o.superseded {
		note = filllock.ReleaseNote{} // waiters in other processes load, rather than fail with this
	} else if data == nil && !note.Drop && !foreign.Is(o.Err, flight.ErrClosed) {
		x.backOff(&note)
	}
	stamp := x.Fills.Now()
	var ours bool
	err := x.Client.Refusal(x.lock.Keys.Lock)
	if err == nil {
		stored := value.Lookup{Key: x.fill.Key}
		x.Store.During([]*value.Lookup{&stored}, func() {
			if ours, err = x.storeOrRelease(ctx, o, data, note); err == nil && o.info.Stored {
				x.Store.Stored(&stored, data, o.entry, o.Life)
			}
		})
	}
	x.dropped(ctx, note, err)
	r.StoreErr = cmp.Or(o.info.StoreErr, err)
	switch {
	case err == nil && ours: // this proves that the key has not been invalidated since the load began
		x.oldSince, r.NewSince = stamp, stamp
		x.end(ctx, r, stamp)
	case r.Failed && !x.mayServeOld(): // callers that joined during the load have waited for its failure
		x.end(ctx, r, stamp)
	default:
		r.Unverified = err != nil
		x.end(ctx, r, x.load.began)
	}
	if client.Unreachable(err) { // once more, or for the first time, now that no caller waits
		_, err = x.storeOrRelease(ctx, o, data, note)
		x.dropped(ctx, note, err)
	}
	// A value that the server never accepts, for example one that is too large, must not keep the
	// lock, nor must a server that refuses writes for a moment.
	x.lock.InDoubt = x.lock.InDoubt || err != nil
}

// encode returns the entry to store for an outcome, or nil and the note with which to release the
// lock.
func (x *filling) encode(o *outcome) (data []byte, note filllock.ReleaseNote) {
	typ, storeErr := x.Store.Type, &o.info.StoreErr
	switch {
	case o.Err == nil:
		o.entry.Payload, *storeErr = typ.Encode(x.fill.Key, o.Value)
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
	o.entry.FreshUntil = o.entry.WrittenAt.Add(o.Life)
	if *storeErr == nil {
		data, *storeErr = o.entry.Encode()
	}
	if *storeErr != nil {
		o.entry.Payload = nil
		return nil, note
	}
	o.entry.ID = entry.IDOf(data)
	o.entry.Payload = data[entry.HeaderLen:] // the codec may have returned memory of the value itself
	if o.Life < time.Millisecond {
		note.Drop = true // remove the old entry, too
		return nil, note
	}
	return data, note
}

// dropped makes memory forget the old value if Redis has dropped it, or may have: the release has been answered with
// err, and if it was refused, the reply to its first copy may have been lost. With ErrNoStale other processes must
// forget the value, too.
func (x *filling) dropped(ctx context.Context, note filllock.ReleaseNote, err error) {
	if !note.Drop {
		return
	}
	x.Store.Forget(x.fill.Key)
	if x.outcome.NoStale {
		x.outcome.info.StoreErr = x.Keys.Record(ctx, []filllock.Pair{x.lock.Keys}, err)
	}
}

// mayServeOld reports whether there is an old value that may be served in place of the outcome, a failure.
func (x *filling) mayServeOld() bool {
	return !x.outcome.NoStale && x.Store.Servable(&x.old.Found, time.Now())
}

// takeTags takes the tags of what a load has brought.
func (x *filling) takeTags(o *outcome) (err error) {
	if x.Tags == nil || o.failed() {
		return nil
	}
	if o.tags, err = x.Store.TagsOf(x.fill.Key, o.Value); err != nil {
		return err
	}
	return x.since.Missing(o.tags)
}

// backOff keeps the fleet off the source for RetryAfter, if there is an old value to serve.
func (x *filling) backOff(note *filllock.ReleaseNote) {
	if x.Store.Servable(&x.old.Found, time.Now()) {
		note.RetryAfter = x.RetryAfter
		x.rest = min(x.RetryAfter, maxRest)
	}
}

// storeOrRelease stores data and releases the lock in one step. Without data, or if the server
// refuses to store it, or if one of its tags has been invalidated, it only releases the lock. It reports
// whether this fill still held the lock, and the key has not been invalidated by a tag.
func (x *filling) storeOrRelease(ctx context.Context, o *outcome, data []byte,
	note filllock.ReleaseNote) (ours bool, err error) {
	noted, valid, err := x.noteTags(ctx, o)
	switch {
	case client.Unreachable(err):
		o.info.StoreErr = err
		return false, err
	case err != nil:
		o.info.StoreErr = err
		x.backOff(&note)
	case !valid: // waiters in other processes load, as after a Delete
		o.info.Fenced, note = data != nil, filllock.ReleaseNote{}
	case data != nil:
		kept := x.Store.KeptFor(o.Life)
		ours, err = client.Retry(ctx, x.Client.Timeout, x.Client.Again(x.lock.Keys.Lock), func(within time.Duration) (bool, error) {
			return x.lock.Store(ctx, within, data, kept)
		})
		o.info.Stored, o.info.Fenced, o.info.StoreErr = ours, err == nil && !ours, err
		if ours && noted != nil {
			_ = x.Tags.Stored(ctx, noted, true) // a failure is traced
		}
		if err == nil || client.Unreachable(err) {
			return ours, err
		}
		x.backOff(&note) // the server would refuse the next value, too
	}
	ours, err = client.Retry(ctx, x.Client.Timeout, x.Client.Again(x.lock.Keys.Lock), func(within time.Duration) (bool, error) {
		return x.lock.Release(ctx, within, note)
	})
	return ours && valid, err
}

// noteTags notes the tags of what a load has brought, also if it is not to be stored: a DeleteTag that comes
// later then finds the key, and the lock that this fill still holds. It returns false if a tag has been
// invalidated since the load began, or may have been.
func (x *filling) noteTags(ctx context.Context, o *outcome) (noted *tags.Noted, valid bool, err error) {
	if o.untagged || len(o.tags) == 0 {
		return nil, !o.untagged, nil
	}
	note := tags.Note{Key: x.fill.Key, Tags: o.tags, Life: x.Store.KeptFor(o.Life)}
	noted, err = x.Tags.Note(ctx, []tags.Note{note}, x.since)
	return noted, noted != nil, err
}

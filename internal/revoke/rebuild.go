package revoke

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/event"
	"github.com/singlefill/singlefill/internal/filllock"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/foreign"
	"github.com/singlefill/singlefill/internal/tags"
)

// A rebuild notes all values of the namespace under their tags, since what was known of the tags may have been
// lost, and invalidates the values that have a tag of the rebuild:
//
//  1. try what the server may refuse, and then begin new books, see [tags.Index.Prove]: of what is being loaded,
//     nothing with tags is stored from now on;
//  2. remove all locks: a load whose note was lost is not stored;
//  3. read all values, note those that stay, and invalidate the others;
//  4. tell the other processes to empty their memory: its values may no longer be in Redis;
//  5. complete the books, unless one has been lost since.
//
// Any other order leaves old values, as a model has shown: see package tags.
type rebuild struct {
	*Tags
	info event.TagInfo
	do   func(ctx context.Context, keys ...string) error // invalidates

	invalid atomic.Int64 // keys that were invalidated
	known   atomic.Int64 // values of which the tags are known
	unknown atomic.Int64
	err     error
}

// rebuild runs a rebuild, and waits until it ends, or ctx. A rebuild that has begun goes on without its caller:
// with callers in a hurry, none would ever end. If another process has run one, info stays as it is.
func (t *Tags) rebuild(ctx context.Context, info *event.TagInfo, do func(ctx context.Context, keys ...string) error) error {
	select {
	case t.rebuilding <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	case <-t.keys.closing:
		return flight.ErrClosed
	}
	r := &rebuild{Tags: t, info: *info, do: do, err: foreign.ErrGoexit}
	ended := make(chan struct{})
	t.keys.fills.Go(func() {
		defer close(ended)
		defer func() { <-t.rebuilding }()
		r.err = r.run(client.Detach(ctx))
	})
	select {
	case <-ended:
		*info = r.info
		return r.err
	case <-ctx.Done():
		return ctx.Err()
	case <-t.keys.closing:
		return flight.ErrClosed
	}
}

// run runs the rebuild in one process at a time.
func (r *rebuild) run(ctx context.Context) error {
	lock, err := r.lock(ctx)
	if lock == nil || err != nil {
		return err
	}
	keeping, stop := context.WithCancel(ctx)
	kept := make(chan struct{})
	go func() {
		defer close(kept)
		filllock.Keep(keeping, []*filllock.Lock{lock}, nil, func(*filllock.Lock) {}) // a second rebuild does no harm
	}()
	defer func() {
		stop()
		<-kept
		_, _ = lock.Release(filllock.ReleaseNote{}).Do(ctx, r.keys.client.Timeout) // if it fails, the lock ends
	}()
	r.info.Rebuilt = true
	err = r.all(ctx)
	r.info.Keys += int(r.invalid.Load())
	r.info.Cleared = err == nil && r.known.Load() == 0 && r.unknown.Load() > 0
	return err
}

// rebuildPause is how long a process pauses that waits for another one's rebuild.
const rebuildPause = 50 * time.Millisecond

// lock waits until no other process rebuilds. It returns nil if the books are complete by then. It marks no tags while
// it waits: values with these tags could not be stored until the end of the other rebuild, which takes its time. The
// caller marks them when it goes on, before it reads the indexes: those have what was loaded before.
func (r *rebuild) lock(ctx context.Context) (*filllock.Lock, error) {
	name := r.space.namespace + ":tags:{" + client.HashTag(r.space.namespace) + "}:rebuild"
	lock := filllock.New(r.keys.client, filllock.Pair{Value: name, Lock: name + ":lock"}, r.space.lockTTL)
	for {
		reply, err := lock.GetOrLock(ctx, r.keys.client.Timeout, filllock.Query{Take: true})
		if err != nil {
			return nil, err
		}
		if reply.Status == filllock.Locked {
			marked, err := r.space.tags.Mark(ctx, r.info.Tags)
			if err == nil && !marked.Complete {
				return lock, nil
			}
			_, released := lock.Release(filllock.ReleaseNote{}).Do(ctx, r.keys.client.Timeout)
			return nil, errors.Join(err, released)
		}
		select {
		case <-time.After(rebuildPause):
		case <-r.keys.closing:
			return nil, flight.ErrClosed
		}
	}
}

// all makes the books complete. Memory is emptied before that, since a process that finds them complete relies
// on it; and after an error, too, since a part of the values may have been removed.
func (r *rebuild) all(ctx context.Context) error {
	if err := r.try(ctx); err != nil {
		return err
	}
	proof, err := r.space.tags.Prove(ctx)
	if err != nil {
		return err
	}
	err = r.space.sweep(ctx, r.rebuildValues, false)
	r.keys.store.ForgetAll()
	err = errors.Join(err, r.keys.log.AppendAll(ctx))
	r.keys.log.WakeOthers(ctx)
	if err != nil {
		return err
	}
	_ = r.space.tags.Complete(ctx, proof) // if it fails, which is traced, the next call rebuilds again
	return nil
}

// try returns an error if a server refuses what a rebuild needs.
func (r *rebuild) try(ctx context.Context) error {
	layout, err := r.space.Layout(ctx)
	if err == nil {
		err = cmp.Or(r.space.CheckScan(ctx, layout), r.space.tags.Check(ctx))
	}
	return err
}

// rebuildValues rebuilds what is known of a few values. A single command that is not answered in time does not
// undo the work so far.
func (r *rebuild) rebuildValues(ctx context.Context, valueKeys []string) error {
	for batch := range slices.Chunk(valueKeys, rebuildBatch) {
		err := r.tryValues(ctx, batch)
		for end := time.Now().Add(r.space.lockTTL); client.Unreachable(err) && r.keys.open() == nil && time.Now().Before(end); {
			if !client.Sleep(ctx, rebuildPause) {
				break
			}
			err = r.tryValues(ctx, batch)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (r *rebuild) tryValues(ctx context.Context, valueKeys []string) error {
	planted := slices.DeleteFunc(slices.Clone(valueKeys), func(key string) bool { return !r.space.Planted(key) })
	values, err := r.readValues(ctx, valueKeys)
	if err == nil && len(planted) > 0 {
		err = r.space.RemoveValues(ctx, planted)
	}
	if err != nil {
		return err
	}
	var notes []tags.Note
	var tagged []string
	var unknown []*storedValue
	for _, v := range values {
		var names []string
		if v.err == nil {
			names, v.err = r.tagsOfStored(v.key, v.data)
		}
		has := slices.ContainsFunc(names, func(tag string) bool { return slices.Contains(r.info.Tags, tag) })
		noted := len(names) > 0 && (!has || r.info.Expire)
		if noted && v.life < 0 {
			v.err = errors.New("the value has tags and no TTL") // a note of it would never end
		}
		switch {
		case v.err != nil:
			unknown = append(unknown, v)
			continue
		case has:
			tagged = append(tagged, v.key)
		}
		if noted {
			notes = append(notes, tags.Note{Key: v.key, Tags: names, Life: v.life})
		}
	}
	if _, err = r.space.tags.Note(ctx, notes); err == nil && len(tagged) > 0 {
		err = r.do(ctx, tagged...)
	}
	if err == nil {
		err = r.removeUnknown(ctx, unknown)
	}
	if err != nil {
		return err
	}
	for _, v := range unknown {
		r.space.events.BadValue(ctx, v.key, v.err)
	}
	r.known.Add(int64(len(values) - len(unknown)))
	r.unknown.Add(int64(len(unknown)))
	r.invalid.Add(int64(len(tagged)))
	return nil
}

// removeUnknown removes values, unless others have replaced them.
func (r *rebuild) removeUnknown(ctx context.Context, values []*storedValue) error {
	return errors.Join(foreign.Each(len(values), func(i int) error { return r.remove(ctx, values[i]) })...)
}

// remove removes a value as a load does that finds nothing to store: by its fill lock. A load that has the lock
// is superseded, since it may leave the value. After an error the lock is left, and ends.
func (r *rebuild) remove(ctx context.Context, v *storedValue) error {
	defer r.keys.Invalidated(v.key)
	for {
		lock := filllock.New(r.keys.client, filllock.PairOf(v.valueKey), r.space.lockTTL)
		reply, err := lock.GetOrLock(ctx, r.keys.client.Timeout, filllock.Query{Known: entry.Header(v.data), Take: true})
		switch {
		case err != nil:
			return err
		case reply.Status == filllock.Locked:
			released, err := lock.Release(filllock.ReleaseNote{Drop: true}).Do(ctx, r.keys.client.Timeout)
			if released || err != nil {
				return err
			}
		case reply.Status == filllock.Busy || reply.Status == filllock.Failed: // remembered: see Options.FailureTTL
			if err := r.space.RemoveLocks(ctx, []string{lock.Keys.Lock}); err != nil {
				return err
			}
		default:
			return nil
		}
	}
}

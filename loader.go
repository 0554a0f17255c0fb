package singlefill

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"

	"github.com/singlefill/singlefill/internal/event"
	"github.com/singlefill/singlefill/internal/fill"
	"github.com/singlefill/singlefill/internal/foreign"
	"github.com/singlefill/singlefill/internal/value"
)

// A Loader asks the source for the value of key. It returns [ErrNotFound], bare or wrapped, when
// the source has no such value. The cache remembers that, and other errors only with
// [Options.FailureTTL].
//
// A Loader works for all callers that wait, so all Loaders given for one key must mean the same,
// and do nothing that may not happen twice. Its ctx has the values of the call that started it, but
// neither its deadline nor its cancellation: it ends after [Options.LoadTimeout], or when the key
// is deleted and no earlier caller waits. A refresh may run after the request of that call has
// ended, so nothing that the values of ctx refer to may be closed with the request. A Loader may
// call GetOrLoad for other keys, and of other caches, with its ctx.
type Loader[T any] func(ctx context.Context, key string) (T, error)

// GetOrLoad returns the value under key: from Redis if it is there, otherwise from load, which runs
// once for all callers that ask at that time, in all processes.
//
// ctx bounds how long this caller waits. When it ends, GetOrLoad returns ctx.Err(): at once while
// it waits for a load, never later than the deadline, and within RedisTimeout if ctx is cancelled
// during a Redis command. The load goes on for the other callers and for the cache.
//
// The call that began a load gets the value that load returned, all others get it from the codec, as a
// later hit does: docs/values.md says what may differ.
//
// Callers of this process that waited for a load get its error unchanged, those in other processes
// a [*RemoteError]. A panic or runtime.Goexit in load is a [*PanicError]. A remembered
// [ErrNotFound] comes back bare.
//
// A value that expires soon, or is stale within [Options.StaleWhileRevalidate], is returned at
// once, and load may run in the background. A value within [Options.StaleIfError] is returned in
// place of an error of load, unless that is [ErrNoStale], and when the deadline of ctx comes first.
//
// While Redis does not answer, load still runs once at a time per process; its value is returned
// and not stored. GetOrLoad never returns an error of Redis.
func (c *Cache[T]) GetOrLoad(ctx context.Context, key string, load Loader[T]) (T, error) {
	v, err := c.rooms.getOrLoad(ctx, key, loadOf[T](load), load == nil, nil)
	if p, ok := v.(*T); ok {
		return *p, err
	}
	var none T
	return none, err
}

// GetOrLoadInfo is [Cache.GetOrLoad] that also tells whether the value is fresh or stale, how old
// it is, and why it is not newer.
func (c *Cache[T]) GetOrLoadInfo(ctx context.Context, key string, load Loader[T]) (T, ValueInfo, error) {
	var info event.ValueInfo
	v, err := c.rooms.getOrLoad(ctx, key, loadOf[T](load), load == nil, &info)
	return valueOf[T](v), infoOf(info), err
}

// A loadOf is a Loader as the rooms call it, which do not know T, with one key.
type loadOf[T any] Loader[T]

func (l loadOf[T]) Load(ctx context.Context, keys []string) (fill.Outcomes, error) {
	v, err := l(ctx, keys[0])
	return func(string) (any, error) { return &v, err }, nil
}

// A loadMany is a ManyLoader as the rooms call it, which do not know T.
type loadMany[T any] func(ctx context.Context, keys []string) (map[string]T, error)

func (l loadMany[T]) Load(ctx context.Context, keys []string) (fill.Outcomes, error) {
	values, err := l(ctx, slices.Clone(keys)) // it may change them
	return outcomes(keys, err, values == nil, maps.Keys(values), func(key string) any {
		if v, ok := values[key]; ok {
			return &v
		}
		return nil
	})
}

// outcomes returns what a ManyLoader has brought for keys. It has returned err, and a map: nil, or with values.
func outcomes(keys []string, err error, isNil bool, values iter.Seq[string], valueOf func(key string) any) (fill.Outcomes, error) {
	left := ErrNotFound
	if stray, ok := strayKey(values, keys); ok {
		left = fmt.Errorf("singlefill: the ManyLoader was not asked for the key %.100q that it returned", stray)
	}
	var failed map[string]error
	if some, ok := err.(*ManyError); ok { // not errors.As: what has been wrapped may be about the whole call
		if err = nil; some != nil {
			failed = some.Errs
		}
		if _, stray := strayKey(maps.Keys(failed), keys); stray || isNil && len(failed) > 0 {
			left = some // it is about the keys of another cache, or the Loader has not come to its own
		}
	}
	return func(key string) (any, error) {
		if err := failed[key]; err != nil {
			return nil, err
		}
		if v := valueOf(key); v != nil {
			return v, nil
		}
		return nil, left
	}, err
}

// strayKey returns the first of all, in alphabetical order, that is not in keys.
func strayKey(all iter.Seq[string], keys []string) (stray string, ok bool) {
	asked := make(map[string]bool, len(keys))
	for _, key := range keys {
		asked[key] = true
	}
	for key := range all {
		if !asked[key] && (!ok || key < stray) {
			stray, ok = key, true
		}
	}
	return stray, ok
}

func (c *rooms) getOrLoad(ctx context.Context, key string, load fill.Loader, isNil bool, info *event.ValueInfo) (v any, err error) {
	defer failed(&err)
	if err := c.checkLoader(ctx, key, isNil); err != nil {
		return nil, err
	}
	return c.reader.GetOrLoad(ctx, key, load, info)
}

func (c *rooms) checkLoader(ctx context.Context, key string, isNil bool) error {
	err := checkCall(ctx, key)
	if err == nil && isNil {
		err = errNoLoader
	}
	if err == nil {
		err = c.checkLoad(ctx)
	}
	return err
}

// Refresh has key loaded now, although its value is fresh, and returns when the new value is stored:
// for a nightly warm-up, or a page that an editor reloads. Until then others get the old value, and
// do not wait. All calls at that time, in all processes, share one load: a load that ends after
// Refresh was called counts, also if it had begun before. A Set counts, too. A load that had begun may have
// read the source before the call: after a change of the source call [Cache.Delete] or [Cache.Expire]
// instead, whose callers never get what was loaded before.
//
// If load fails, the old value stays, unless the error is [ErrNoStale], and Refresh returns the error,
// or a [*RemoteError] if another process has loaded. Within [Options.RetryAfter] and
// [Options.FailureTTL] of a failure it returns that, and does not load. With [ErrNotFound] from load
// the cache remembers that there is no value, and Refresh returns nil. If the key is invalidated
// during the load, it is loaded again.
//
// While Redis does not answer, Refresh returns its error and begins no load. After an error of Redis the
// new value may have been stored. When ctx ends, Refresh returns ctx.Err(), and the load goes on.
//
// With [Options.Near] this process does not serve the old value from memory any more when Refresh has
// returned nil. Other processes stop within MaxLag. After ctx.Err() all may serve it until it expires.
func (c *Cache[T]) Refresh(ctx context.Context, key string, load Loader[T]) error {
	return c.rooms.refresh(ctx, key, loadOf[T](load), load == nil)
}

func (c *rooms) refresh(ctx context.Context, key string, load fill.Loader, isNil bool) (err error) {
	defer failed(&err)
	if err := c.checkLoader(ctx, key, isNil); err != nil {
		return err
	}
	return c.reader.Refresh(ctx, key, load)
}

var errNoLoader = errors.New("singlefill: load is nil")

// A user calls what the user has given to a cache. It implements fill.User.
type user struct {
	namespace string
	store     *value.Store
	errors    sentinels
}

func (u user) Load(ctx context.Context, keys []string, load fill.Loader) fill.Outcomes {
	o, err := load.Load(ctx, keys)
	if err != nil {
		return func(string) (any, error) { return nil, err }
	}
	return o
}

func (u user) Returned(key string, v any, err error) (o fill.Outcome) {
	if o.Value, o.Err = v, err; err == nil {
		o.Life = u.store.LifeOf(key, v) // by Options.TTLFunc
	} else {
		o.NotFound, o.NoStale, o.Text = isNotFound(err), says(err, ErrNoStale), foreign.Text(err)
		if o.NotFound {
			o.Value = nil // what the Loader returned beside it means nothing
		}
		o.Passing = isPanic(err) || foreign.Is(err, context.Canceled) || foreign.Is(err, context.DeadlineExceeded)
	}
	return o
}

func (user) Panicked(p any, load bool) fill.Outcome {
	err := panicked(p, load)
	return fill.Outcome{Err: err, Text: foreign.Text(err), Passing: true}
}

func (user) IsNotFound(err error) bool { return isNotFound(err) }

func (u user) NameOf(err error) string { return u.errors.nameOf(err) }

func (u user) RemoteError(key, record string) error {
	return u.errors.remoteError(u.namespace, key, record)
}

// isNotFound reports whether the source has no such value. ErrNotFound in a ManyError is of another key.
func isNotFound(err error) bool { return says(err, ErrNotFound) && !isA[*ManyError](err) }

// says reports whether an error of a Loader is or wraps what. A panic says nothing about the source,
// whatever its argument. A panic of a ManyLoader arrives as an error.
func says(err, what error) (is bool) {
	defer func() { _ = recover() }() // of a method of err
	return !isPanic(err) && errors.Is(err, what)
}

func isPanic(err error) bool { return isA[*PanicError](err) }

// isA reports whether an error of a Loader is or wraps an E.
func isA[E error](err error) (is bool) {
	defer func() { _ = recover() }() // of a method of err
	_, is = errors.AsType[E](err)
	return is
}

package singlefill

import (
	"context"
	"maps"
	"slices"
)

// A ManyLoader asks the source for the values of keys, at most [Options.MaxBatch] of them. The
// rules of a [Loader] hold. A key that it leaves out does not exist; the cache remembers that. If
// the map has a key that is not among keys, such as another spelling of one, those that it leaves
// out fail. No two values may share memory.
//
// A [*ManyError] is the outcome of the keys in its Errs, whatever the map has for them: the other
// keys have the values in the map, or do not exist, and are stored. [ErrNotFound] there means that
// the key does not exist, and nil that it has not failed. A *ManyError without errors is none. So a
// ManyLoader may return what GetOrLoadMany of another cache has returned for the same keys.
//
// If the *ManyError has a key that was not asked for, or the map is nil, it may be the error of
// another cache: the keys that neither it nor the map has fail with the *ManyError itself. With a map
// that is not nil, and keys that by chance were all asked for, it is taken for an error of this cache.
// So wrap the errors of a cache with other keys. Any other error is the outcome of each of the keys,
// also an error that wraps a *ManyError.
type ManyLoader[T any] func(ctx context.Context, keys []string) (map[string]T, error)

// GetOrLoadMany returns the values under keys: from Redis those that are there, the others from
// load, which gets them together. What [Cache.GetOrLoad] promises holds for each key by itself: it
// is loaded once for all callers of both methods, in all processes, and after a Delete Redis refuses the
// value of that key only.
//
// load gets the keys that this call could lock at once, which are locked and stored in a pipeline
// for each server. At the same time the call waits for the keys that others load. No locked key waits for
// the lock of another key, so calls cannot lock each other out.
//
// Other calls of load, perhaps at the same time, get what this call locks later: keys on a master of
// a Cluster that is slow to answer, and keys that are deleted, or whose process dies, while others
// load them. Each call of load has a slot of [Options.MaxLoads].
//
// Of a value that is loaded, the call that began its load gets what load returned, as in GetOrLoad.
//
// The map holds the values that exist. It is valid even if the error is a [*ManyError], which has
// the error of each key that failed. When ctx ends, the map holds the values that were found by
// then.
func (c *Cache[T]) GetOrLoadMany(ctx context.Context, keys []string, load ManyLoader[T]) (values map[string]T, err error) {
	defer failed(&err)
	if load == nil {
		return nil, errNoLoader
	}
	keys, err = c.rooms.checkKeys(ctx, keys, c.rooms.checkLoad)
	if err != nil {
		return nil, err
	}
	found := make(valueMap[T], len(keys))
	return found, manyError(c.rooms.reader.GetOrLoadMany(ctx, keys, loadMany[T](load), found))
}

// RefreshMany is [Cache.Refresh] for keys, which load gets together, at most [Options.MaxBatch] at a
// time. Keys whose new values may not have been stored have errors in a [*ManyError].
func (c *Cache[T]) RefreshMany(ctx context.Context, keys []string, load ManyLoader[T]) (err error) {
	defer failed(&err)
	if load == nil {
		return errNoLoader
	}
	keys, err = c.rooms.checkKeys(ctx, keys, c.rooms.checkLoad)
	if err != nil {
		return err
	}
	return manyError(c.rooms.reader.RefreshMany(ctx, keys, loadMany[T](load)))
}

// GetMany returns the values under keys that the cache has, as [Cache.Get] does for one key. A key
// that it does not have is not in the map. Keys that Redis could not be asked for, or not before
// ctx ended, have errors in a [*ManyError], beside the values that were found.
func (c *Cache[T]) GetMany(ctx context.Context, keys []string) (values map[string]T, err error) {
	defer failed(&err)
	keys, err = c.rooms.checkKeys(ctx, keys, c.rooms.checkOpen)
	if err != nil {
		return nil, err
	}
	found := make(valueMap[T], len(keys))
	return found, manyError(c.rooms.reader.GetMany(ctx, keys, found))
}

// A valueMap takes the values of a call for many keys.
type valueMap[T any] map[string]T

func (m valueMap[T]) Put(key string, value any) { m[key] = *value.(*T) }

func manyError(errs map[string]error) error {
	if len(errs) == 0 {
		return nil
	}
	return &ManyError{errs}
}

// SetMany stores values, as [Cache.Set] does for each of them, in few round trips. Keys that may
// not have been stored have errors in a [*ManyError].
func (c *Cache[T]) SetMany(ctx context.Context, values map[string]T) (err error) {
	defer failed(&err)
	keys, err := c.rooms.checkKeys(ctx, slices.Collect(maps.Keys(values)), c.rooms.checkOpen)
	if err != nil {
		return err
	}
	return manyError(c.rooms.sets.SetMany(ctx, keys, func(key string) any {
		v := values[key]
		return &v
	}))
}

// checkKeys checks a call for many keys, and returns these without duplicates.
func (c *rooms) checkKeys(ctx context.Context, keys []string, open func(ctx context.Context) error) ([]string, error) {
	if err := open(ctx); err != nil {
		return nil, err
	}
	some := make([]string, 0, len(keys))
	seen := make(map[string]bool, len(keys))
	for _, key := range keys {
		if key == "" {
			return nil, ErrEmptyKey
		}
		if !seen[key] {
			seen[key] = true
			some = append(some, key)
		}
	}
	return some, ctx.Err()
}

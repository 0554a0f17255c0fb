// Package revoke ends the values of a cache before their time: the values of keys, of tags, or of a
// whole namespace.
package revoke

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/filllock"
	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/foreign"
	"github.com/singlefill/singlefill/internal/near"
	"github.com/singlefill/singlefill/internal/value"
)

// Keys are the keys of a namespace.
type Keys struct {
	client  *client.Client
	store   *value.Store
	fills   Fills
	log     *near.Log
	closing <-chan struct{}
}

// Fills are the running fills of this process: see [flight.Fills].
type Fills interface {
	Supersede(key string, set bool)
	SupersedeAll()
	Go(run func())
}

// NewKeys returns the keys of a store. log tells the memory of other processes what is invalidated. After closing is
// closed nothing is invalidated.
func NewKeys(c *client.Client, store *value.Store, log *near.Log, fills Fills, closing <-chan struct{}) *Keys {
	return &Keys{client: c, store: store, fills: fills, log: log, closing: closing}
}

// Delete removes keys and supersedes their loads: a key together with its lock, in one step.
func (k *Keys) Delete(ctx context.Context, keys ...string) error {
	return k.invalidate(ctx, "delete", keys, k.delete)
}

// Expire makes the values under keys stale, and supersedes their loads.
func (k *Keys) Expire(ctx context.Context, keys ...string) error {
	return k.invalidate(ctx, "expire", keys, k.expire)
}

// DeleteIf removes the entry with an ID from key, as Delete does, if key still holds it. Otherwise it
// keeps other entries and their loads. But memory may have that entry: another process has deleted it,
// and this one has not read the record yet.
func (k *Keys) DeleteIf(ctx context.Context, key string, id uint64) (deleted bool, err error) {
	if id == 0 {
		return false, nil
	}
	pair := filllock.PairOf(k.store.Key(key))
	deleted, lost, err := filllock.DeleteIf(ctx, k.client, pair, id)
	if deleted || lost || err != nil {
		err = k.Record(ctx, []filllock.Pair{pair}, err)
	}
	if deleted {
		k.Invalidated(key)
	} else {
		k.store.Forget(key)
	}
	return deleted, value.Wrap(ctx, "delete", err)
}

// invalidate invalidates keys by do, in batches, on all nodes at the same time.
//
// Delete, Set and Expire supersede the fills of this process after the command, also if it failed.
// Before the command, a later caller could join a fill that begins between the two and reads the
// old value. And a command that failed may have been executed. See TestDelete_WithoutRedis.
func (k *Keys) invalidate(ctx context.Context, op string, keys []string,
	do func(ctx context.Context, pairs []filllock.Pair) error) error {
	if err := k.open(); err != nil || len(keys) == 0 {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	values := make([]string, len(keys))
	for i, key := range keys {
		values[i] = k.store.Key(key)
	}
	defer k.Invalidated(keys...)
	groups := client.ByNode(k.client, values, func(key string) string { return key })
	errs := foreign.Each(len(groups), func(i int) error { return value.Wrap(ctx, op, onNode(ctx, groups[i], do)) })
	if err := ctx.Err(); err != nil && slices.Contains(errs, err) {
		return err
	}
	return errors.Join(errs...)
}

// onNode is invalidate for the keys of one node. A node that does not answer a batch gets no other
// one: a dead server costs one RedisTimeout, however many keys there are. The first batch is sent
// even while the breaker is open: the server may have come back, and an invalidation that is not
// tried is lost.
func onNode(ctx context.Context, values []string, do func(ctx context.Context, pairs []filllock.Pair) error) error {
	var errs []error
	for values := range slices.Chunk(values, client.Batch) {
		pairs := make([]filllock.Pair, len(values))
		for i, value := range values {
			pairs[i] = filllock.PairOf(value)
		}
		err := do(ctx, pairs)
		if errs = append(errs, err); client.Unreachable(err) {
			break
		}
	}
	if len(errs) == 1 {
		return errs[0]
	}
	return errors.Join(errs...)
}

func (k *Keys) open() error {
	select {
	case <-k.closing:
		return flight.ErrClosed
	default:
		return nil
	}
}

// delete removes values and their locks, in a pipeline.
//
// Set is MULTI and Delete is DEL, although there are scripts. Both must work for a user without the
// right to run scripts. See TestRefused_MissingRight.
//
// Delete sends a PTTL before its DEL. Its reply says whether a load was in flight, whose waiters
// have to be woken. The DEL of value and lock stays one step. After a try whose replies were lost the next one finds
// no locks, so waiters of all keys are woken. See TestWake_WhateverEndsTheLoad, TestDelete_LostReply.
func (k *Keys) delete(ctx context.Context, pairs []filllock.Pair) error {
	if k.client.Local != nil {
		filllock.Delete(k.client.Local, pairs)
		return nil
	}
	type reply struct {
		superseded []string // locks
		refused    bool     // the records
	}
	records := k.log.OneServer() // in the same pipeline
	what := client.Command{Op: "delete", Key: pairs[0].Value, Within: k.client.Timeout, Again: client.Always}
	answer := client.DoTries(ctx, k.client, what, func(ctx context.Context) (r reply, err error) {
		locks := make([]*redis.DurationCmd, len(pairs))
		deletes := 0 // commands
		cmds, err := k.client.Redis.Pipelined(ctx, func(p redis.Pipeliner) error {
			for i, pair := range pairs {
				locks[i] = redis.NewDurationCmd(ctx, time.Millisecond, "pttl", pair.Lock) // only to know whom to wake
				_ = p.Process(ctx, client.Once{Cmder: locks[i]})
				p.Del(ctx, pair.Value, pair.Lock)
			}
			if deletes = p.Len(); records {
				k.log.Add(ctx, p, valuesOf(pairs))
			}
			return nil
		})
		for i, lock := range locks {
			if lock.Val() > 0 {
				r.superseded = append(r.superseded, pairs[i].Lock)
			}
		}
		r.refused = records && recordRefused(cmds[:deletes], err)
		return r, err
	})
	r := answer.Value
	if answer.Lost && answer.Err == nil {
		r.superseded = nil
		for _, pair := range pairs {
			r.superseded = append(r.superseded, pair.Lock)
		}
	}
	if len(r.superseded) > 0 {
		k.Wake(ctx, r.superseded...)
	}
	return k.record(ctx, pairs, recorded{sent: records, refused: r.refused}, answer.Err)
}

// expire makes values stale.
//
// Expire sends EVAL, with the text of the script each time. A pipeline cannot fall back from
// EVALSHA: after a SCRIPT FLUSH some of the keys would stay fresh. See TestServer_ForgetsScripts.
func (k *Keys) expire(ctx context.Context, pairs []filllock.Pair) error {
	return k.Record(ctx, pairs, filllock.Expire(ctx, k.client, pairs))
}

// Invalidated is called when the command has returned: a later caller then joins no fill that began
// before it, and gets no value that was in memory before it.
func (k *Keys) Invalidated(keys ...string) { k.invalidated(keys, false) }

// invalidated tells a fill, if the command was a Set, that it may find a value.
func (k *Keys) invalidated(keys []string, set bool) {
	for _, key := range keys {
		k.fills.Supersede(key, set)
		k.store.Forget(key)
	}
}

// Wake wakes the waiters of loads that have been superseded.
func (k *Keys) Wake(ctx context.Context, locks ...string) {
	k.fills.Go(func() { client.Wake(client.Detach(ctx), k.client, locks) })
}

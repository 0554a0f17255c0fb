package revoke

import (
	"cmp"
	"context"
	"slices"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/client"
	"github.com/singlefill/singlefill/internal/filllock"
)

// recorded says what is known of the records of an invalidation when it has been answered.
type recorded struct {
	sent    bool // in the pipeline of the invalidation
	refused bool // the server has executed the invalidation, and refused them
}

// recordRefused reports whether the server has executed all of the commands that invalidate, and
// has refused one of those behind them. err is the error of the pipeline. Commands that the server
// refuses for the same reason have equal errors, so err alone does not tell which of them it is of.
func recordRefused(invalidating []redis.Cmder, err error) bool {
	return err != nil && !client.Unreachable(err) &&
		!slices.ContainsFunc(invalidating, func(cmd redis.Cmder) bool { return cmd.Err() != nil })
}

// Record tells the memory of other processes that keys have been invalidated by a command that was answered with
// err. It returns err, or why they cannot be told.
func (k *Keys) Record(ctx context.Context, pairs []filllock.Pair, err error) error {
	return k.record(ctx, pairs, recorded{}, err)
}

// Replaced makes memory forget the values that loads have replaced, here and in other processes, though they were
// fresh. err is why it is not known that they have; nil: they have. It returns err, or why others cannot be told.
func (k *Keys) Replaced(ctx context.Context, keys []string, err error) (failed error) {
	for keys := range slices.Chunk(keys, client.Batch) {
		pairs := make([]filllock.Pair, len(keys))
		for i, key := range keys {
			pairs[i] = filllock.PairOf(k.store.Key(key))
		}
		failed = cmp.Or(failed, k.Record(ctx, pairs, err))
		for _, key := range keys {
			k.store.Forget(key)
		}
	}
	return failed
}

// record tells the memory of other processes that keys have been invalidated, by records in the log.
// The invalidation has been answered with err. It returns err, or why they cannot be told.
func (k *Keys) record(ctx context.Context, pairs []filllock.Pair, r recorded, err error) error {
	switch {
	case k.client.Local != nil: // there is no other process
		return err
	case r.refused:
		err = k.log.Reset(ctx)
	case r.sent:
	case err == nil:
		if err = k.log.Append(ctx, valuesOf(pairs)); err != nil && ctx.Err() != nil {
			return k.recordLater(ctx, pairs, err)
		}
	case client.Unreachable(err): // it may have been executed, and err says that it may not have been
		return k.recordLater(ctx, pairs, err)
	}
	k.log.WakeOthers(client.Detach(ctx))
	return err
}

// recordLater tries to append the records of a call that fails anyway, with err.
func (k *Keys) recordLater(ctx context.Context, pairs []filllock.Pair, err error) error {
	ctx = client.Detach(ctx)
	k.fills.Go(func() {
		_ = k.log.Append(ctx, valuesOf(pairs)) // failures are traced
		k.log.WakeOthers(ctx)
	})
	return err
}

func valuesOf(pairs []filllock.Pair) []string {
	values := make([]string, len(pairs))
	for i, pair := range pairs {
		values[i] = pair.Value
	}
	return values
}

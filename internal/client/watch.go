package client

import (
	"context"
	"errors"
	"slices"

	"github.com/redis/go-redis/v9"
)

// A WatchFunc decides what to write, nil if nothing, and the command's answer.
type WatchFunc func(ctx context.Context, tx *redis.Tx) (write func(p redis.Pipeliner), done bool, err error)

// Watch repeats a transaction until no other client interferes, or ctx ends.
func Watch(ctx context.Context, rdb redis.UniversalClient, keys []string, judge WatchFunc) (done bool, err error) {
	for {
		err = rdb.Watch(ctx, func(tx *redis.Tx) error {
			var write func(p redis.Pipeliner)
			write, done, err = judge(ctx, tx)
			if err != nil || write == nil {
				return err
			}
			if err := ctx.Err(); err != nil { // the caller has left: by default go-redis would not notice
				return err
			}
			return Transaction(ctx, tx, write)
		}, keys...)
		if !errors.Is(err, redis.TxFailedErr) {
			return done && err == nil, err
		}
	}
}

// Transaction sends what write queues between MULTI and EXEC, through a client or a *redis.Tx. When
// the server refuses a command, it discards the transaction; the error is then that refusal.
func Transaction(ctx context.Context, by interface {
	TxPipelined(context.Context, func(redis.Pipeliner) error) ([]redis.Cmder, error)
}, write func(p redis.Pipeliner)) error {
	cmds, err := by.TxPipelined(ctx, func(p redis.Pipeliner) error { write(p); return nil })
	if redis.IsExecAbortError(err) {
		for _, cmd := range cmds {
			if why := cmd.Err(); why != nil && !redis.IsExecAbortError(why) {
				return why
			}
		}
	}
	return err
}

// Pipelined sends commands in one pipeline. If a hook of the user's client has refused the pipeline, each of them gets
// that error.
func Pipelined(ctx context.Context, rdb redis.UniversalClient, queue func(p redis.Pipeliner)) ([]redis.Cmder, error) {
	cmds, err := rdb.Pipelined(ctx, func(p redis.Pipeliner) error { queue(p); return nil })
	if err != nil && !slices.ContainsFunc(cmds, func(cmd redis.Cmder) bool { return cmd.Err() != nil }) {
		for _, cmd := range cmds {
			cmd.SetErr(err)
		}
	}
	return cmds, err
}

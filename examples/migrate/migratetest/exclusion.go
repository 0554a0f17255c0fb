package migratetest

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill/internal/redistest"
)

// A Do runs fn while this process holds a lock.
type Do func(ctx context.Context, rdb redis.UniversalClient, fn func(context.Context) error) error

// Exclusion checks the rules of a rollout of locks: which kinds of process exclude each other.
func Exclusion(t *testing.T, before, after, both Do) {
	kinds := map[string]Do{"before": before, "after": after, "both": both}
	for holder, hold := range kinds {
		for other, try := range kinds {
			t.Run(holder+" and "+other, func(t *testing.T) {
				t.Parallel()
				if holder == other || holder == "both" || other == "both" {
					exclude(t, hold, try)
				} else {
					runBeside(t, hold, try)
				}
			})
		}
	}
}

// exclude fails the test if try runs before hold has returned.
func exclude(t *testing.T, hold, try Do) {
	s, ctx := redistest.Start(t), Context(t)
	rdb := s.Client(t)
	asked := count(rdb)
	var over atomic.Bool
	tried := make(chan error, 1)
	redistest.Must(t, hold(ctx, s.Client(t), func(context.Context) error {
		go func() {
			tried <- try(ctx, rdb, func(context.Context) error {
				if !over.Load() {
					t.Error("it runs beside the holder")
				}
				return nil
			})
		}()
		// Both asks for two locks, and may get the first.
		redistest.Await(t, "a refusal", func() bool { return asked("") >= 2 })
		over.Store(true)
		return nil
	}))
	redistest.Must(t, <-tried)
}

// runBeside fails the test unless try runs while hold does.
func runBeside(t *testing.T, hold, try Do) {
	s, ctx := redistest.Start(t), Context(t)
	ran := false
	redistest.Must(t, hold(ctx, s.Client(t), func(context.Context) error {
		return try(ctx, s.Client(t), func(context.Context) error {
			ran = true
			return nil
		})
	}))
	if !ran {
		t.Error("it has not run beside the holder")
	}
}

// UntilAnswered returns a context that is cancelled when rdb has had the answer to a command.
func UntilAnswered(t *testing.T, rdb *redis.Client) context.Context {
	ctx, cancel := context.WithCancel(Context(t))
	t.Cleanup(cancel)
	onAnswer(rdb, func(string) { cancel() })
	return ctx
}

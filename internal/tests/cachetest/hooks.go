package cachetest

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// A Hook is called in place of each command; next carries the command out. Pipelines pass.
type Hook func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error

func (h Hook) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h Hook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := h(ctx, cmd, next)
		if err != nil {
			cmd.SetErr(err)
		}
		return err
	}
}

func (h Hook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// Before is a hook that is called before each command, which fails if do does.
func Before(do func(cmd redis.Cmder) error) Hook {
	return func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
		if err := do(cmd); err != nil {
			return err
		}
		return next(ctx, cmd)
	}
}

// After is a hook that is called after each command that has succeeded.
func After(do func(cmd redis.Cmder) error) Hook {
	return func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
		if err := next(ctx, cmd); err != nil {
			return err
		}
		return do(cmd)
	}
}

// Slow is a hook that delays each command.
func Slow(d time.Duration) Hook {
	return Before(func(redis.Cmder) error { time.Sleep(d); return nil })
}

// An Outage is a hook that keeps the replies of commands from their callers while it is on.
// Commands without a deadline are the test's, and pass.
type Outage struct {
	On      atomic.Bool
	Keeps   func(cmd []string) bool // the replies of these commands; nil: of all
	Arrives func(cmd []string) bool // the server carries out these commands; nil: none
}

func (o *Outage) Hook() Hook {
	return func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
		_, bounded := ctx.Deadline()
		if !bounded || !o.On.Load() || o.Keeps != nil && !o.Keeps(Args(cmd)) {
			return next(ctx, cmd)
		}
		if o.Arrives != nil && o.Arrives(Args(cmd)) {
			_ = next(ctx, cmd)
		}
		<-ctx.Done()
		return ctx.Err()
	}
}

func Args(cmd redis.Cmder) (args []string) {
	for _, a := range cmd.Args() {
		args = append(args, fmt.Sprint(a))
	}
	return args
}

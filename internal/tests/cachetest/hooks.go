package cachetest

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
)

// Before is a hook that is called before each command, which fails if do does.
func Before(do func(cmd redis.Cmder) error) redistest.Commands {
	return func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
		if err := do(cmd); err != nil {
			return err
		}
		return next(ctx, cmd)
	}
}

// After is a hook that is called after each command that has succeeded.
func After(do func(cmd redis.Cmder) error) redistest.Commands {
	return func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
		if err := next(ctx, cmd); err != nil {
			return err
		}
		return do(cmd)
	}
}

// Slow is a hook that delays each command.
func Slow(d time.Duration) redistest.Commands {
	return Before(func(redis.Cmder) error { time.Sleep(d); return nil })
}

// An Outage is a hook that keeps the replies of commands from their callers while it is on.
// Commands without a deadline are the test's, and pass.
type Outage struct {
	On      atomic.Bool
	Keeps   func(cmd []string) bool // the replies of these commands; nil: of all
	Arrives func(cmd []string) bool // the server carries out these commands; nil: none
}

func (o *Outage) Hook() redistest.Commands {
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

package redistest

import (
	"context"

	"github.com/redis/go-redis/v9"
)

// Commands is a hook that is called in place of each command; next carries it out. Pipelines pass.
type Commands func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error

func (h Commands) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h Commands) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := h(ctx, cmd, next)
		if err != nil {
			cmd.SetErr(err)
		}
		return err
	}
}

func (h Commands) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// Pipelines is a hook that is called in place of each pipeline and transaction; next carries it
// out. Commands alone pass.
type Pipelines func(ctx context.Context, cmds []redis.Cmder, next redis.ProcessPipelineHook) error

func (h Pipelines) DialHook(next redis.DialHook) redis.DialHook          { return next }
func (h Pipelines) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }

func (h Pipelines) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error { return h(ctx, cmds, next) }
}

// Trips is a hook that is called before each round trip, with one command or all commands of a
// pipeline. If it fails, they are not sent.
type Trips func(cmds []redis.Cmder) error

func (h Trips) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h Trips) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if err := h([]redis.Cmder{cmd}); err != nil {
			return err
		}
		return next(ctx, cmd)
	}
}

func (h Trips) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if err := h(cmds); err != nil {
			return err
		}
		return next(ctx, cmds)
	}
}

// Size returns how many bytes of values commands send.
func Size(cmds []redis.Cmder) (bytes int) {
	for _, cmd := range cmds {
		for _, arg := range cmd.Args() {
			if data, ok := arg.([]byte); ok {
				bytes += len(data)
			}
		}
	}
	return bytes
}

// A ClientAndPipeline is a pipeline with the methods of a client: it queues commands until Exec, and answers none.
type ClientAndPipeline struct {
	redis.UniversalClient
	pipeline
}

type pipeline struct{ redis.Pipeliner } // so deep that the methods of the client come first

var _ redis.Pipeliner = ClientAndPipeline{}

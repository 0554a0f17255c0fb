package main

import (
	"context"

	"github.com/redis/go-redis/v9"
)

// A counter counts the commands that a contender sends, alone or in a pipeline.
type counter struct{ *worker }

// ofConnections are commands that do not count: those of the client itself, and the PING of the
// worker.
var ofConnections = map[string]bool{"auth": true, "client": true, "hello": true, "ping": true, "select": true}

func (c counter) count(commands ...redis.Cmder) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, cmd := range commands {
		if !ofConnections[cmd.Name()] {
			c.report.Commands[c.phase]++
		}
	}
}

func (c counter) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		c.count(cmd)
		return next(ctx, cmd)
	}
}

func (c counter) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		c.count(cmds...)
		return next(ctx, cmds)
	}
}

func (c counter) DialHook(next redis.DialHook) redis.DialHook { return next }

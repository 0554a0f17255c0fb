package migratetest

import (
	"context"
	"errors"
	"sync"

	"github.com/redis/go-redis/v9"
)

// count counts the commands of rdb that the server answers, apart from refusals, by name. Under the
// name "" it counts all of them.
func count(rdb *redis.Client) func(name string) int64 {
	h := new(counter)
	rdb.AddHook(h)
	return func(name string) int64 {
		h.mu.Lock()
		defer h.mu.Unlock()
		return h.calls[name]
	}
}

type counter struct {
	then  func() // called after each answer, or nil
	mu    sync.Mutex
	calls map[string]int64 // protected by mu
}

func (h *counter) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if cmd.Err() == nil || errors.Is(cmd.Err(), redis.Nil) {
			h.answered(cmd.Name())
		}
		return err
	}
}

func (h *counter) answered(name string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.calls == nil {
		h.calls = make(map[string]int64)
	}
	h.calls[name]++
	h.calls[""]++
	if h.then != nil {
		h.then()
	}
}

func (h *counter) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h *counter) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

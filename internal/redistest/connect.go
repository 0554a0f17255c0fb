package redistest

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/redis/go-redis/v9"
)

// Unconnected returns a client of s whose connections are not ready until connect is called. connect
// returns when the client has done what it was given before, and fails the test if that was nothing.
func (s *Server) Unconnected(t testing.TB, mutate func(*redis.Options)) (rdb *redis.Client, connect func()) {
	ready := make(chan struct{})
	rdb = s.Client(t, mutate, func(o *redis.Options) {
		o.OnConnect = func(context.Context, *redis.Conn) error { <-ready; return nil }
	})
	var begun, done atomic.Int64 // what the client is given
	rdb.AddHook(Commands(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
		begun.Add(1)
		defer done.Add(1)
		return next(ctx, cmd)
	}))
	rdb.AddHook(Pipelines(func(ctx context.Context, cmds []redis.Cmder, next redis.ProcessPipelineHook) error {
		begun.Add(1)
		defer done.Add(1)
		return next(ctx, cmds)
	}))
	return rdb, func() {
		t.Helper()
		before := begun.Load()
		close(ready)
		Await(t, "the client has done what it was given", func() bool { return before > 0 && done.Load() >= before })
	}
}

package redistest

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/redis/go-redis/v9"
)

// Unconnected returns a client of s whose connections are not ready until connect is called:
// because s is frozen, or because of the client's OnConnect. connect returns when the client has
// done what it was given before, and fails the test if that was nothing.
func (s *Server) Unconnected(t testing.TB, frozen bool, mutate ...func(*redis.Options)) (rdb *redis.Client, connect func()) {
	ready := make(chan struct{})
	if !frozen {
		mutate = append(mutate, func(o *redis.Options) {
			o.OnConnect = func(context.Context, *redis.Conn) error { <-ready; return nil }
		})
	}
	rdb = s.Client(t, mutate...)
	var g given
	rdb.AddHook(&g)
	if frozen {
		s.Freeze()
	}
	return rdb, func() {
		t.Helper()
		before := g.begun.Load()
		close(ready)
		if frozen {
			s.Thaw()
		}
		Await(t, "the client has done what it was given", func() bool { return before > 0 && g.done.Load() >= before })
	}
}

// given counts the commands that a client is given.
type given struct{ begun, done atomic.Int64 }

func (g *given) DialHook(next redis.DialHook) redis.DialHook { return next }

func (g *given) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		g.begun.Add(1)
		defer g.done.Add(1)
		return next(ctx, cmd)
	}
}

func (g *given) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		g.begun.Add(1)
		defer g.done.Add(1)
		return next(ctx, cmds)
	}
}

package singlefill_test

import (
	"context"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// A commandTracer is a hook that notes the names of commands, as a tracing library does.
type commandTracer struct {
	mu    sync.Mutex
	names []string // protected by mu
}

func (h *commandTracer) note(name string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.names = append(h.names, name)
}

func (h *commandTracer) DialHook(next redis.DialHook) redis.DialHook {
	return func(ctx context.Context, network, addr string) (net.Conn, error) { return next(ctx, network, addr) }
}

func (h *commandTracer) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error { h.note(cmd.Name()); return next(ctx, cmd) }
}

func (h *commandTracer) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		for _, cmd := range cmds {
			h.note(cmd.Name())
		}
		return next(ctx, cmds)
	}
}

// A hook of the caller's client sees every command of the cache, even if it was added after New.
func TestHooks_SeeEveryCommand(t *testing.T) {
	t.Parallel()
	for name, bounded := range map[string]bool{"default client": false, "client with ContextTimeoutEnabled": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := redistest.Start(t)
			rdb := s.Client(t, func(o *redis.Options) { o.ContextTimeoutEnabled = bounded })
			c, err := singlefill.New[string](rdb, redistest.Namespace(t), time.Hour, cachetest.PatientOptions[string](nil))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = c.Close() })
			var h commandTracer
			rdb.AddHook(&h)
			v, err := c.GetOrLoad(t.Context(), "k", cachetest.Gives("v"))
			cachetest.WantValue(t, v, err, "v")
			if err := c.Set(t.Context(), "k", "w"); err != nil {
				t.Fatal(err)
			}
			if err := c.Delete(t.Context(), "k"); err != nil {
				t.Fatal(err)
			}
			h.mu.Lock()
			defer h.mu.Unlock()
			got := slices.DeleteFunc(slices.Clone(h.names), func(name string) bool { return name == "hello" }) // of connections
			want := []string{"get", "evalsha", "eval", "evalsha", "eval", "multi", "set", "del", "exec", "pttl", "del"}
			if !slices.Equal(got, want) {
				t.Errorf("the hook saw %v, want %v", got, want)
			}
		})
	}
}

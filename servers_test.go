package singlefill_test

import (
	"context"
	"net"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

// A hit may be read from a replica; nothing that decides is. A replica that lags behind costs a command, not a load.
//
//fault:replica
func TestHitsMayComeFromAReplicaButDecisionsDoNot(t *testing.T) {
	t.Parallel()
	master := redistest.Start(t)
	replica := redistest.StartReplica(t, master)
	rdb := redis.NewClusterClient(&redis.ClusterOptions{
		RouteRandomly: true,
		ClusterSlots: func(context.Context) ([]redis.ClusterSlot, error) {
			return []redis.ClusterSlot{{End: 16383, Nodes: []redis.ClusterNode{{Addr: master.Addr}, {Addr: replica.Addr}}}}, nil
		},
	})
	t.Cleanup(func() { _ = rdb.Close() })
	namespace := redistest.Namespace(t)
	c := newCacheIn(t, rdb, namespace, patient[string](nil))

	get := func() {
		t.Helper()
		v, err := c.GetOrLoad(t.Context(), "k", gives("v"))
		wantValue(t, v, err, "v")
	}
	get()
	onReplica := func() bool { return replica.Admin().Exists(context.Background(), namespace+":{k}").Val() == 1 }
	redistest.Await(t, "the replica has the value", onReplica)
	replica.ResetCalls()
	redistest.Await(t, "the replica has answered hits", func() bool { get(); return replica.Calls("get") > 10 })
	if n := replica.Calls("evalsha") + replica.Calls("eval"); n != 0 {
		t.Errorf("the replica was sent %d scripts", n)
	}

	// It loses the key, as if it lagged behind.
	ctx := context.Background()
	if err := replica.Admin().ConfigSet(ctx, "replica-read-only", "no").Err(); err != nil {
		t.Fatal(err)
	}
	if n, err := replica.Admin().Del(ctx, namespace+":{k}").Result(); n != 1 || err != nil {
		t.Fatalf("DEL on the replica: %d, %v", n, err)
	}
	misses := c.Stats().Misses
	redistest.Await(t, "the replica has answered misses", func() bool { get(); return c.Stats().Misses > misses+10 })
	if s := c.Stats(); s.Loads != 1 || s.RedisErrors != 0 {
		t.Errorf("%+v, want one load and no error", s)
	}
}

// A tracer counts as a tracing library's hook would.
type tracer struct{ commands atomic.Pointer[[]string] }

func (h *tracer) note(name string) {
	for {
		old := h.commands.Load()
		var all []string
		if old != nil {
			all = slices.Clone(*old)
		}
		all = append(all, name)
		if h.commands.CompareAndSwap(old, &all) {
			return
		}
	}
}

func (h *tracer) DialHook(next redis.DialHook) redis.DialHook {
	return func(ctx context.Context, network, addr string) (net.Conn, error) { return next(ctx, network, addr) }
}

func (h *tracer) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error { h.note(cmd.Name()); return next(ctx, cmd) }
}

func (h *tracer) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		for _, cmd := range cmds {
			h.note(cmd.Name())
		}
		return next(ctx, cmds)
	}
}

// Whatever traces or counts the commands of the user's client sees those of the cache, also when it was added later.
func TestHooksOfTheClientSeeEveryCommand(t *testing.T) {
	t.Parallel()
	for name, bounded := range map[string]bool{"default client": false, "client that minds deadlines": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := redistest.Start(t)
			rdb := s.Client(t, func(o *redis.Options) { o.ContextTimeoutEnabled = bounded })
			c, err := singlefill.New[string](rdb, redistest.Namespace(t), time.Hour, patient[string](nil))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = c.Close() })
			var h tracer
			rdb.AddHook(&h)
			v, err := c.GetOrLoad(t.Context(), "k", gives("v"))
			wantValue(t, v, err, "v")
			if err := c.Set(t.Context(), "k", "w"); err != nil {
				t.Fatal(err)
			}
			if err := c.Delete(t.Context(), "k"); err != nil {
				t.Fatal(err)
			}
			got := slices.DeleteFunc(*h.commands.Load(), func(name string) bool { return name == "hello" }) // of connections
			want := []string{"get", "evalsha", "eval", "evalsha", "eval", "multi", "set", "del", "exec", "del"}
			if !slices.Equal(got, want) {
				t.Errorf("the hook saw %v, want %v", got, want)
			}
		})
	}
}

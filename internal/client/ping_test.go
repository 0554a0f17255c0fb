package client

import (
	"context"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	miniserver "github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
)

// A lostConn loses what is sent since the network was a black hole, for ever.
type lostConn struct {
	net.Conn
	hole *atomic.Int64 // how often it began or ended
	born int64
}

func (c *lostConn) Write(b []byte) (int, error) {
	if now := c.hole.Load(); now%2 == 1 || now != c.born {
		return len(b), nil
	}
	return c.Conn.Write(b)
}

// dialer dials a miniredis over connections that a black hole makes useless.
func dialer(m *miniredis.Miniredis, hole *atomic.Int64) func(context.Context, string, string) (net.Conn, error) {
	return func(context.Context, string, string) (net.Conn, error) {
		conn, err := m.Dial()
		return &lostConn{conn, hole, hole.Load()}, err
	}
}

// After a black hole the first ping is answered, although each connection of the pool is dead, and no caller meets one
// of these.
//
//fault:unreachable
func TestPing_DeadConnections(t *testing.T) {
	t.Parallel()
	for _, bounded := range []bool{false, true} {
		runInBubble(t, fmt.Sprint("ContextTimeoutEnabled=", bounded), func(t *testing.T) {
			m, _ := redistest.StartMini(t)
			var hole atomic.Int64
			rdb := redistest.NewMiniClient(t, m, func(o *redis.Options) {
				o.Dialer, o.ContextTimeoutEnabled, o.PoolSize = dialer(m, &hole), bounded, 30
			})
			t.Cleanup(func() { time.Sleep(time.Minute) }) // the last commands end
			w := watch(t, rdb, timeout)
			var pool []*redis.Conn
			for range 20 {
				pool = append(pool, rdb.Conn())
				redistest.Must(t, pool[len(pool)-1].Ping(t.Context()).Err())
			}
			for _, conn := range pool {
				redistest.Must(t, conn.Close())
			}
			var pipelines sync.WaitGroup
			for range 8 {
				pipelines.Go(func() {
					_, _ = rdb.Pipelined(t.Context(), func(p redis.Pipeliner) error { return p.BLPop(t.Context(), time.Second, "none").Err() })
				})
			}
			pipelines.Wait()
			if idle := rdb.PoolStats().PipelineStats.IdleConns; idle != 8 {
				t.Fatalf("%d connections for pipelines", idle)
			}
			hole.Add(1)
			for begun := time.Now(); time.Since(begun) < 3*timeout; time.Sleep(time.Millisecond) {
				_ = gets["Do"](w, t.Context())
			}
			hole.Add(1)
			if time.Sleep(timeout * 3 / 2); w.Away("k") {
				t.Error("away, although the server answers over new connections")
			}
			for range 30 {
				if err := w.get(t.Context()); err != redis.Nil {
					t.Errorf("GET: %v", err)
				}
				if _, _, err := w.GetMany(t.Context(), nil, []string{"k"}); err != nil {
					t.Errorf("a pipeline: %v", err)
				}
			}
		})
	}
}

// A node of a Cluster that answers PINGs, but serves no keys, is away, until it serves them.
//
//fault:unreachable
func TestCluster_NodeServesNothing(t *testing.T) {
	t.Parallel()
	for _, reply := range []string{
		"CLUSTERDOWN The cluster is down", loading, "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
	} {
		runInBubble(t, reply, func(t *testing.T) {
			m, _ := redistest.StartMini(t)
			var down atomic.Bool
			m.Server().SetPreHook(func(p *miniserver.Peer, cmd string, _ ...string) bool {
				if refuses := down.Load() && cmd != "HELLO" && cmd != "PING"; refuses {
					p.WriteError(reply)
					return true
				}
				return false
			})
			w := watchCluster(t, dialer(m, new(atomic.Int64)))
			if err := w.get(t.Context()); err != redis.Nil {
				t.Fatalf("GET: %v", err)
			}
			down.Store(true)
			begun := time.Now()
			for range 5 {
				_, _, _ = w.Get(t.Context(), nil, "k")
			}
			if took := time.Since(begun); took > timeout {
				t.Errorf("five commands have waited for %v", took)
			}
			for range 50 {
				time.Sleep(timeout / 5)
				if !w.Away("k") {
					t.Fatalf("not away after %v", time.Since(begun))
				}
			}
			down.Store(false)
			if time.Sleep(timeout * 3 / 2); w.Away("k") {
				t.Error("away, although the node serves its keys")
			}
		})
	}
}

package client

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/wake"
)

// A user's client that is closed while it dials the connection for wake-ups leaves that connection open. It is
// closed nevertheless: at once if there is no waiter any more, otherwise at the next command.
func TestListener_ClosedWhileDialling(t *testing.T) {
	t.Parallel()
	for _, waits := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			m, _ := redistest.StartMini(t)
			dialled, dials := make(chan struct{}), atomic.Int64{}
			rdb := redistest.NewMiniClient(t, m, func(o *redis.Options) {
				o.OnConnect = func(context.Context, *redis.Conn) error {
					if dials.Add(1) == 2 {
						<-dialled
					}
					return nil
				}
			})
			w := watch(t, rdb, timeout)
			_ = w.get(t.Context()) // over the first connection
			var told atomic.Bool
			ear := w.Listen("k", func(string, bool) { told.Store(true) })
			if !waits {
				ear.Close()
			}
			synctest.Wait()
			_ = rdb.Close()
			close(dialled)
			synctest.Wait()
			if n := dials.Load(); n != 2 || told.Load() != waits {
				t.Fatalf("%d connections; the waiter is notified: %t, want %t", n, told.Load(), waits)
			}
			if waits {
				_ = w.get(t.Context())
				synctest.Wait()
			}
			if n := m.CurrentConnectionCount(); n != 0 {
				t.Errorf("with a waiter %t: %d connections are left", waits, n)
			}
			ear.Close()
			time.Sleep(time.Minute)
		})
	}
}

// In a Cluster a process listens at the node of each key, over one connection to each node.
func TestListener_Cluster(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t)
	rdb := cluster.Client(t)
	w := watch(t, rdb, 3*time.Second)
	if err := w.get(t.Context()); err != redis.Nil { // so that the client knows the nodes
		t.Fatal(err)
	}
	const n = 60
	var keys [n]string
	var ears [n]*wake.Subscription
	var messages [n]atomic.Int64
	for i := range n {
		keys[i] = fmt.Sprintf("ns:{k%d}:lock", i)
		ears[i] = w.Listen(keys[i], func(_ string, message bool) {
			if message {
				messages[i].Add(1)
			}
		})
	}
	redistest.Await(t, "all are subscribed", func() bool {
		return !slices.ContainsFunc(ears[:], func(e *wake.Subscription) bool { return !e.Complete(time.Now()) })
	})
	listeners := func(node *redistest.Server) int {
		list, err := node.Admin().Do(t.Context(), "client", "list", "type", "pubsub").Text()
		redistest.Must(t, err)
		return strings.Count(list, "id=")
	}
	for _, node := range cluster.Nodes {
		if n := listeners(node); n != 1 {
			t.Errorf("%d connections listen at %s, want 1", n, node.Addr)
		}
	}
	for _, group := range ByNode(w.Client, keys[:], func(key string) string { return key }) {
		Wake(t.Context(), w.Client, group)
	}
	redistest.Await(t, "each has a message", func() bool {
		for i := range n {
			if messages[i].Load() == 0 {
				return false
			}
		}
		return true
	})
	for i := range n {
		if got := messages[i].Load(); got != 1 {
			t.Errorf("%s has %d messages, want 1", keys[i], got)
		}
		ears[i].Close()
	}
	w.StopListening()
	for _, node := range cluster.Nodes {
		redistest.Await(t, "no connection listens", func() bool { return listeners(node) == 0 })
	}
}

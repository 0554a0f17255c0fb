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
	w := watch(t, cluster.Client(t), 3*time.Second)
	if err := w.get(t.Context()); err != redis.Nil { // so that the client knows the nodes
		t.Fatal(err)
	}
	const n = 60
	var keys []string
	var ears []*wake.Subscription
	heard := make(chan string, 2*n)
	for i := range n {
		key := fmt.Sprintf("ns:{k%02d}:lock", i)
		keys = append(keys, key)
		ears = append(ears, w.Listen(key, func(_ string, message bool) {
			if message {
				heard <- key
			}
		}))
	}
	redistest.Await(t, "all are subscribed", func() bool {
		return !slices.ContainsFunc(ears, func(e *wake.Subscription) bool { return !e.Complete(time.Now()) })
	})
	listeners := func() (at []int) {
		for _, node := range cluster.Nodes {
			list, err := node.Admin().Do(t.Context(), "client", "list", "type", "pubsub").Text()
			redistest.Must(t, err)
			at = append(at, strings.Count(list, "id="))
		}
		return at
	}
	if at, want := listeners(), slices.Repeat([]int{1}, len(cluster.Nodes)); !slices.Equal(at, want) {
		t.Errorf("%v connections listen at the nodes, want %v", at, want)
	}
	for _, group := range ByNode(w.Client, keys, func(key string) string { return key }) {
		Wake(t.Context(), w.Client, group)
	}
	redistest.Await(t, "each has a message", func() bool { return len(heard) >= n })
	var got []string
	for range len(heard) {
		got = append(got, <-heard)
	}
	if slices.Sort(got); !slices.Equal(got, keys) {
		t.Errorf("messages to %q, want one to each of %q", got, keys)
	}
	for _, ear := range ears {
		ear.Close()
	}
	w.StopListening()
	redistest.Await(t, "no connection listens", func() bool { return slices.Max(listeners()) == 0 })
}

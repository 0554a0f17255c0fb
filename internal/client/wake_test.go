package client

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
)

// A user's client that is closed while it dials the connection for wake-ups leaves that connection open. It is
// closed nevertheless: at once if there is no waiter any more, otherwise at the next command.
func TestListener_ClosedWhileDialling(t *testing.T) {
	t.Parallel()
	for _, waits := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			m, _ := redistest.StartMini(t)
			opt := *redistest.NewMiniClient(t, m).Options()
			dialled, dials := make(chan struct{}), atomic.Int64{}
			opt.OnConnect = func(context.Context, *redis.Conn) error {
				if dials.Add(1) == 2 {
					<-dialled
				}
				return nil
			}
			rdb := redis.NewClient(&opt)
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

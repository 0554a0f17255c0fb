package bench

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/wake"
)

// BenchmarkWaiting measures what a process that waits for a load in another one costs the server while nothing happens.
func BenchmarkWaiting(b *testing.B) {
	b.Run("a_waiting_process/polls", func(b *testing.B) { waitingProcesses(b, 1000, 10*time.Second, true) })
	b.Run("a_waiting_process/listens", func(b *testing.B) { waitingProcesses(b, 1000, 10*time.Second, false) })
}

// waitingProcesses has n caches, each with a client of its own, wait for a load that lasts longer than d.
func waitingProcesses(b *testing.B, n int, d time.Duration, mute bool) {
	s := redistest.Start(b)
	namespace := redistest.Namespace(b)
	another := func() *singlefill.Cache[order] {
		rdb := open(b, s.Addr)
		if mute {
			wake.Mute(rdb)
		}
		return must(singlefill.New[order](rdb, namespace, time.Hour, &singlefill.Options[order]{RedisTimeout: 3 * time.Second, LockTTL: 10 * time.Second}))
	}
	loading, over := make(chan struct{}), make(chan struct{})
	var calls sync.WaitGroup
	get := func(c *singlefill.Cache[order], load singlefill.Loader[order]) {
		calls.Go(func() {
			if _, err := c.GetOrLoad(b.Context(), "k", load); err != nil {
				b.Error(err)
			}
			_ = c.Close()
		})
	}
	get(another(), func(context.Context, string) (order, error) { close(loading); <-over; return order{}, nil })
	<-loading
	for range n {
		get(another(), func(context.Context, string) (order, error) { return order{}, fmt.Errorf("a waiter has loaded") })
	}
	time.Sleep(d / 2) // until each waiter has subscribed, or polls as rarely as it will
	cpu, commands, begun := serverTime(b, s), infoOf(b, s, "stats")["total_commands_processed"], time.Now()
	time.Sleep(d)
	waiterSeconds := float64(n) * time.Since(begun).Seconds()
	cpu, commands = serverTime(b, s)-cpu, infoOf(b, s, "stats")["total_commands_processed"]-commands
	close(over)
	calls.Wait()
	report(b, "singlefill", func(b *testing.B) {
		b.ReportMetric(cpu*1e6/waiterSeconds, "server-µs/s")
		b.ReportMetric(commands/waiterSeconds, "commands/s")
	})
}

// serverTime returns the seconds that the server's main thread has worked.
func serverTime(b *testing.B, s *redistest.Server) float64 {
	cpu := infoOf(b, s, "cpu")
	return cpu["used_cpu_sys_main_thread"] + cpu["used_cpu_user_main_thread"]
}

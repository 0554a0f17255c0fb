package lock_test

import (
	"context"
	"fmt"
	"regexp"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/locktest"
)

const crowdRole = "crowd at a lock"

func init() { redistest.Role(crowdRole, runCrowd) }

// runCrowd is the role. Its arguments are the address of Redis and the kind of the lock, which is also its name. For
// each number that the process reads, as many goroutines acquire and release the lock, through a client and a Locker
// with the defaults. The process says that it waits, and in the end how many of them failed.
func runCrowd(p *redistest.Child) {
	rdb := redis.NewClient(&redis.Options{Addr: p.Args[0]})
	k := locktest.KindOf(p.Args[1])
	l, err := k.Open(rdb, k.Name, nil)
	must(err)
	must(rdb.Ping(context.Background()).Err())
	p.Say("ready")
	for line, ok := p.Next(); ok; line, ok = p.Next() {
		n, err := strconv.Atoi(line)
		must(err)
		var mu sync.Mutex
		var wg sync.WaitGroup
		var failed int
		var first error
		for range n {
			wg.Go(func() {
				lease, err := l.Acquire(context.Background())
				if err == nil {
					err = lease.Release(context.Background())
				}
				mu.Lock()
				defer mu.Unlock()
				if err != nil {
					failed++
					first = err
				}
			})
		}
		waits := time.NewTicker(5 * time.Second)
		go func() {
			for range waits.C {
				p.Say("waits")
			}
		}()
		wg.Wait()
		waits.Stop()
		p.Say("%d failed: %v", failed, first)
	}
}

// BenchmarkAcquire_Crowd measures what a crowd of waiters costs the server: while it arrives, while the lock is held,
// and for each hand-over after that.
func BenchmarkAcquire_Crowd(b *testing.B) {
	for _, k := range locktest.Kinds {
		for _, processes := range []int{1, 8} {
			for _, waiters := range []int{10, 1000, 5000} {
				b.Run(fmt.Sprintf("%s/processes=%d/waiters=%d", k.Name, processes, waiters), func(b *testing.B) {
					for b.Loop() {
						measureCrowd(b, k, processes, waiters)
					}
				})
			}
		}
	}
}

func measureCrowd(b *testing.B, k locktest.Kind, processes, waiters int) {
	s := redistest.Start(b)
	leases := k.Fill(b, k.Locker(b, s.Client(b), k.Name, locktest.Patient, locktest.Long))
	var crowd []*redistest.Process
	for range processes {
		crowd = append(crowd, redistest.Spawn(b, crowdRole, s.Addr, k.Name))
	}
	for _, p := range crowd {
		p.Expect("ready")
	}
	s.ResetCalls()
	for i, p := range crowd {
		p.Send(fmt.Sprint(waiters*(i+1)/processes - waiters*i/processes))
	}
	const settle, held = 3 * time.Second, 5 * time.Second
	time.Sleep(settle)
	arrival := scripts(b, s)
	s.ResetCalls()
	time.Sleep(held)
	standing := scripts(b, s)
	s.ResetCalls()
	begun := time.Now()
	for _, lease := range leases {
		locktest.Release(b, lease)
	}
	for _, p := range crowd {
		said := p.Line()
		for said == "waits" {
			said = p.Line()
		}
		if said != "0 failed: <nil>" {
			b.Errorf("%s", said)
		}
	}
	took := time.Since(begun)
	handOver := scripts(b, s)
	n := float64(waiters)
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(arrival.micros/n, "arrival-µs/waiter")
	b.ReportMetric(arrival.calls, "arrival-scripts")
	b.ReportMetric(standing.calls/held.Seconds(), "held-scripts/s")
	b.ReportMetric(handOver.micros/n, "server-µs/hand-over")
	b.ReportMetric(handOver.calls/n, "scripts/hand-over")
	b.ReportMetric(max(arrival.p99, handOver.p99), "p99-µs")
	b.ReportMetric(float64(took.Microseconds())/n, "µs/hand-over")
}

// A scriptStat is what a server says of the scripts since the statistics were reset.
type scriptStat struct{ calls, micros, p99 float64 }

func scripts(t testing.TB, s *redistest.Server) (stat scriptStat) {
	info := s.Admin().Info(t.Context(), "commandstats").Val() + s.Admin().Info(t.Context(), "latencystats").Val()
	for pattern, number := range map[string]*float64{
		`cmdstat_evalsha:calls=(\d+)`: &stat.calls, `cmdstat_evalsha:calls=\d+,usec=(\d+)`: &stat.micros,
		`usec_evalsha:.*p99=([\d.]+)`: &stat.p99,
	} {
		if found := regexp.MustCompile(pattern).FindStringSubmatch(info); found != nil {
			*number, _ = strconv.ParseFloat(found[1], 64)
		}
	}
	return stat
}

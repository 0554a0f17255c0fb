package lock_test

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"
)

// In these tests there are many who want a lock, or the process that has it has little time for it.

const (
	procStormRole = "lock holder in a storm"
	stormTTL      = 2500 * time.Millisecond
	stormTimeout  = 700 * time.Millisecond
	stormRenewals = 4
)

func init() { redistest.Role(procStormRole, runStorm) }

// runStorm holds a lease for a few renewals while the one thread that runs Go code has plenty to do.
func runStorm(p *redistest.Child) {
	runtime.GOMAXPROCS(1)
	stop := make(chan struct{})
	for range 50 {
		go func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
					runtime.Gosched()
				}
			}
		}()
	}
	rdb := redis.NewClient(&redis.Options{Addr: p.Args[0]})
	renewed := make(chan time.Time, 100)
	l, err := procKind(p.Args[1]).open(rdb, p.Args[1], &lock.Options{
		TTL: stormTTL, RedisTimeout: stormTimeout, WaiterTTL: 4 * stormTimeout,
		Trace: &lock.Trace{Renewed: func(context.Context, lock.LeaseInfo) { renewed <- time.Now() }},
	})
	procMust(err)
	lease, err := l.Acquire(context.Background())
	procMust(err)
	last, longest := time.Now(), time.Duration(0)
	for range stormRenewals {
		select {
		case at := <-renewed:
			last, longest = at, max(longest, at.Sub(last))
		case <-lease.Context().Done():
			p.Say("lost")
			return
		}
	}
	p.Say("longest %v", longest.Round(time.Millisecond))
	p.Say("released %s", procVerdict(lease.Release(context.Background())))
	close(stop)
}

// A process with one thread for Go code, and fifty goroutines that want it all the time, renews in time.
//
//fault:busy-process
func TestABusyProcessWithOneProcessorKeepsItsLease(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	var wg sync.WaitGroup
	for _, k := range faultKinds {
		p := redistest.Spawn(t, procStormRole, s.Addr, k.name)
		wg.Go(func() {
			line := p.Line()
			t.Logf("%s: %s between two renewals; TTL is %v", k.name, strings.TrimPrefix(line, "longest "), stormTTL)
			if got := p.Expect("released "); got != "nil" || line == "lost" {
				t.Errorf("%s: %s, Release = %s", k.name, line, got)
			}
		})
	}
	wg.Wait()
	for _, k := range faultKinds {
		k.free(t, s, k.name)
	}
}

// Eight processes with fifty goroutines each.
//
//fault:very-many
func TestEightProcessesOfFiftyGoroutinesLoseNoUpdate(t *testing.T) {
	t.Parallel()
	const processes, goroutines = 8, 50
	f := procFleet{faultKind: procKind("mutex"), t: t, s: redistest.Start(t)}
	all := f.spawn(processes, procPatient, procPatientTTL)
	order := fmt.Sprintf("%d*1", goroutines)
	begun := time.Now()
	for _, p := range all {
		p.Send("contend " + order)
	}
	for _, p := range all {
		p.Expect(order + ": done")
	}
	t.Logf("%d goroutines of %d processes have had it after %v", processes*goroutines, processes,
		time.Since(begun).Round(time.Millisecond))
	if most, n := f.number("most"), f.number("counter"); most != 1 || n != processes*goroutines {
		t.Errorf("%d held it at once, %d updates", most, n)
	}
	if n := f.number("backwards"); n != 0 {
		t.Errorf("%d fences were not larger than the one before", n)
	}
	f.free(t, f.s, f.name)
}

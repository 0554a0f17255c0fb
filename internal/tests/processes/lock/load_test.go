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
	"github.com/singlefill/singlefill/internal/tests/locktest"
	"github.com/singlefill/singlefill/lock"
)

// Under contention of five processes with ten goroutines each, never more than size hold a lock at
// once, and no update is lost.
//
//fault:very-many
func TestAcquire_ContendingProcesses(t *testing.T) {
	eachFleet(t, func(t *testing.T, f fleet) {
		const processes, goroutines, times = 5, 10, 8
		f.contend(processes, goroutines, times)
		if n := f.number("most"); n != f.Size {
			t.Errorf("%d held it at once, want %d", n, f.Size)
		}
		if f.Size == 1 {
			f.wantUpdates(processes * goroutines * times)
		}
	})
}

// Eight processes of fifty goroutines each lose no update.
//
//fault:very-many
func TestAcquire_FiftyGoroutinesEach(t *testing.T) {
	t.Parallel()
	const processes, goroutines = 8, 50
	f := newFleet(t, locktest.KindOf("mutex"))
	begun := time.Now()
	f.contend(processes, goroutines, 1)
	t.Logf("%d goroutines of %d processes have had it after %v", processes*goroutines, processes,
		time.Since(begun).Round(time.Millisecond))
	if most := f.number("most"); most != 1 {
		t.Errorf("%d held it at once", most)
	}
	f.wantUpdates(processes * goroutines)
	f.WantFree(t, f.s, f.Name)
}

func (f fleet) contend(processes, goroutines, times int) {
	f.t.Helper()
	all := f.spawn(processes, patient, patientTTL)
	tag := fmt.Sprintf("%d*%d", goroutines, times)
	for _, p := range all {
		p.Send("contend " + tag)
	}
	for _, p := range all {
		p.Expect(tag + ": done")
	}
}

func (f fleet) wantUpdates(want int) {
	f.t.Helper()
	if n := f.number("counter"); n != want {
		f.t.Errorf("%d updates, want %d", n, want)
	}
	if n := f.number("backwards"); n != 0 {
		f.t.Errorf("%d fences were not larger than the one before", n)
	}
}

const (
	stormRole     = "lock holder in a storm"
	stormTTL      = 2500 * time.Millisecond
	stormTimeout  = 700 * time.Millisecond
	stormRenewals = 4
)

func init() { redistest.Role(stormRole, runStorm) }

// runStorm holds a lease for a few renewals while the one thread that runs Go code is busy.
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
	l, err := locktest.KindOf(p.Args[1]).Open(rdb, p.Args[1], &lock.Options{
		TTL: stormTTL, RedisTimeout: stormTimeout, WaiterTTL: 4 * stormTimeout,
		Trace: &lock.Trace{Renewed: func(context.Context, lock.LeaseInfo) { renewed <- time.Now() }},
	})
	must(err)
	lease, err := l.Acquire(context.Background())
	must(err)
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
	p.Say("released %s", verdict(lease.Release(context.Background())))
	close(stop)
}

// A process with one thread for Go code, and fifty goroutines that never sleep, renews in time.
//
//fault:busy-process
func TestRenewal_BusyProcess(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	var wg sync.WaitGroup
	for _, k := range locktest.Kinds {
		p := redistest.Spawn(t, stormRole, s.Addr, k.Name)
		wg.Go(func() {
			line := p.Line()
			t.Logf("%s: %s between two renewals; TTL is %v", k.Name, strings.TrimPrefix(line, "longest "), stormTTL)
			if got := p.Expect("released "); got != "nil" || line == "lost" {
				t.Errorf("%s: %s, Release = %s", k.Name, line, got)
			}
		})
	}
	wg.Wait()
	for _, k := range locktest.Kinds {
		k.WantFree(t, s, k.Name)
	}
}

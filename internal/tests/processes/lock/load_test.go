package lock_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
)

// Under contention of eight processes with fifty goroutines each, never more than size hold a lock at
// once, and no update is lost.
//
//fault:very-many
func TestAcquire_ContendingProcesses(t *testing.T) {
	eachFleet(t, func(t *testing.T, f fleet) {
		const processes, goroutines, times = 8, 50, 2
		f.contend(processes, goroutines, times)
		if n := f.number("most"); n != f.Size {
			t.Errorf("%d held it at once, want %d", n, f.Size)
		}
		if f.Size == 1 {
			f.wantUpdates(processes * goroutines * times)
		}
	})
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

// A process with one thread for Go code, and fifty goroutines that never sleep, renews in time.
//
//fault:busy-process
func TestRenewal_BusyProcess(t *testing.T) {
	eachFleet(t, func(t *testing.T, f fleet) {
		holder := f.spawn(1, hasty, hastyTTL)[0]
		order(t, holder, "spin", "all", "is", "busy")
		held, _ := f.take(holder, "holder")
		taken := time.Now()
		redistest.Await(t, "two TTLs are over", func() bool { return time.Since(taken) > 2*hastyTTL })
		for _, tag := range held {
			order(t, holder, "release", tag, "released", "nil")
		}
	})
}

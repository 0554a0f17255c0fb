package lock_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/locktest"
	"github.com/singlefill/singlefill/lock"
)

// A killed holder is replaced when its lease has ended, and not earlier.
//
//fault:killed-holder
func TestAcquire_KilledHolder(t *testing.T) {
	eachFleet(t, func(t *testing.T, f fleet) {
		holder, next := f.spawn(1, hasty, hastyTTL)[0], f.spawn(1, patient, patientTTL)[0]
		_, before := f.take(holder, "holder")
		next.Send("acquire next")
		next.Expect("next: asks")
		holder.Kill()
		if n := f.Holders(t, f.s.Admin(), f.Name); n != f.Size {
			t.Errorf("%d hold it, want %d until their leases end", n, f.Size)
		}
		if fence := acquired(t, next, "next"); fence <= before {
			t.Errorf("fence %d after %d", fence, before)
		}
		order(t, next, "release", "next", "released", "<nil>")
	})
}

// A frozen holder is replaced. When it wakes, it learns of the loss, and neither its writes nor its
// release affect the next holder.
//
//fault:frozen-holder
func TestAcquire_FrozenHolder(t *testing.T) {
	eachFleet(t, func(t *testing.T, f fleet) {
		holder, next := f.spawn(1, hasty, hastyTTL)[0], f.spawn(1, patient, patientTTL)[0]
		held, before := f.take(holder, "holder")
		for _, tag := range held {
			order(t, holder, "write", tag, "wrote", "1")
		}
		holder.Freeze()
		frozen := time.Now()
		tags, fence := f.take(next, "next")
		if fence <= before {
			t.Errorf("fence %d after %d", fence, before)
		}
		order(t, next, "write", tags[0], "wrote", "1")
		state := f.State(t, f.s.Admin(), f.Name)
		redistest.Await(t, "two TTLs are over", func() bool { return time.Since(frozen) > 2*hastyTTL })
		for _, tag := range held { // it may write before it does anything else
			holder.Send("write " + tag)
		}
		holder.Thaw()
		for tag, got := range sayings(holder, 2*f.Size) {
			if !strings.Contains(got, "told") || !strings.Contains(got, "wrote 0") {
				t.Errorf("%s: %s, want it told of the loss and its write refused", tag, got)
			}
		}
		for _, tag := range held {
			order(t, holder, "release", tag, "released", lock.ErrLost.Error())
		}
		if now := f.State(t, f.s.Admin(), f.Name); now != state || state == "" {
			t.Errorf("the lock had %s, and has %s", state, now)
		}
		for _, tag := range tags {
			order(t, next, "release", tag, "released", "<nil>")
		}
	})
}

// fairTimes are the RedisTimeout and the TTL of a process whose places end after 4 s.
const fairTimeout, fairTTL = time.Second, 4 * time.Second

// A frozen waiter of a fair mutex is skipped, and comes back as the last.
//
//fault:frozen-waiter
func TestNewFairMutex_FrozenWaiter(t *testing.T) {
	t.Parallel()
	f := newFleet(t, locktest.KindOf("fair"))
	all := f.spawn(3, fairTimeout, fairTTL)
	holder, frozen, second := all[0], all[1], all[2]
	held, _ := f.take(holder, "holder")
	frozen.Send("reacquire frozen")
	f.awaitQueue(1)
	second.Send("acquire second")
	f.awaitQueue(2)
	frozen.Freeze()
	f.awaitQueue(1) // the commands of the other waiter have shown it to be dead
	frozen.Thaw()
	f.awaitQueue(2)
	order(t, holder, "release", held[0], "released", "<nil>")
	acquired(t, second, "second")
	f.awaitQueue(1)
	order(t, second, "release", "second", "released", "<nil>")
	acquired(t, frozen, "frozen")
	f.awaitQueue(0)
	order(t, frozen, "release", "frozen", "released", "<nil>")
}

// Under contention of eight processes with fifty goroutines each, never more than size hold a lock at
// once, and no update is lost.
//
//fault:very-many
func TestAcquire_ContendingProcesses(t *testing.T) {
	eachFleet(t, func(t *testing.T, f fleet) {
		const processes, goroutines, times = 8, 50, 2
		all := f.spawn(processes, patient, patientTTL)
		tag := fmt.Sprintf("%d*%d", goroutines, times)
		for _, p := range all {
			p.Send("contend " + tag)
		}
		for _, p := range all {
			p.Expect(tag + ": done")
		}
		number := func(key string) int {
			n, _ := f.s.Admin().Get(t.Context(), key).Int()
			return n
		}
		if n := number("most"); n != f.Size {
			t.Errorf("%d held it at once, want %d", n, f.Size)
		}
		if n, backwards := number("counter"), number("backwards"); f.Size == 1 && (n != processes*goroutines*times || backwards != 0) {
			t.Errorf("%d updates, want %d; %d fences were not larger than the one before", n, processes*goroutines*times, backwards)
		}
	})
}

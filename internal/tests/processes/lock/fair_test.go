package lock_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/locktest"
)

// A fair mutex is granted in the order of arrival, across processes: each waiter comes when the one
// before it is in the queue.
func TestNewFairMutex_OrderOfProcesses(t *testing.T) {
	t.Parallel()
	f := newFleet(t, locktest.KindOf("fair"))
	all := f.spawn(5, patient, patientTTL)
	held, _ := f.take(all[0], "holder")
	var want []string
	for i := range 15 {
		tag := fmt.Sprint("turn", i)
		want = append(want, tag)
		all[(i*3+1)%5].Send("turn " + tag)
		f.awaitQueue(int64(i + 1))
	}
	order(t, all[0], "release", held[0], "released", "nil")
	redistest.Await(t, "all have had their turn", func() bool {
		return f.s.Admin().LLen(context.Background(), "order").Val() == int64(len(want))
	})
	if got := f.s.Admin().LRange(t.Context(), "order", 0, -1).Val(); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("granted to %v, want %v", got, want)
	}
	f.WantFree(t, f.s, f.Name)
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
	order(t, holder, "release", held[0], "released", "nil")
	acquired(t, second, "second")
	f.awaitQueue(1)
	order(t, second, "release", "second", "released", "nil")
	acquired(t, frozen, "frozen")
	f.awaitQueue(0)
	order(t, frozen, "release", "frozen", "released", "nil")
}

package lock_test

import (
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/tests/locktest"
)

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

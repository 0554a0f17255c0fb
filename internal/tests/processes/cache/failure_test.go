package cache_test

import (
	"fmt"
	"testing"

	"github.com/singlefill/singlefill/internal/redistest"
)

// failures are the ways in which a load fails, and what calls get in its process and elsewhere.
var failures = []struct {
	name         string
	plan         plan
	here, remote outcome
}{
	{"error", plan{Fail: "no such table"}, outcome{gotOwn, "no such table"}, outcome{gotRemote, "no such table"}},
	{"not found, not remembered", plan{NotFound: true}, outcome{gotNotFound, ""}, outcome{gotNotFound, ""}},
	{"panic", plan{Panic: "index out of range"}, outcome{gotPanic, "index out of range"},
		outcome{gotRemote, "singlefill: Loader panicked: index out of range"}},
}

// A failure also reaches waiters that learn of it late: after calls of the same process that began after
// the failure, or when another process has taken the lock. They neither wait for a later load nor load
// themselves, and the later calls do not get the failure.
//
//fault:failed-load
func TestFailure_LateWaiters(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	processes := f.startAll(3, config{NotFoundTTL: -1})
	holder, next, waiter := processes[0], processes[1], processes[2]
	for _, failure := range failures {
		for _, taken := range []bool{false, true} { // the lock, by another process
			key := fmt.Sprint(failure.name, taken)
			blocked := failure.plan
			blocked.Block = true
			holder.get("fails"+key, key, 1, blocked)
			holder.begun("fails" + key)
			waiter.wait("waits"+key, key)
			poll := waiter.proxy.On(scripts, redistest.HoldRequest).Times(1)
			redistest.Await(t, "a poll is held back", func() bool { return poll.Fired() > 0 })
			holder.release("fails" + key)
			holder.wantDone("fails"+key, 1, failure.here.Kind, failure.here.Text)
			var v string
			if taken {
				v = next.block("next"+key, key).Value
			}
			waiter.get("later"+key, key, 10, plan{})
			waiter.joined("later" + key)
			poll.Release()
			waiter.wantDone("waits"+key, 10, failure.remote.Kind, failure.remote.Text)
			if taken {
				waiter.waiting("later"+key, key)
				next.wantUnfinished("next" + key)
				next.release("next" + key)
				next.wantDone("next"+key, 1, gotValue, v)
			} else {
				v = waiter.begun("later" + key).Value
			}
			waiter.wantDone("later"+key, 10, gotValue, v)
			holder.get("holder"+key, key, 1, plan{})
			holder.wantDone("holder"+key, 1, gotValue, v)
			f.wantLoads(key, 2)
		}
	}
}

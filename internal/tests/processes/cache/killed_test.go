package cache_test

import (
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// A killed holder is replaced by a waiter when its lock has expired.
//
//fault:killed-holder
func TestGetOrLoad_KilledHolder(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	others := f.startAll(2, config{})
	holder := f.start(shortLock)

	holder.get("killed", "k", 1, plan{Block: true})
	holder.begun("killed")
	for _, p := range others {
		p.get("waits", "k", 10, plan{})
		p.waiting("waits", "k")
	}
	lock := f.locked("k")

	holder.Kill()
	end := f.lockEnd("k")
	if got := f.locked("k"); got != lock {
		t.Fatalf("before the kill the lock key held %q, after it %q", lock, got)
	}

	got := allDone(others, "waits")
	f.wantLoads("k", 2)
	var second report
	for _, p := range others {
		for _, r := range p.unread {
			if r.Event == "begun" {
				second = r
			}
		}
	}
	if got[outcome{gotValue, second.Value}] != 20 {
		t.Errorf("the second load is %+v; callers got %v", second, got)
	}
	wantRightAfter(t, second.At, end)
}

// wantRightAfter asserts that a load began when the lock had expired, and at most a second later.
// PTTL, from which the end is computed, is rounded by less than 1 ms.
func wantRightAfter(t *testing.T, load, end time.Time) {
	t.Helper()
	if load.Before(end.Add(-time.Millisecond)) {
		t.Errorf("the second load began %v before the end of the lock", end.Sub(load))
	}
	if late := load.Sub(end); late > time.Second {
		t.Errorf("the second load began %v after the end of the lock", late)
	}
}

// A killed waiter harms no other process.
//
//fault:killed-waiters
func TestGetOrLoad_KilledWaiter(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	processes := f.startAll(3, config{})
	holder, killed, waiter := processes[0], processes[1], processes[2]
	holder.get("load", "k", 1, plan{Block: true})
	v := holder.begun("load").Value
	for _, p := range []*process{killed, waiter} {
		p.get("waits", "k", 10, plan{})
		p.waiting("waits", "k")
	}
	killed.Kill()
	holder.release("load")
	holder.wantDone("load", 1, gotValue, v)
	waiter.wantDone("waits", 10, gotValue, v)
	f.wantLoads("k", 1)
}

// A holder that is killed after its store was executed, and before it was answered, has stored the
// value for all processes. It leaves nothing else behind.
//
//fault:killed-at-store
func TestGetOrLoad_HolderKilledAfterStore(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	cachetest.LoadScripts(t, f.server)
	processes := f.startAll(2, config{})
	holder, waiter := processes[0], processes[1]

	holder.get("load", "k", 1, plan{Block: true})
	v := holder.begun("load").Value
	reply := holder.proxy.On(scripts, redistest.HoldReply)
	waiter.get("waits", "k", 10, plan{})
	waiter.waiting("waits", "k")
	holder.release("load")
	redistest.Await(t, "the value is stored, and the store is not answered", func() bool {
		return reply.Fired() > 0 && f.stored("k") != ""
	})
	holder.Kill()

	waiter.wantDone("waits", 10, gotValue, v)
	f.wantLoads("k", 1)
	if got := f.locked("k"); got != "" {
		t.Errorf("the lock key holds %q", got)
	}
}

// A holder that is killed before it knows of its lock is replaced when the lock has expired.
//
//fault:killed-at-store
func TestGetOrLoad_HolderKilledAfterGrant(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	cachetest.LoadScripts(t, f.server)
	holder := f.start(shortLock)
	other := f.start(config{})

	reply := holder.proxy.On(scripts, redistest.HoldReply)
	holder.get("killed", "k", 1, plan{})
	redistest.Await(t, "the lock is taken", func() bool { return f.locked("k") != "" })
	holder.Kill()
	if reply.Fired() == 0 {
		t.Fatal("no reply was held back")
	}
	other.get("next", "k", 1, plan{})
	other.wantDone("next", 1, gotValue, other.name+"/1")
}

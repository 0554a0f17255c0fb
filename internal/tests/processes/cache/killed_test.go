package cache_test

import (
	"slices"
	"strings"
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

	holder.block("killed", "k")
	for _, p := range others {
		p.wait("waits", "k")
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
	v := holder.block("load", "k").Value
	for _, p := range []*process{killed, waiter} {
		p.wait("waits", "k")
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

	v := holder.block("load", "k").Value
	reply := holder.proxy.On(scripts, redistest.HoldReply)
	waiter.wait("waits", "k")
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

// A frozen holder is replaced, and its store is refused.
//
//fault:frozen-holder
func TestGetOrLoad_FrozenHolder(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	other := f.start(config{})
	holder := f.start(shortLock)

	// Some callers begin before the lock is requested, others during the load.
	poll := holder.proxy.On(scripts, redistest.HoldRequest)
	holder.get("early", "k", 5, plan{Block: true})
	holder.joined("early")
	redistest.Await(t, "a poll is held back", func() bool { return poll.Fired() > 0 })
	poll.Release()
	v1 := holder.begun("early").Value
	holder.get("late", "k", 5, plan{})
	holder.joined("late")

	other.wait("waits", "k")
	holder.Freeze()
	v2 := other.begun("waits").Value
	other.wantDone("waits", 10, gotValue, v2)
	stored := f.stored("k")

	holder.Thaw()
	// When the lock is known to be lost, callers that began during the load need not wait for it.
	holder.wantDone("late", 5, gotValue, v2)
	holder.wantUnfinished("early")
	holder.release("early")
	holder.wantDone("early", 5, gotValue, v1)

	if got := f.stored("k"); got != stored {
		t.Errorf("Redis has %q, and had %q before the thaw", got, stored)
	}
	if got := holder.peek("k"); got != (outcome{gotValue, v2}) {
		t.Errorf("Get in the first process: %v", got)
	}
	holder.wantRefused()
	if s := holder.stats(); s.LocksLost != 1 || s.Stored != 0 {
		t.Errorf("Stats of the first process are %+v", s)
	}
	f.wantLoads("k", 2)
}

// A hung load is replaced after LoadTimeout: a waiter loads when the release is lost, and the lock has
// expired.
//
//fault:hung-load
func TestGetOrLoad_HungLoad(t *testing.T) {
	t.Parallel()
	hung := shortLock
	hung.LoadTimeout = 2600 * time.Millisecond

	f := newFleet(t)
	holder, other := f.start(hung), f.start(config{})
	abandon := cachetest.Script(t, "abandon")
	release := holder.proxy.On(func(cmd []string) bool {
		says := func(arg string) bool { return strings.Contains(arg, "took longer than LoadTimeout") }
		return slices.ContainsFunc(cmd, says) || abandon(cmd)
	}, redistest.CloseBefore)
	holder.get("hangs", "k", 1, plan{Block: true, IgnoreCtx: true})
	first := holder.begun("hangs")
	other.wait("waits", "k")
	holder.wantDone("hangs", 1, gotDeadline, "")
	end := f.lockEnd("k")
	second := other.begun("waits")
	other.wantDone("waits", 10, gotValue, second.Value)
	if release.Fired() == 0 {
		t.Error("no release was lost")
	}
	wantRightAfter(t, second.At, end)
	// The last renewal may take RedisTimeout.
	if late := end.Sub(first.At) - hung.LoadTimeout - hung.LockTTL; late > hung.RedisTimeout {
		t.Errorf("the lock expires %v after LoadTimeout + LockTTL", late)
	}
	f.wantLoads("k", 2)
}

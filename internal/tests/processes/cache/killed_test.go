package cache_test

import (
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

var scripts = redistest.Command("EVALSHA", "EVAL")

// A killed holder is replaced by a waiter when its lock has expired.
//
//fault:killed-holder
func TestGetOrLoad_KilledHolder(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	others, holder := f.start(2, config{}), f.start(1, config{Mortal: true})[0]
	holder.block("killed", "k", 1)
	holder.begun("killed")
	f.wait("waits", "k", others...)
	lock := f.locked("k")

	holder.Kill()
	end := f.lockEnd("k")
	if got := f.locked("k"); got != lock {
		t.Fatalf("before the kill the lock key held %q, after it %q", lock, got)
	}
	got := allDone(others, "waits")
	f.wantLoads("k", 2)
	_, second := loading(others)
	if got[value(second.Value)] != 20 {
		t.Errorf("the second load is %+v; callers got %v", second, got)
	}
	if second.At.Before(end.Add(-time.Millisecond)) { // PTTL is rounded by less than 1 ms
		t.Errorf("the second load began %v before the end of the lock", end.Sub(second.At))
	}
}

// A holder that is killed after its store was executed, and before it was answered, has stored the
// value for all processes. It leaves nothing else behind.
//
//fault:killed-at-store
func TestGetOrLoad_HolderKilledAfterStore(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	cachetest.LoadScripts(t, f.server)
	processes := f.start(2, config{})
	holder, waiter := processes[0], processes[1]
	holder.block("load", "k", 1)
	v := holder.begun("load").Value
	reply := holder.proxy.On(scripts, redistest.HoldReply)
	f.wait("waits", "k", waiter)
	holder.release("load")
	redistest.Await(t, "the value is stored, and the store is not answered", func() bool {
		return reply.Fired() > 0 && f.stored("k") != ""
	})
	holder.Kill()
	waiter.wantDone("waits", 10, value(v))
	f.wantLoads("k", 1)
	if got := f.locked("k"); got != "" {
		t.Errorf("the lock key holds %q", got)
	}
}

// A frozen holder is replaced, and its store is refused.
//
//fault:frozen-holder
func TestGetOrLoad_FrozenHolder(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	other, holder := f.start(1, config{})[0], f.start(1, config{Mortal: true})[0]

	// Some callers begin before the lock is requested, others during the load.
	poll := holder.proxy.On(scripts, redistest.HoldRequest)
	holder.block("early", "k", 5)
	holder.joined("early")
	redistest.Await(t, "a poll is held back", func() bool { return poll.Fired() > 0 })
	poll.Release()
	v1 := holder.begun("early").Value
	holder.get("late", "k", 5)
	holder.joined("late")

	f.wait("waits", "k", other)
	holder.Freeze()
	v2 := other.begun("waits").Value
	other.wantDone("waits", 10, value(v2))
	stored := f.stored("k")

	holder.Thaw()
	// When the lock is known to be lost, callers that began during the load need not wait for it.
	holder.wantDone("late", 5, value(v2))
	if r, done := holder.heard("done"); done {
		t.Errorf("the calls %q do not wait for their load", r.Tag)
	}
	holder.release("early")
	holder.wantDone("early", 5, value(v1))

	if got := f.stored("k"); got != stored {
		t.Errorf("Redis has %q, and had %q before the thaw", got, stored)
	}
	if got := holder.peek("k"); got != value(v2) {
		t.Errorf("Get in the first process: %s", got)
	}
	holder.wantRefused()
	if s := holder.stats(); s.LocksLost != 1 || s.Stored != 0 {
		t.Errorf("Stats of the first process are %+v", s)
	}
	f.wantLoads("k", 2)
}

// A refresher that is killed or frozen is replaced, and no reader waits. The order of events shows it:
// all loads block, and every reader goes on.
//
//fault:killed-refresher
func TestRefresh_KilledRefresher(t *testing.T) {
	for _, how := range []string{"killed", "frozen"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			f := newFleet(t)
			readers := f.start(3, config{Stale: true})
			refresher := f.start(1, config{Stale: true, Mortal: true})[0]
			readers[0].get("fill", "k", 1)
			v1 := readers[0].begun("fill").Value
			readers[0].wantDone("fill", 1, value(v1))
			readers[0].do(order{Op: "expire", Key: "k"})
			old := f.stored("k")
			refresher.block("refresh", "k", 1)
			refresher.wantDone("refresh", 1, stale(v1))
			refresher.begun("refresh")

			rounds := 0
			readAll := func(want string) {
				rounds++
				for _, p := range readers {
					tag := fmt.Sprint("reads", rounds)
					p.block(tag, "k", 3)
					p.wantDone(tag, 3, want)
				}
			}
			readAll(stale(v1))
			f.wantLoads("k", 2)
			if how == "killed" {
				refresher.Kill()
			} else {
				refresher.Freeze()
			}
			var next *process
			var begun report
			redistest.Await(t, "a reader refreshes", func() bool {
				readAll(stale(v1))
				next, begun = loading(readers)
				return next != nil
			})
			readAll(stale(v1))
			if f.stored("k") != old {
				t.Error("another entry is stored while the loads block")
			}
			next.release(begun.Tag)
			redistest.Await(t, "another entry is stored", func() bool { return f.stored("k") != old })
			if how == "frozen" {
				stored := f.stored("k")
				refresher.Thaw()
				refresher.release("refresh")
				refresher.wantRefused()
				if got := f.stored("k"); got != stored {
					t.Errorf("after the refused store Redis has %q, and before it %q", got, stored)
				}
				readers = append(readers, refresher)
			}
			readAll(value(begun.Value))
			f.wantLoads("k", 3)
		})
	}
}

// A process gets the order to end during a load that takes a minute. It leaves the key to another process at the end
// of its grace, and not when its lock expires.
//
//fault:shutdown
func TestShutdown_Terminated(t *testing.T) {
	for _, ignores := range []bool{false, true} {
		t.Run(fmt.Sprintf("ignores its context %t", ignores), func(t *testing.T) {
			t.Parallel()
			f := newFleet(t)
			both := f.start(2, config{})
			ending, waiter := both[0], both[1]
			ending.do(order{Op: "serve", Sleep: 200 * time.Millisecond})
			ending.Order(order{Op: "get", Tag: "ends", Key: "k", N: 1, Block: true, IgnoreCtx: ignores})
			ending.begun("ends")
			lockEnd := f.lockEnd("k")
			f.wait("waits", "k", waiter)
			if err := ending.Signal(syscall.SIGTERM); err != nil {
				t.Skip(err) // not on Windows
			}
			loads := waiter.begun("waits")
			if !loads.At.Before(lockEnd) {
				t.Errorf("the waiter loads %v after the lock of the ended process", loads.At.Sub(lockEnd))
			}
			waiter.wantDone("waits", 10, value(loads.Value))
			redistest.Must(t, ending.Wait())
		})
	}
}

package cache_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
)

// A cold key is loaded once in the fleet, and all callers get its value.
//
//fault:very-many
//fault:cold-key
func TestGetOrLoad_ColdKey(t *testing.T) {
	const callers, rounds = 100, 20
	f := newFleet(t)
	processes := f.start(8, config{})
	for round := range rounds {
		key := fmt.Sprint("round", round)
		for _, p := range processes {
			p.Order(order{Tag: key, Key: key, N: callers, Sleep: 50 * time.Millisecond})
		}
		first := ""
		for _, p := range processes {
			got := p.await("done", key).Outcomes
			if first == "" {
				first = strings.Join(slices.Collect(maps.Keys(got)), ", ")
			}
			if got[first] != callers || !strings.HasPrefix(first, value("")) {
				t.Fatalf("round %d: callers in %s got %v, and in the first process %s", round, p.Name, got, first)
			}
		}
		f.wantLoads(key, 1)
	}
}

// A killed holder is replaced by a waiter when its lock has expired.
//
//fault:killed-holder
func TestGetOrLoad_KilledHolder(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	waiter, holder := f.start(1, config{})[0], f.start(1, config{Mortal: true})[0]
	holder.block("killed")
	f.wait(waiter)
	holder.Kill()
	end := f.lockEnd()
	second := waiter.await("begun", "waits")
	if second.At.Before(end.Add(-time.Millisecond)) { // PTTL is rounded by less than 1 ms
		t.Errorf("the second load began %v before the end of the lock", end.Sub(second.At))
	}
	waiter.wantDone("waits", 10, value(second.Value))
	f.wantLoads("k", 2)
}

// A frozen holder is replaced, and its store is refused.
//
//fault:frozen-holder
func TestGetOrLoad_FrozenHolder(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	waiter, holder := f.start(1, config{})[0], f.start(1, config{Mortal: true})[0]
	v1 := holder.block("early").Value
	f.wait(waiter)
	holder.Freeze()
	v2 := waiter.await("begun", "waits").Value
	waiter.wantDone("waits", 10, value(v2))
	stored := f.stored()
	holder.Thaw()
	holder.release("early")
	holder.wantDone("early", 1, value(v1))
	holder.await("refused", "")
	if got := f.stored(); got != stored {
		t.Errorf("Redis has %q, and had %q before the thaw", got, stored)
	}
	holder.Order(order{Tag: "later", Key: "k", N: 1})
	holder.wantDone("later", 1, value(v2))
	f.wantLoads("k", 2)
}

// A refresher that is killed is replaced, and no reader waits. The order of events shows it: all loads block, and every
// reader goes on.
//
//fault:killed-refresher
func TestRefresh_KilledRefresher(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	reader, refresher := f.start(1, config{Stale: true})[0], f.start(1, config{Stale: true, Mortal: true})[0]
	redistest.Must(t, f.cache.Set(t.Context(), "k", "old"))
	redistest.Must(t, f.cache.Expire(t.Context(), "k"))
	old := f.stored()
	refresher.block("refresh")
	refresher.wantDone("refresh", 1, stale("old"))
	refresher.Kill()
	reads := 0
	redistest.Await(t, "a reader refreshes", func() bool {
		reads++
		tag := fmt.Sprint("reads", reads)
		reader.Order(order{Tag: tag, Key: "k", N: 3, Block: true})
		reader.wantDone(tag, 3, stale("old"))
		return f.rdb.Get(t.Context(), loadsKey(f.namespace, "k")).Val() == "2"
	})
	if f.stored() != old {
		t.Error("another entry is stored while the loads block")
	}
	for i := range reads {
		reader.release(fmt.Sprint("reads", i+1))
	}
	redistest.Await(t, "another entry is stored", func() bool { return f.stored() != old })
	f.wantLoads("k", 2)
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
			ending.Order(order{Tag: "ends", Key: "k", N: 1, Block: true, IgnoreCtx: ignores})
			ending.await("begun", "ends")
			lockEnd := f.lockEnd()
			f.wait(waiter)
			if err := ending.Signal(syscall.SIGTERM); err != nil {
				t.Skip(err) // not on Windows
			}
			loads := waiter.await("begun", "waits")
			if !loads.At.Before(lockEnd) {
				t.Errorf("the waiter loads %v after the lock of the ended process", loads.At.Sub(lockEnd))
			}
			waiter.wantDone("waits", 10, value(loads.Value))
			redistest.Must(t, ending.Wait())
		})
	}
}

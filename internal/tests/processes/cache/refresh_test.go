package cache_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
)

// A refresher that is killed or frozen is replaced, and no reader waits. The order of events shows it:
// the test blocks the load, and every reader goes on.
//
//fault:killed-refresher
func TestRefresh_KilledRefresher(t *testing.T) {
	for _, how := range []string{"killed", "frozen"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			f := newFleet(t)
			mortal := shortLock
			mortal.Direct, mortal.StaleWhileRevalidate = true, time.Hour
			readers := f.startAll(3, config{Direct: true, StaleWhileRevalidate: time.Hour})
			refresher := f.start(mortal)
			readers[0].get("fill", "k", 1, plan{})
			v1 := readers[0].begun("fill").Value
			readers[0].wantDone("fill", 1, gotValue, v1)
			readers[0].expire("k")
			old := f.stored("k")
			refresher.get("refresh", "k", 1, plan{Block: true})
			refresher.wantDone("refresh", 1, gotStale, v1)
			refresher.begun("refresh")

			for _, p := range readers {
				p.Order(order{Op: "read", Tag: "reads", Key: "k", N: 3, Every: 5 * time.Millisecond, Plan: plan{Block: true}})
			}
			wantServed(t, readers, "reads", 5)
			f.wantLoads("k", 2)
			lock := f.locked("k")
			if how == "killed" {
				refresher.Kill()
			} else {
				refresher.Freeze()
			}
			if f.locked("k") == lock {
				wantServed(t, readers, "reads", 5) // while the refresher holds the lock
			}
			next := readers[0]
			redistest.Await(t, "a reader refreshes", func() bool {
				for _, p := range readers {
					if p.has("begun", "reads") {
						next = p
						return true
					}
				}
				return false
			})
			v2 := next.begun("reads").Value
			wantServed(t, readers, "reads", 5)
			if f.stored("k") != old {
				t.Error("another entry is stored while the loads block")
			}
			next.Order(order{Op: "pass", Tag: "reads"})
			redistest.Await(t, "another entry is stored", func() bool { return f.stored("k") != old })
			wantServed(t, readers, "reads", 1)
			for _, p := range readers {
				p.Order(order{Op: "stop", Tag: "reads"})
			}
			for o, n := range allDone(readers, "reads") {
				if o != (outcome{gotStale, v1}) && o != (outcome{gotValue, v2}) {
					t.Errorf("%d readers got %v", n, o)
				}
			}
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
			for _, p := range readers {
				p.get("after", "k", 3, plan{})
				p.wantDone("after", 3, gotValue, v2)
			}
			f.wantLoads("k", 3)
		})
	}
}

// Three processes call Refresh at once for a fresh value: one loads, and all return when the new value is stored.
// Until then every reader gets the old one.
func TestRefresh_ThreeProcesses(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	processes := f.startAll(3, config{})
	processes[0].get("fill", "k", 1, plan{})
	old := processes[0].begun("fill").Value
	processes[0].wantDone("fill", 1, gotValue, old)
	processes[0].Order(order{Op: "refresh", Tag: "refresh", Key: "k", Plan: plan{Block: true}})
	fresh := processes[0].begun("refresh").Value
	for _, p := range processes[1:] {
		before := p.polled("k")
		p.Order(order{Op: "refresh", Tag: "refresh", Key: "k"})
		redistest.Await(t, p.name+" waits", func() bool { return p.polled("k") >= before+3 || p.listensTo("k") })
	}
	for _, p := range processes {
		p.get("read", "k", 5, plan{})
		p.wantDone("read", 5, gotValue, old)
		p.wantUnfinished("refresh")
	}
	processes[0].release("refresh")
	for _, p := range processes {
		p.wantDone("refresh", 1, gotValue, fresh)
	}
	f.wantLoads("k", 2)
}

// wantServed waits until every reader has made so many more calls.
func wantServed(t *testing.T, readers []*process, tag string, more int64) {
	t.Helper()
	counts := func() (all []int64) {
		for _, p := range readers {
			p.Order(order{Op: "tally", Tag: tag})
			all = append(all, p.await("tally", tag).Counts...)
		}
		return all
	}
	before := counts()
	redistest.Await(t, fmt.Sprintf("every reader has made %d more calls", more), func() bool {
		for i, n := range counts() {
			if n < before[i]+more {
				return false
			}
		}
		return true
	})
}

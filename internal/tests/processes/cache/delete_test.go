package cache_test

import (
	"fmt"
	"testing"
	"time"
)

// A value that another process Deletes or Sets during its load is not stored. Calls after that do not
// wait for the load, and their value stays; those that waited for it in other processes get it at once.
//
//fault:delete-in-load
func TestInvalidation_DuringLoadElsewhere(t *testing.T) {
	for name, test := range map[string]struct {
		invalidate  func(p *process)
		calls, sets bool // there are later calls; what Set has stored is their value
	}{
		"Delete":                     {invalidate: func(p *process) { p.delete("k") }},
		"Delete, and calls after it": {invalidate: func(p *process) { p.delete("k") }, calls: true},
		"Set":                        {invalidate: func(p *process) { p.set("k", "set") }, calls: true, sets: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFleet(t)
			processes := f.startAll(3, config{})
			a, b, c := processes[0], processes[1], processes[2]
			v1 := a.block("old", "k").Value
			if test.sets {
				b.wait("waits", "k")
			}
			if test.calls { // before the invalidation: they may get either value
				a.get("joins", "k", 5, plan{})
				a.joined("joins")
			}
			test.invalidate(c)
			v2, loads := "set", 1
			if test.sets {
				b.wantDone("waits", 10, gotValue, v2)
			}
			if test.calls { // while the old load blocks
				a.get("new", "k", 5, plan{})
				if !test.sets { // they load, or those calls do
					v2, loads = a.name+"/2", 2
				}
				a.wantDone("new", 5, gotValue, v2)
				for _, p := range processes[1:] {
					p.get("new", "k", 5, plan{})
					p.wantDone("new", 5, gotValue, v2)
				}
			}
			stored := f.stored("k")
			a.wantUnfinished("old")
			a.release("old")
			a.wantDone("old", 1, gotValue, v1)
			if test.calls {
				for o := range a.done("joins") {
					if o != (outcome{gotValue, v1}) && o != (outcome{gotValue, v2}) {
						t.Errorf("callers between load and invalidation got %v", o)
					}
				}
			}
			a.wantRefused()
			if got := f.stored("k"); got != stored || (got == "") == test.calls {
				t.Errorf("Redis has %q, and had %q before the old load ended", got, stored)
			}
			if lock := f.locked("k"); lock != "" {
				t.Errorf("the lock key holds %q", lock)
			}
			f.wantLoads("k", loads)
		})
	}
}

// A call that begins after a Delete never gets what was loaded before it, in whatever order reads,
// loads and Deletes come.
//
//fault:delete-in-load
func TestDelete_AgainAndAgain(t *testing.T) {
	t.Parallel()
	const rounds = 50
	f := newFleet(t)
	processes := f.startAll(3, config{})
	for i, p := range processes {
		p.order(order{Op: "churn", Tag: "churn", Key: fmt.Sprint("key", i), Keys: len(processes), N: rounds,
			Plan: plan{Source: true, Sleep: time.Millisecond}})
	}
	for _, p := range processes {
		for _, o := range p.await("churn", "churn").Outcomes {
			t.Errorf("%s: %d times %v", p.name, o.N, o.outcome)
		}
	}
}

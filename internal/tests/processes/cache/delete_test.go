package cache_test

import (
	"fmt"
	"testing"
	"time"
)

// A Delete in another process refuses the store of a load that runs.
//
//fault:delete-in-load
func TestDelete_DuringLoadElsewhere(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	processes := f.startAll(2, config{})
	a, b := processes[0], processes[1]
	a.get("old", "k", 1, plan{Block: true})
	v1 := a.begun("old").Value
	b.delete("k")
	a.release("old")
	a.wantDone("old", 1, gotValue, v1) // the call began before the Delete
	if value, lock := f.stored("k"), f.locked("k"); value != "" || lock != "" {
		t.Errorf("after the load: value %q, lock %q", value, lock)
	}
	a.wantRefused()
	if got := b.peek("k"); got.Kind != gotMiss {
		t.Errorf("Get: %v", got)
	}
}

// A call after a Delete does not wait for the load that the Delete has superseded.
//
//fault:delete-in-load
func TestDelete_LaterCall(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	processes := f.startAll(3, config{})
	a, b, c := processes[0], processes[1], processes[2]
	a.get("old", "k", 1, plan{Block: true})
	v1 := a.begun("old").Value
	// Calls between the beginning of the load and the Delete may get either value.
	a.get("joins", "k", 5, plan{})
	a.joined("joins")

	b.delete("k")
	a.get("new", "k", 5, plan{})
	got := a.done("new") // while the old load blocks
	stored := f.stored("k")
	f.wantLoads("k", 2)
	var v2 string
	for o, n := range got {
		if v2 = o.Text; o.Kind != gotValue || o.Text == v1 || n != 5 {
			t.Errorf("after the Delete %d callers got %v; the old value is %q", n, o, v1)
		}
	}
	a.wantUnfinished("old")
	for _, p := range []*process{b, c} {
		p.get("new", "k", 5, plan{})
		p.wantDone("new", 5, gotValue, v2)
	}

	a.release("old")
	a.wantDone("old", 1, gotValue, v1)
	for o := range a.done("joins") {
		if o != (outcome{gotValue, v1}) && o != (outcome{gotValue, v2}) {
			t.Errorf("callers between load and Delete got %v", o)
		}
	}
	a.wantRefused()
	if got := f.stored("k"); got != stored {
		t.Errorf("Redis has %q, and had %q before the old load ended", got, stored)
	}
	if got := a.peek("k"); got != (outcome{gotValue, v2}) {
		t.Errorf("Get: %v", got)
	}
	f.wantLoads("k", 2)
}

// A value that another process Sets during a load stays, and ends the waiting for the load.
//
//fault:delete-in-load
func TestSet_DuringLoadElsewhere(t *testing.T) {
	t.Parallel()
	f := newFleet(t)
	processes := f.startAll(3, config{})
	a, b, c := processes[0], processes[1], processes[2]
	a.get("old", "k", 1, plan{Block: true})
	v1 := a.begun("old").Value
	b.get("waits", "k", 10, plan{})
	b.waiting("waits", "k")

	c.set("k", "set")
	stored := f.stored("k")
	a.get("new", "k", 5, plan{})
	a.wantDone("new", 5, gotValue, "set") // while the old load blocks
	b.wantDone("waits", 10, gotValue, "set")
	a.wantUnfinished("old")

	a.release("old")
	a.wantDone("old", 1, gotValue, v1)
	a.wantRefused()
	if got := f.stored("k"); got != stored {
		t.Errorf("Redis has %q, and had %q before the old load ended", got, stored)
	}
	f.wantLoads("k", 1)
}

// A waiter takes over after a Delete, before the superseded load ends.
func TestDelete_WaiterTakesOver(t *testing.T) {
	for _, deleter := range []string{"waiter", "holder", "third process"} {
		t.Run(deleter, func(t *testing.T) {
			t.Parallel()
			f := newFleet(t)
			processes := f.startAll(3, config{})
			a, b := processes[0], processes[1]
			deleters := map[string]*process{"waiter": b, "holder": a, "third process": processes[2]}
			a.get("old", "k", 1, plan{Block: true})
			v1 := a.begun("old").Value
			b.get("waits", "k", 10, plan{})
			b.waiting("waits", "k")

			deleters[deleter].delete("k")
			v2 := b.begun("waits").Value
			b.wantDone("waits", 10, gotValue, v2)
			stored := f.stored("k")
			a.wantUnfinished("old")

			a.release("old")
			a.wantDone("old", 1, gotValue, v1)
			a.wantRefused()
			if got := f.stored("k"); got != stored {
				t.Errorf("Redis has %q, and had %q before the old load ended", got, stored)
			}
			f.wantLoads("k", 2)
		})
	}
}

// A superseded load that ends while the next load runs neither releases its lock nor stores a
// value.
func TestDelete_OldLoadEndsFirst(t *testing.T) {
	olds := map[string]plan{"value": {}}
	for _, failure := range failures {
		olds[failure.name] = failure.plan
	}
	for name, old := range olds {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			old.Block = true
			f := newFleet(t)
			processes := f.startAll(2, config{NotFoundTTL: -1})
			a, b := processes[0], processes[1]
			a.get("old", "k", 1, old)
			a.begun("old")
			b.delete("k")
			b.get("new", "k", 1, plan{Block: true})
			v2 := b.begun("new").Value
			lock := f.locked("k")
			a.release("old")
			a.done("old")
			if got := f.stored("k"); got != "" {
				t.Errorf("%q is stored", got)
			}
			if got := f.locked("k"); got != lock {
				t.Errorf("the lock key holds %q, and held %q before the old load ended", got, lock)
			}
			a.get("waits", "k", 5, plan{})
			a.waiting("waits", "k")
			b.release("new")
			b.wantDone("new", 1, gotValue, v2)
			a.wantDone("waits", 5, gotValue, v2)
			f.wantLoads("k", 2)
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

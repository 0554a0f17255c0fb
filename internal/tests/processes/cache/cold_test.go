package cache_test

import (
	"fmt"
	"testing"
	"time"
)

// A cold key is loaded once in the fleet, and all callers get its value.
//
//fault:very-many
//fault:cold-key
func TestGetOrLoad_ColdKey(t *testing.T) {
	const callers, rounds = 100, 20
	f := newFleet(t)
	processes := f.startAll(8, config{Direct: true})
	for round := range rounds {
		tag := fmt.Sprint("round", round)
		for _, p := range processes {
			p.Order(order{Op: "get", Tag: tag, Key: tag, N: callers, Start: true, Plan: plan{Sleep: 10 * time.Millisecond}})
		}
		for _, p := range processes {
			p.await("ready", tag)
		}
		for _, p := range processes {
			p.Order(order{Op: "start", Tag: tag})
		}
		got := allDone(processes, tag)
		f.wantLoads(tag, 1)
		f.wantNoOverlap(tag)
		for o, n := range got {
			if o.Kind != gotValue || n != len(processes)*callers {
				t.Errorf("round %d: %d callers got %v", round, n, o)
			}
		}
		if t.Failed() {
			break
		}
	}
	for _, p := range processes {
		if s := p.stats(); s.LoadsUnlocked+s.RedisErrors+s.Fenced+s.LocksLost+s.BadValues > 0 {
			t.Errorf("Stats of %s are %+v", p.name, s)
		}
	}
}

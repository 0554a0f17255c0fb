package singlefill

import (
	"fmt"
	"testing"
	"time"
)

func TestTheMemoryOfLoadTimesIsBounded(t *testing.T) {
	m := newMemory()
	for i := range 3 * remembered {
		key, took := fmt.Sprint("k", i), time.Second<<(i%4)
		m.note(key, took)
		if e := m.estimate(key, 0); e.mean != took || !e.known() {
			t.Fatalf("%s: %+v, just after a load of %v", key, e, took)
		}
		if n := len(m.keys); n > remembered {
			t.Fatalf("%d keys are remembered, want %d at most", n, remembered)
		}
	}
	m.note("set", 0)
	if e := m.estimate("set", 0); e.known() {
		t.Errorf("%+v is expected of a key that was set, in a namespace of loads of all lengths", e)
	}
}

func TestAnEstimateFollowsTheLoads(t *testing.T) {
	var e estimate
	if e.known() {
		t.Error("something is known of nothing")
	}
	for range 100 {
		e = e.add(time.Second)
	}
	e = e.add(10 * time.Second)
	if e.known() {
		t.Errorf("%+v counts as known after a load ten times as long as the others", e)
	}
	for range 50 {
		e = e.add(10 * time.Second)
	}
	if off := 10*time.Second - e.mean; !e.known() || off < 0 || off > time.Second || e.deviation > time.Second {
		t.Errorf("%+v after 50 loads of 10s", e)
	}
}

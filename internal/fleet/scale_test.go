package fleet

import (
	"slices"
	"testing"
	"time"
)

// The promises of a fleet, in fleets that take little time to simulate.
func TestAStampedeIsOneLoadForWhichNobodyWaitsLong(t *testing.T) {
	for _, n := range []int{10, 100} {
		for _, length := range []time.Duration{10 * time.Millisecond, 100 * time.Millisecond} {
			inFleet(t, n, usual, func(f *fleet) {
				l := law{costs: usual, waiters: n * hotKeys, length: length}
				s := stampede{keys: "k", length: func() time.Duration { return length }}
				check(t, "the first load", l, f.run(s))
				l.known = true
				check(t, "a load like the one before", l, f.run(s))
			})
		}
	}
}

func check(t *testing.T, what string, l law, r result) {
	t.Helper()
	for _, n := range r.loads {
		if n != 1 {
			t.Errorf("%s, %d waiters, %v: %d loads, want 1", what, l.waiters, l.length, n)
		}
	}
	if most := slices.Max(r.late); most > l.late() {
		t.Errorf("%s, %d waiters, %v: a waiter is %v late, want %v at most", what, l.waiters, l.length, most, l.late())
	}
	if most := slices.Max(r.polls); most > l.polls() {
		t.Errorf("%s, %d waiters, %v: a process polls %d times, want %d at most", what, l.waiters, l.length, most, l.polls())
	}
	if most := l.commands(); r.commands > most {
		t.Errorf("%s, %d waiters, %v: %d commands, want %d at most", what, l.waiters, l.length, r.commands, most)
	}
}

func TestADeadHolderIsReplacedByOneOther(t *testing.T) {
	const n, length = 10, time.Second
	inFleet(t, n, usual, func(f *fleet) {
		l := law{costs: usual, waiters: n * hotKeys, length: length}
		r := f.run(stampede{keys: "k", length: func() time.Duration { return length }, dies: true})
		for _, n := range r.loads {
			if n != 2 {
				t.Errorf("%d loads, want that of the dead and one more", n)
			}
		}
		if most := slices.Max(r.taken); most > l.taken() {
			t.Errorf("replaced after %v, want %v at most", most, l.taken())
		}
		if most := slices.Max(r.late); most > l.late() {
			t.Errorf("a waiter is %v late, want %v at most", most, l.late())
		}
	})
}

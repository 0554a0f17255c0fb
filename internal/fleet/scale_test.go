package fleet

import (
	"slices"
	"testing"
	"time"
)

// A stampede causes one load, for which waiters wait no longer than computed.
func TestStampede_OneLoad(t *testing.T) {
	t.Parallel()
	sizes := []int{10, 100}
	if testing.Short() {
		sizes = sizes[:1]
	}
	for _, n := range sizes {
		for _, length := range []time.Duration{10 * time.Millisecond, 100 * time.Millisecond} {
			inFleet(t, n, usual, false, func(f *fleet) {
				b := bounds{costs: usual, waiters: n * hotKeys, length: length}
				s := stampede{keys: "k", length: func() time.Duration { return length }}
				check(t, "the first load", b, f.run(s))
				b.known = true
				check(t, "a load like the one before", b, f.run(s))
			})
		}
	}
}

func check(t *testing.T, what string, b bounds, r result) {
	t.Helper()
	for _, n := range r.loads {
		if n != 1 {
			t.Errorf("%s, %d waiters, %v: %d loads, want 1", what, b.waiters, b.length, n)
		}
	}
	if most := slices.Max(r.late); most > b.late() {
		t.Errorf("%s, %d waiters, %v: a waiter is %v late, want %v at most", what, b.waiters, b.length, most, b.late())
	}
	if most := slices.Max(r.polls); most > b.polls() {
		t.Errorf("%s, %d waiters, %v: a process polls %d times, want %d at most", what, b.waiters, b.length, most, b.polls())
	}
	if most := b.commands(); r.commands > most {
		t.Errorf("%s, %d waiters, %v: %d commands, want %d at most", what, b.waiters, b.length, r.commands, most)
	}
}

// A dead holder is replaced by one other holder.
func TestStampede_DeadHolder(t *testing.T) {
	t.Parallel()
	const n, length = 10, time.Second
	inFleet(t, n, usual, false, func(f *fleet) {
		b := bounds{costs: usual, waiters: n * hotKeys, length: length}
		r := f.run(stampede{keys: "k", length: func() time.Duration { return length }, dies: true})
		for _, n := range r.loads {
			if n != 2 {
				t.Errorf("%d loads, want that of the dead and one more", n)
			}
		}
		if most := slices.Max(r.taken); most > b.taken() {
			t.Errorf("replaced after %v, want %v at most", most, b.taken())
		}
		if most := slices.Max(r.late); most > b.late() {
			t.Errorf("a waiter is %v late, want %v at most", most, b.late())
		}
	})
}

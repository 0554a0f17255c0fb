package fleet

import (
	"slices"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/wait"
)

// A stampede causes one load, for which waiters wait no longer than computed, with wake-ups and
// without.
func TestStampede_OneLoad(t *testing.T) {
	t.Parallel()
	sizes := []int{10, 100}
	if testing.Short() || redistest.Race {
		sizes = sizes[:1]
	}
	for _, n := range sizes {
		for _, length := range []time.Duration{10 * time.Millisecond, 100 * time.Millisecond} {
			for _, wakeUps := range []bool{true, false} {
				inFleet(t, n, usual, wakeUps, func(f *fleet) {
					b := bounds{costs: usual, waiters: n * hotKeys, length: length, wakeUps: wakeUps}
					s := stampede{keys: "k", length: func() time.Duration { return length }}
					check(t, "the first load", b, f.run(s))
					b.known = true
					check(t, "a load like the one before", b, f.run(s))
				})
			}
		}
	}
}

// During a long load every waiter begins to listen. It then polls once: when the load has ended.
func TestStampede_AllHear(t *testing.T) {
	t.Parallel()
	const n, length = 10, 3 * time.Second
	inFleet(t, n, usual, true, func(f *fleet) {
		b := bounds{costs: usual, waiters: n * hotKeys, length: 100 * time.Millisecond, wakeUps: true}
		s := stampede{keys: "k", length: func() time.Duration { return length }}
		for _, what := range []string{"the first load", "a load like the one before"} {
			r := f.run(s)
			if want := (n - 1) * hotKeys; r.messages != want {
				t.Errorf("%s: %d messages, want %d", what, r.messages, want)
			}
			if most := slices.Max(r.late); most > b.heard() {
				t.Errorf("%s: a waiter is %v late, want %v at most", what, most, b.heard())
			}
			// All listen within 100 ms.
			if most := slices.Max(r.polls); most > b.polls() {
				t.Errorf("%s: a process polls %d times, want %d at most", what, most, b.polls())
			}
		}
	})
}

// Listening does not overload a server that the stampede itself keeps busy for most of RedisTimeout,
// like 10,000 processes, and for which a connection is expensive, as with TLS.
func TestStampede_BusyServer(t *testing.T) {
	t.Parallel()
	slow := costs{
		script: 100 * usual.script, plain: 100 * usual.plain, message: 100 * usual.message,
		connection: 20 * time.Millisecond, trip: usual.trip,
	}
	for _, length := range []time.Duration{time.Second, 10 * time.Second} {
		inFleet(t, 100, slow, true, func(f *fleet) {
			s := stampede{keys: "k", length: func() time.Duration { return length }}
			for _, what := range []string{"the first load", "a load like the one before"} {
				for _, n := range f.run(s).loads {
					if n != 1 {
						t.Errorf("%s, %v: %d loads, want 1", what, length, n)
					}
				}
			}
		})
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

// A lost message delays a subscribed waiter until its next poll.
func TestStampede_LostMessages(t *testing.T) {
	t.Parallel()
	const n, length = 10, time.Second
	inFleet(t, n, usual, true, func(f *fleet) {
		f.server.lose = true
		b := bounds{costs: usual, waiters: n * hotKeys, length: length, wakeUps: true}
		s := stampede{keys: "k", length: func() time.Duration { return length }}
		next := time.Duration(longer * float64(wait.ListeningPause))
		if most := slices.Max(f.run(s).late); most > next+b.late() {
			t.Errorf("the first load: a waiter is %v late, want %v at most", most, next+b.late())
		}
		// Waiters that know the length poll after half of it has passed again.
		next = time.Duration(longer * float64(length/2+2*wait.MinJoinPause))
		if most := slices.Max(f.run(s).late); most > next+b.late() {
			t.Errorf("a load like the one before: a waiter is %v late, want %v at most", most, next+b.late())
		}
	})
}

// A dead holder is replaced by one other holder.
func TestStampede_DeadHolder(t *testing.T) {
	t.Parallel()
	const n, length = 10, time.Second
	for _, wakeUps := range []bool{true, false} {
		inFleet(t, n, usual, wakeUps, func(f *fleet) {
			b := bounds{costs: usual, waiters: n * hotKeys, length: length, wakeUps: wakeUps}
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
}

package fleet

import (
	"cmp"
	"fmt"
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
			atMost(t, what+": the last waiter is late by", slices.Max(r.late), b.heard())
			atMost(t, what+": polls of a process", slices.Max(r.polls), b.polls()) // all listen within 100 ms
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
				wantLoads(t, fmt.Sprintf("%s, %v", what, length), f.run(s), 1)
			}
		})
	}
}

func check(t *testing.T, what string, b bounds, r result) {
	t.Helper()
	what = fmt.Sprintf("%s, %d waiters, %v", what, b.waiters, b.length)
	wantLoads(t, what, r, 1)
	atMost(t, what+": the last waiter is late by", slices.Max(r.late), b.late())
	atMost(t, what+": polls of a process", slices.Max(r.polls), b.polls())
	atMost(t, what+": commands", r.commands, b.commands())
}

// wantLoads fails the test unless each key was loaded so often.
func wantLoads(t *testing.T, what string, r result, want int) {
	t.Helper()
	for _, n := range r.loads {
		if n != want {
			t.Errorf("%s: %d loads, want %d", what, n, want)
		}
	}
}

func atMost[V cmp.Ordered](t *testing.T, what string, got, most V) {
	t.Helper()
	if got > most {
		t.Errorf("%s: %v, want %v at most", what, got, most)
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
		atMost(t, "the first load: the last waiter is late by", slices.Max(f.run(s).late), next+b.late())
		// Waiters that know the length poll after half of it has passed again.
		next = time.Duration(longer * float64(length/2+2*wait.MinJoinPause))
		atMost(t, "a load like the one before: the last waiter is late by", slices.Max(f.run(s).late), next+b.late())
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
			wantLoads(t, "that of the dead and one more", r, 2)
			atMost(t, "replaced after", slices.Max(r.taken), b.taken())
			atMost(t, "the last waiter is late by", slices.Max(r.late), b.late())
		})
	}
}

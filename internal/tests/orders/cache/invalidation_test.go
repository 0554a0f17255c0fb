package cache_test

import (
	"testing"
	"time"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/schedule"
)

// A call after an invalidation does not get what was loaded before it.
func TestOrders_Invalidation(t *testing.T) {
	for _, how := range announcements {
		t.Run(how.name, func(t *testing.T) {
			t.Parallel()
			explore(t, schedule.Plan{AtLeast: 50}, func(w *schedule.World) {
				s := newScenario(t, w, singlefill.Options[string]{})
				s.goGet("A", "A")
				s.goChange("B", "C", how.announce)
				s.end()
			})
		})
	}
}

// A call after a Delete does not join a read or load of its process that is older than the Delete.
func TestOrders_InvalidationAndJoin(t *testing.T) {
	for _, test := range []struct {
		name, changer string
		plan          schedule.Plan
		callers       []string
	}{
		{"deleted here", "A", schedule.Plan{AtLeast: 50}, []string{"early"}},
		{"deleted elsewhere", "B", schedule.Plan{AtLeast: 50}, []string{"early"}},
		{"deleted here, three callers", "A", schedule.Plan{Sample: 150}, []string{"early", "perhaps late"}},
		{"deleted elsewhere, three callers", "B", schedule.Plan{Sample: 150}, []string{"early", "perhaps late"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			explore(t, test.plan, func(w *schedule.World) {
				s := newScenario(t, w, singlefill.Options[string]{})
				for _, caller := range test.callers {
					s.goGet("A", caller)
				}
				s.goChange(test.changer, "A", deletes)
				s.end()
			})
		})
	}
}

// What may happen to a process: a connection breaks under a command, which arrives later; a command
// is held up for longer than its caller waits; a process is cut off for longer than LockTTL; a
// caller is cancelled.
var (
	breaks = schedule.Plan{AtLeast: 100, Together: true, Pauses: 1, Faults: 1, Hit: []string{"A"}, Break: true}
	delays = schedule.Plan{
		AtLeast: 100, Together: true, Faults: 1, Hit: []string{"A"}, Cancel: []string{"A"},
		Hold: []time.Duration{3 * schedule.Step}, Cut: []time.Duration{lockTTL + 2*schedule.Step},
	}
	twoFaults = schedule.Plan{
		Sample: 150, Pauses: 2, Faults: 2, Cancel: []string{"A", "B"}, Break: true,
		Hold: []time.Duration{3 * schedule.Step}, Cut: []time.Duration{lockTTL + 2*schedule.Step},
	}
)

// A call after an invalidation does not get what was loaded before it, whatever faults there are.
func TestOrders_InvalidationWithFaults(t *testing.T) {
	for _, test := range []struct {
		name     string
		announce announcement
		plan     schedule.Plan
	}{
		{"Delete, a connection breaks", deletes, breaks},
		{"Delete, a delay", deletes, delays},
		{"Delete, two faults", deletes, twoFaults},
		{"Set, a connection breaks", sets, breaks},
		{"Set, two faults", sets, twoFaults},
		{"Expire, two faults", expires, twoFaults},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			explore(t, test.plan, func(w *schedule.World) {
				s := newScenario(t, w, singlefill.Options[string]{})
				s.mayOverlap = true
				s.goGet("A", "A")
				s.goChange("B", "C", test.announce)
				s.end()
			})
		})
	}
}

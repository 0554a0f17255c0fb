package cache_test

import (
	"testing"
	"time"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/schedule"
)

// What may happen to a process: a connection breaks under a command, which arrives later; a command
// is held up for longer than its caller waits; a process is cut off for longer than LockTTL; a
// caller is cancelled.
var (
	breaks = schedule.Plan{Sample: 400, Together: true, Pauses: 1, Faults: 1, Hit: []string{"A"}, Break: true}
	delays = schedule.Plan{
		Sample: 400, Together: true, Faults: 1, Hit: []string{"A"}, Cancel: []string{"A"},
		Hold: []time.Duration{3 * schedule.Step}, Cut: []time.Duration{lockTTL + 2*schedule.Step},
	}
	twoFaults = schedule.Plan{
		Sample: 150, Pauses: 2, Faults: 2, Cancel: []string{"A", "B"}, Break: true,
		Hold: []time.Duration{3 * schedule.Step}, Cut: []time.Duration{lockTTL + 2*schedule.Step},
	}
)

// A call after an invalidation does not get what was loaded before it, and a refresh does not undo the
// invalidation, whatever faults there are.
func TestOrders_Invalidation(t *testing.T) {
	for _, how := range announcements {
		loads := func(s *scenario) {
			s.goGet("A", "A")
			s.goChange("B", "C", how.announce)
			s.end()
		}
		refreshes := func(s *scenario) {
			s.mayBeStale = how.name == "Expire"
			s.fillAndExpire()
			loads(s)
		}
		fails := func(s *scenario) {
			s.mayOverlap = true
			loads(s)
		}
		all, stale := schedule.Plan{AtLeast: 50}, singlefill.Options[string]{StaleWhileRevalidate: ttl}
		orders := []order{
			{name: how.name, plan: all, run: loads},
			{name: how.name + ", a refresh", plan: all, opts: stale, run: refreshes},
			{name: how.name + ", two faults", plan: twoFaults, run: fails},
		}
		if how.name != "Expire" {
			orders = append(orders, order{name: how.name + ", a connection breaks", plan: breaks, run: fails})
		}
		if how.name == "Delete" {
			orders = append(orders, order{name: how.name + ", a delay", plan: delays, run: fails})
		}
		exploreEach(t, orders...)
	}
}

// A call after a Delete does not join a read or load of its process that is older than the Delete.
func TestOrders_InvalidationAndJoin(t *testing.T) {
	for name, deleter := range map[string]string{"deleted here": "A", "deleted elsewhere": "B"} {
		meets := func(callers ...string) func(s *scenario) {
			return func(s *scenario) {
				for _, caller := range callers {
					s.goGet("A", caller)
				}
				s.goChange(deleter, "A", deletes)
				s.end()
			}
		}
		exploreEach(t,
			order{name: name, plan: schedule.Plan{AtLeast: 50}, run: meets("early")},
			order{name: name + ", three callers", plan: schedule.Plan{Sample: 150}, run: meets("early", "perhaps late")},
		)
	}
}

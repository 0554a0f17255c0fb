package cache_test

import (
	"testing"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/schedule"
)

// A call after an invalidation does not get what was loaded before it, and a refresh does not undo the
// invalidation.
func TestOrders_Invalidation(t *testing.T) {
	all := schedule.Plan{AtLeast: 50}
	for name, announce := range map[string]announcement{"Delete": deletes, "Set": sets, "Expire": expires} {
		loads := func(s *scenario) {
			s.goGet("A", "A")
			s.goChange("B", "C", announce)
			s.end()
		}
		refreshes := func(s *scenario) {
			s.mayBeStale = name == "Expire"
			s.fillAndExpire()
			loads(s)
		}
		exploreEach(t,
			order{name: name, plan: all, run: loads},
			order{name + ", a refresh", all, singlefill.Options[string]{StaleWhileRevalidate: ttl}, refreshes},
		)
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

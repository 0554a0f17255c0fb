package cache_test

import (
	"errors"
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

// A call after Clear does not get what was loaded before it: in every order of the commands of a load
// and of Clear, the load is refused, or its value is swept.
func TestOrders_Clear(t *testing.T) {
	all, some := schedule.Plan{AtLeast: 100}, schedule.Plan{Sample: 200, Together: true}
	exploreEach(t,
		order{name: "a load elsewhere", plan: all, run: func(s *scenario) {
			s.goGet("A", "A")
			s.goChange("B", "C", clears)
			s.end()
		}},
		order{name: "a load elsewhere, and then a call in its process", plan: all, run: func(s *scenario) {
			s.goGet("A", "A")
			s.goChange("B", "A", clears)
			s.end()
		}},
		order{name: "a load here", plan: some, run: func(s *scenario) {
			s.goGet("A", "early")
			s.goChange("A", "A", clears)
			s.end()
		}},
		order{name: "a waiter", plan: some, run: func(s *scenario) {
			s.goGet("A", "A")
			s.goGet("B", "B")
			s.goChange("C", "B", clears)
			s.end()
		}},
	)
}

// A call after Clear does not get an old value in place of the error of a load that began while Clear
// ran: that load has read the old value before Clear removed it, and has its lock after Clear has
// removed the other locks.
func TestOrders_ClearAndFailedLoad(t *testing.T) {
	stale := singlefill.Options[string]{StaleIfError: ttl}
	refreshed := singlefill.Options[string]{StaleWhileRevalidate: ttl, StaleIfError: ttl}
	callIn := func(process string) func(s *scenario) {
		return func(s *scenario) {
			s.loadErr = errors.New("no answer")
			s.fillAndExpire()
			s.goGet("A", "early")
			s.goChange("B", process, clears)
			s.end()
		}
	}
	plan := schedule.Plan{AtLeast: 100, Together: true}
	exploreEach(t,
		order{"a refresh in the process of the call", plan, refreshed, callIn("A")},
		order{"a refresh elsewhere", plan, refreshed, callIn("C")},
		order{"a load in the process of the call", plan, stale, callIn("A")},
	)
}

package cache_test

import (
	"context"
	"errors"
	"testing"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/schedule"
)

func clears(ctx context.Context, c *singlefill.Cache[string]) error { return c.Clear(ctx) }

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

// A call after Clear does not get what calls for many keys have loaded before it, whose locks and values are
// not removed in one step.
func TestOrders_ClearAndMany(t *testing.T) {
	for name, process := range map[string]string{"and then a call elsewhere": "C", "and then a call in its process": "A"} {
		exploreEach(t, order{name: name, plan: schedule.Plan{Sample: 400, Together: true}, run: func(s *scenario) {
			s.ofKeys("a", "b")
			s.goGetMany("A", "A", "ab")
			s.Go("B", "B", func(ctx context.Context) {
				_ = s.changeKeys(ctx, "B", clears, s.sources["a"], s.sources["b"])
				s.At(process, "begins")
				s.getMany(ctx, process, process+", after Clear,", "b", "a")
			})
			s.end()
		}})
	}
}

// changeKeys changes several sources, and announces that by one call.
func (s *scenario) changeKeys(ctx context.Context, process string, announce announcement, of ...*source) error {
	if len(of) == 0 {
		return announce(ctx, s.cache(process))
	}
	return s.changeKey(ctx, of[0], process, func(ctx context.Context, _ *singlefill.Cache[string]) error {
		return s.changeKeys(ctx, process, announce, of[1:]...)
	})
}

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
	for _, test := range []struct {
		name string
		plan schedule.Plan
		run  func(s *scenario)
	}{
		{"a load elsewhere", schedule.Plan{AtLeast: 100}, func(s *scenario) {
			s.goGet("A", "A")
			s.goChange("B", "C", clears)
		}},
		{"a load elsewhere, and then a call in its process", schedule.Plan{AtLeast: 100}, func(s *scenario) {
			s.goGet("A", "A")
			s.goChange("B", "A", clears)
		}},
		{"a load here", schedule.Plan{Sample: 200, Together: true}, func(s *scenario) {
			s.goGet("A", "early")
			s.goChange("A", "A", clears)
		}},
		{"a waiter", schedule.Plan{Sample: 200, Together: true}, func(s *scenario) {
			s.goGet("A", "A")
			s.goGet("B", "B")
			s.goChange("C", "B", clears)
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			explore(t, test.plan, func(w *schedule.World) {
				s := newScenario(t, w, singlefill.Options[string]{})
				test.run(s)
				s.end()
			})
		})
	}
}

// A call after Clear does not get an old value in place of the error of a load that began while Clear
// ran: that load has read the old value before Clear removed it, and has its lock after Clear has
// removed those of others.
func TestOrders_ClearAndFailedLoad(t *testing.T) {
	for _, test := range []struct {
		name, process string // of the call after Clear
		opts          singlefill.Options[string]
	}{
		{"a refresh in the process of the call", "A", singlefill.Options[string]{StaleWhileRevalidate: ttl, StaleIfError: ttl}},
		{"a refresh elsewhere", "C", singlefill.Options[string]{StaleWhileRevalidate: ttl, StaleIfError: ttl}},
		{"a load in the process of the call", "A", singlefill.Options[string]{StaleIfError: ttl}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			explore(t, schedule.Plan{AtLeast: 100, Together: true}, func(w *schedule.World) {
				s := newScenario(t, w, test.opts)
				s.loadErr = errors.New("no answer")
				s.fillAndExpire()
				s.goGet("A", "early")
				s.goChange("B", test.process, clears)
				s.end()
			})
		})
	}
}

// A call after Clear does not get what calls for many keys have loaded before it, whose locks and values are not removed in one step.
func TestOrders_ClearAndMany(t *testing.T) {
	for _, test := range []struct {
		name, process string // of the call after Clear
		plan          schedule.Plan
	}{
		{"and then a call elsewhere", "C", schedule.Plan{AtLeast: 200, Together: true}},
		{"and then a call in its process", "A", schedule.Plan{AtLeast: 200, Together: true}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			explore(t, test.plan, func(w *schedule.World) {
				s := newManyScenario(t, w, "a", "b")
				s.goGetMany("A", "A", "ab")
				s.Go("B", "B", func(ctx context.Context) {
					_ = s.changeKeys(ctx, "B", clears, s.sources["a"], s.sources["b"])
					s.At(test.process, "begins")
					s.getMany(ctx, test.process, test.process+", after Clear,", "b", "a")
				})
				s.end()
			})
		})
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

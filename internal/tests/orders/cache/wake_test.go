package cache_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/schedule"
)

// The processes of these tests listen for wake-ups. Loads take so long that a waiter listens when they
// end. Then each wake-up arrives before or after any other command, or never.
var (
	hears = schedule.Plan{AtLeast: 40, Sample: 40, Listen: true}
	loses = schedule.Plan{AtLeast: 40, Sample: 40, Listen: true, Faults: 2, Lose: true}
	mixed = schedule.Plan{
		AtLeast: 60, Sample: 60, Listen: true, Pauses: 1, Faults: 3, Cancel: []string{"A", "B"}, Break: true,
		Hold: []time.Duration{3 * schedule.Step}, Cut: []time.Duration{lockTTL + 2*schedule.Step},
	}
)

// listensAfter is how long a waiter takes at most until it listens.
const listensAfter = 2 * schedule.Step

// exploreWakeUps runs a scenario with each of the plans.
func exploreWakeUps(t *testing.T, run func(s *scenario)) {
	for name, plan := range map[string]schedule.Plan{"all arrive": hears, "some are lost": loses, "some are late, and other faults": mixed} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			explore(t, plan, func(w *schedule.World) {
				s := newScenario(t, w, singlefill.Options[string]{})
				s.loadTime = listensAfter
				s.mayOverlap = plan.Break
				run(s)
			})
		})
	}
}

// A cold key is loaded once, and each waiter gets the value, whatever happens to wake-ups.
func TestOrders_WakeUps(t *testing.T) {
	exploreWakeUps(t, func(s *scenario) {
		for _, p := range []string{"A", "B"} {
			s.goGet(p, p)
		}
		s.end()
		if !s.mayOverlap {
			s.wantLoads(1)
		}
	})
}

// A failed load reaches its waiters, whatever happens to wake-ups.
func TestOrders_WakeUpsOfFailures(t *testing.T) {
	exploreWakeUps(t, func(s *scenario) {
		s.loadErr = errors.New("no answer")
		for _, p := range []string{"A", "B"} {
			s.Go(p, p, func(ctx context.Context) {
				if _, err := s.get(ctx, p, p); err == nil {
					s.Errorf("%s got no error", p)
				}
			})
		}
		s.end()
	})
}

// A call after an invalidation does not get what was loaded before it, whatever happens to wake-ups.
// Another process waits for the load that the invalidation supersedes.
func TestOrders_WakeUpsAndInvalidation(t *testing.T) {
	for _, how := range announcements {
		t.Run(how.name, func(t *testing.T) {
			exploreWakeUps(t, func(s *scenario) {
				s.goGet("A", "A")
				s.goGet("B", "B")
				s.Go("C", "C", func(ctx context.Context) {
					time.Sleep(listensAfter)
					s.At("C", "changes the source")
					s.change(ctx, "C", how.announce)
					s.At("B", "begins")
					_, _ = s.get(ctx, "B", "B, after the change,")
				})
				s.end()
			})
		})
	}
}

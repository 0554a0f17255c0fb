package cache_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/schedule"
)

var refreshed = singlefill.Options[string]{StaleWhileRevalidate: ttl, RetryAfter: time.Minute}

// A failed refresh keeps all processes from the source until RetryAfter.
func TestOrders_FailedRefresh(t *testing.T) {
	t.Parallel()
	explore(t, schedule.Plan{AtLeast: 50}, refreshed, func(s *scenario) {
		s.loadErr = errors.New("no answer")
		s.fillAndExpire()
		for _, p := range []string{"A", "B"} {
			s.Go(p, p, func() {
				if v, err := s.get(p, p); v != "v1" || err != nil {
					s.Errorf("%s got %q, %v; want the stale value", p, v, err)
				}
			})
		}
		s.end()
		s.wantLoads(1)
	})
}

// A caller without a value to fall back on loads in spite of a failed refresh. Only a load that a
// caller waited for may fail it.
func TestOrders_FailedRefreshAndDelete(t *testing.T) {
	t.Parallel()
	explore(t, schedule.Plan{AtLeast: 50}, refreshed, func(s *scenario) {
		s.loadErr = errors.New("no answer")
		s.fillAndExpire()
		var errA, errC error
		s.Go("A", "A", func() { _, errA = s.get("A", "A") })
		s.Go("B", "B", func() {
			s.change("B", deletes)
			s.At("C", "begins")
			_, errC = s.cache("C").GetOrLoad(context.Background(), "k", func(context.Context, string) (string, error) {
				s.At("C", "loads")
				return "v2", nil
			})
		})
		s.end()
		if errC != nil && errA == nil {
			s.Errorf("the caller got %v, although A's failed refresh had no other waiter", errC)
		}
	})
}

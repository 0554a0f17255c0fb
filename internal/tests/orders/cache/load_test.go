package cache_test

import (
	"context"
	"errors"
	"io"
	"sync/atomic"
	"testing"
	"time"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/schedule"
)

// A cold key is loaded once.
func TestOrders_ColdKey(t *testing.T) {
	t.Parallel()
	explore(t, schedule.Plan{AtLeast: 200, Together: true}, singlefill.Options[string]{}, func(s *scenario) {
		for _, p := range []string{"A", "B", "C"} {
			s.goGet(p, p)
		}
		s.end()
		s.wantLoads(1)
	})
}

// A failed load reaches all callers that waited for it.
func TestOrders_FailedLoad(t *testing.T) {
	for _, test := range []struct {
		name string
		load singlefill.Loader[string]
	}{
		{"an error", func(context.Context, string) (string, error) { return "", io.ErrUnexpectedEOF }},
		{"a panic", func(context.Context, string) (string, error) { panic("a bug") }},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			explore(t, schedule.Plan{AtLeast: 50}, singlefill.Options[string]{}, func(s *scenario) {
				for _, p := range []string{"A", "B"} {
					var loaded, waited atomic.Bool
					s.opts.Trace = &singlefill.Trace{WaitDone: func(context.Context, singlefill.WaitInfo) { waited.Store(true) }}
					c := s.newCache(s.Client(p))
					s.caches[p] = c
					s.Go(p, p, func() {
						_, err := c.GetOrLoad(context.Background(), "k", func(ctx context.Context, key string) (string, error) {
							loaded.Store(true)
							s.At(p, "loads")
							return test.load(ctx, key)
						})
						var remote *singlefill.RemoteError
						switch {
						case err == nil:
							s.Errorf("%s got no error", p)
						case waited.Load() && (loaded.Load() || !errors.As(err, &remote)):
							s.Errorf("%s waited for a load that failed, and got %v; it has loaded: %t", p, err, loaded.Load())
						}
					})
				}
				s.end()
				if s.Server.Exists("ns:{k}") {
					s.Errorf("a failure is stored")
				}
			})
		})
	}
}

// A failed load leaves the lock of another process alone.
func TestOrders_FailedLoadAndDelete(t *testing.T) {
	t.Parallel()
	explore(t, schedule.Plan{AtLeast: 50, Together: true}, singlefill.Options[string]{}, func(s *scenario) {
		s.loadErr, s.failing = errors.New("no answer"), "A"
		s.goGet("A", "A")
		s.goChange("B", "C", deletes)
		s.end()
	})
}

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

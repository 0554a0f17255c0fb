package prometheus

import (
	"context"
	"errors"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/singlefill/singlefill/lock"
)

// lockMetrics are counted as leases and waits begin and end.
type lockMetrics struct {
	held        *prometheus.GaugeVec
	acquired    *prometheus.CounterVec
	lost        *prometheus.CounterVec
	expired     *prometheus.CounterVec
	waits       *prometheus.HistogramVec
	holds       *prometheus.HistogramVec
	redisErrors *prometheus.CounterVec
}

func newLockMetrics() *lockMetrics {
	return &lockMetrics{
		held:        prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "singlefill_lock_held", Help: "Leases held by this process."}, []string{"lock"}),
		acquired:    newCounters("lock_acquired_total", "Leases granted.", "lock"),
		lost:        newCounters("lock_lost_total", "Leases that ended before their release.", "lock"),
		expired:     newCounters("lock_expired_total", "Leases of other callers that were found to have ended without a release.", "lock"),
		waits:       newHistograms("lock_wait_duration_seconds", "Duration of the calls of Acquire that had to wait.", "lock", "result"),
		holds:       newHistograms("lock_hold_duration_seconds", "Time from the grant of a lease to its end.", "lock"),
		redisErrors: newCounters("lock_redis_errors_total", "Redis commands of locks that failed.", "lock", "op"),
	}
}

// LockTrace returns the functions that count what Lockers do under one value of the label lock. Give it
// to [lock.Options] or [lock.Locker.AddTrace]:
//
//	jobs.AddTrace(collector.LockTrace("jobs"))
//
// Lockers of many names may have the same label: choose a label that says what the locks are for, not
// a label for each user or order.
func (c *Collector) LockTrace(label string) *lock.Trace {
	m := c.locks
	held, acquired, lost := m.held.WithLabelValues(label), m.acquired.WithLabelValues(label), m.lost.WithLabelValues(label)
	expired, holds := m.expired.WithLabelValues(label), m.holds.WithLabelValues(label)
	for _, result := range []string{"acquired", "busy", "error"} {
		m.waits.WithLabelValues(label, result)
	}
	for _, op := range []string{"acquire", "renew", "release", "abandon"} {
		m.redisErrors.WithLabelValues(label, op)
	}
	ended := func(info lock.LeaseInfo) {
		held.Dec()
		holds.Observe(info.Duration.Seconds())
	}
	return &lock.Trace{
		Acquired: func(context.Context, lock.LeaseInfo) { held.Inc(); acquired.Inc() },
		Released: func(_ context.Context, info lock.LeaseInfo) { ended(info) },
		Lost:     func(_ context.Context, info lock.LeaseInfo) { ended(info); lost.Inc() },
		Expired:  func(context.Context, lock.LeaseInfo) { expired.Inc() },
		Waited: func(_ context.Context, info lock.LeaseInfo) {
			result := "acquired"
			switch {
			case errors.Is(info.Err, lock.ErrBusy):
				result = "busy"
			case info.Err != nil:
				result = "error"
			}
			m.waits.WithLabelValues(label, result).Observe(info.Duration.Seconds())
		},
		RedisError: func(_ context.Context, op string, _ error) { m.redisErrors.WithLabelValues(label, op).Inc() },
	}
}

func (m *lockMetrics) all() []prometheus.Collector {
	return []prometheus.Collector{m.held, m.acquired, m.lost, m.expired, m.waits, m.holds, m.redisErrors}
}

package prometheus

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/singlefill/singlefill"
)

// loadMetrics are counted as loads and waits end.
type loadMetrics struct {
	loads       *prometheus.CounterVec
	durations   *prometheus.HistogramVec
	waits       *prometheus.HistogramVec
	redisErrors *prometheus.CounterVec
}

func newLoadMetrics() *loadMetrics {
	return &loadMetrics{
		loads:       newCounters("loads_total", "Keys loaded.", "cache", "kind", "result"),
		durations:   newHistograms("load_duration_seconds", "Duration of the calls of Loaders and ManyLoaders.", "cache", "kind"),
		waits:       newHistograms("wait_duration_seconds", "Duration of waits for a load in another process.", "cache"),
		redisErrors: newCounters("redis_errors_total", "Redis commands that failed.", "cache", "op"),
	}
}

func newCounters(name, help string, labels ...string) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "singlefill_" + name, Help: help}, labels)
}

func newHistograms(name, help string, labels ...string) *prometheus.HistogramVec {
	return prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "singlefill_" + name, Help: help,
		Buckets: buckets,
		// A bucket is a tenth wider than the one before.
		NativeHistogramBucketFactor: 1.1, NativeHistogramMaxBucketNumber: 100, NativeHistogramMinResetDuration: time.Hour,
	}, labels)
}

// buckets reach from a round trip to the default of LoadTimeout.
var buckets = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30}

// Results of a load.
const (
	value    = "value"
	notFound = "not_found"
	failed   = "error"
	panicked = "panic"
)

// trace returns the functions that count for one cache.
func (m *loadMetrics) trace(namespace string) *singlefill.Trace {
	for _, kind := range []string{"call", "refresh"} { // zero is a value
		m.durations.WithLabelValues(namespace, kind)
		for _, result := range []string{value, notFound, failed, panicked} {
			m.loads.WithLabelValues(namespace, kind, result)
		}
	}
	for _, op := range []string{"get", "lock", "store", "release", "renew", "abandon", "set", "delete", "expire", "clear", "tag", "near", "wake", "fleet", "audit", "check", "ping"} {
		m.redisErrors.WithLabelValues(namespace, op)
	}
	waits := m.waits.WithLabelValues(namespace)
	return &singlefill.Trace{
		LoadStart: func(ctx context.Context, _ string) context.Context {
			return context.WithValue(ctx, loaderKey{m}, new(loader))
		},
		LoadDone: func(ctx context.Context, info singlefill.LoadInfo) {
			kind := "call"
			if info.Refresh {
				kind = "refresh"
			}
			m.loads.WithLabelValues(namespace, kind, resultOf(info.Err)).Inc()
			if l, ok := ctx.Value(loaderKey{m}).(*loader); ok && info.Keys > 0 && l.observed.CompareAndSwap(false, true) {
				m.durations.WithLabelValues(namespace, kind).Observe(info.Duration.Seconds())
			}
		},
		WaitDone: func(_ context.Context, info singlefill.WaitInfo) { waits.Observe(info.Duration.Seconds()) },
		RedisError: func(_ context.Context, op string, _ error) {
			m.redisErrors.WithLabelValues(namespace, op).Inc()
		},
	}
}

// A loader is a call of a Loader or ManyLoader: LoadDone is called for each key of a ManyLoader.
type loader struct{ observed atomic.Bool }

type loaderKey struct{ m *loadMetrics } // several Collectors may observe one cache

func resultOf(err error) (result string) {
	if err == nil {
		return value
	}
	defer func() {
		if recover() != nil { // a method of err
			result = failed
		}
	}()
	if _, ok := errors.AsType[*singlefill.PanicError](err); ok {
		return panicked
	}
	if _, ofOthers := errors.AsType[*singlefill.ManyError](err); !ofOthers && errors.Is(err, singlefill.ErrNotFound) {
		return notFound
	}
	return failed
}

func (m *loadMetrics) all() []prometheus.Collector {
	return []prometheus.Collector{m.loads, m.durations, m.waits, m.redisErrors}
}

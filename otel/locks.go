package otel

import (
	"context"
	"errors"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/singlefill/singlefill/lock"
)

// LockTrace returns functions that count what Lockers do under one value of the attribute
// singlefill.lock, and that make a span "wait LABEL" of each Acquire that had to wait. Give them to
// [lock.Options] or [lock.Locker.AddTrace]:
//
//	trace, err := sfotel.LockTrace("jobs", nil)
//	...
//	jobs.AddTrace(trace)
//
// Lockers of many names may have the same label: choose a label that says what the locks are for, not
// a label for each user or order. A span has the status Error if Acquire failed, and the attribute
// singlefill.result of singlefill.lock.wait.duration.
//
// LockTrace returns an error if label is empty or if the MeterProvider refuses an instrument.
func LockTrace(label string, opts *Options) (*lock.Trace, error) {
	if label == "" {
		return nil, errors.New(`singlefill/otel: label is "": any other text is allowed`)
	}
	o := opts.withDefaults()
	l, err := newLocks(&o, lockKey.String(label))
	if err != nil {
		return nil, err
	}
	return l.trace(), nil
}

// locks has the metrics and spans of the locks of one label.
type locks struct {
	label metric.MeasurementOption
	spans

	held        metric.Int64UpDownCounter
	acquired    metric.Int64Counter
	lost        metric.Int64Counter
	expired     metric.Int64Counter
	waits       metric.Float64Histogram
	holds       metric.Float64Histogram
	redisErrors metric.Int64Counter
}

func newLocks(o *Options, label attribute.KeyValue) (*locks, error) {
	m := &maker{meter: o.meter()}
	l := &locks{
		label:       metric.WithAttributes(label),
		spans:       newSpans(o, label),
		held:        m.upDownCounter("singlefill.lock.held", "{lease}", "Leases held by this process."),
		acquired:    m.counter("singlefill.lock.acquired", "{lease}", "Leases granted."),
		lost:        m.counter("singlefill.lock.lost", "{lease}", "Leases that ended before their release."),
		expired:     m.counter("singlefill.lock.expired", "{lease}", "Leases of other callers that were found to have ended without a release."),
		waits:       m.histogram("singlefill.lock.wait.duration", "Duration of the calls of Acquire that had to wait."),
		holds:       m.histogram("singlefill.lock.hold.duration", "Time from the grant of a lease to its end."),
		redisErrors: m.counter("singlefill.lock.redis.errors", "{command}", "Redis commands of locks that failed."),
	}
	return l, m.err
}

func (l *locks) trace() *lock.Trace {
	return &lock.Trace{
		Acquired: func(ctx context.Context, _ lock.LeaseInfo) {
			l.held.Add(ctx, 1, l.label)
			l.acquired.Add(ctx, 1, l.label)
		},
		Released: l.ended,
		Lost: func(ctx context.Context, info lock.LeaseInfo) {
			l.ended(ctx, info)
			l.lost.Add(ctx, 1, l.label)
		},
		Expired: func(ctx context.Context, _ lock.LeaseInfo) { l.expired.Add(ctx, 1, l.label) },
		Waited:  l.waitEnded,
		RedisError: func(ctx context.Context, op string, _ error) {
			l.redisErrors.Add(ctx, 1, metric.WithAttributes(l.name, opKey.String(op)))
		},
	}
}

func (l *locks) ended(ctx context.Context, info lock.LeaseInfo) {
	l.held.Add(ctx, -1, l.label)
	l.holds.Record(ctx, info.Duration.Seconds(), l.label)
}

func (l *locks) waitEnded(ctx context.Context, info lock.LeaseInfo) {
	result := resultKey.String("acquired")
	switch {
	case errors.Is(info.Err, lock.ErrBusy):
		result = resultKey.String("busy")
	case info.Err != nil:
		result = resultKey.String("error")
	}
	l.waits.Record(ctx, info.Duration.Seconds(), metric.WithAttributes(l.name, result))
	attrs := []attribute.KeyValue{result}
	if l.keys {
		attrs = append(attrs, attribute.String("singlefill.lock.name", info.Name))
		if info.Holder != "" {
			attrs = append(attrs, attribute.String("singlefill.lock.holder", info.Holder))
		}
	}
	span := l.waited(ctx, info.Duration, attrs)
	l.fail(span, info.Err)
	span.End()
}

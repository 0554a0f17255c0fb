package otel

import (
	"errors"
	"fmt"

	"go.opentelemetry.io/otel/metric"
)

// A maker makes instruments and collects the errors.
type maker struct {
	meter metric.Meter
	err   error
}

func (m *maker) note(name string, err error) {
	if err != nil {
		m.err = errors.Join(m.err, fmt.Errorf("singlefill/otel: the MeterProvider refuses the instrument %s: %w", name, err))
	}
}

func (m *maker) counter(name, unit, description string) metric.Int64Counter {
	c, err := m.meter.Int64Counter(name, metric.WithUnit(unit), metric.WithDescription(description))
	m.note(name, err)
	return c
}

func (m *maker) upDownCounter(name, unit, description string) metric.Int64UpDownCounter {
	c, err := m.meter.Int64UpDownCounter(name, metric.WithUnit(unit), metric.WithDescription(description))
	m.note(name, err)
	return c
}

// buckets reach from a round trip to the default of LoadTimeout.
var buckets = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30}

// histogram makes a histogram of seconds.
func (m *maker) histogram(name, description string) metric.Float64Histogram {
	h, err := m.meter.Float64Histogram(name, metric.WithUnit("s"), metric.WithDescription(description),
		metric.WithExplicitBucketBoundaries(buckets...))
	m.note(name, err)
	return h
}

func (m *maker) observable(s statMetric) (o metric.Int64Observable) {
	var err error
	if s.kind == counter {
		o, err = m.meter.Int64ObservableCounter(s.name, metric.WithUnit(s.unit), metric.WithDescription(s.description))
	} else {
		o, err = m.meter.Int64ObservableUpDownCounter(s.name, metric.WithUnit(s.unit), metric.WithDescription(s.description))
	}
	m.note(s.name, err)
	return o
}

package otel

import (
	"errors"
	"reflect"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/singlefill/singlefill"
)

// scope names this package to OpenTelemetry.
const scope = "github.com/singlefill/singlefill/otel"

// A Cache is a *singlefill.Cache of any type. The interface is for that type alone: it may get methods.
type Cache interface {
	Namespace() string
	Stats() singlefill.Stats
	AddTrace(t *singlefill.Trace)
}

// Options are the settings of [Instrument] and [LockTrace]. A nil *Options, like the zero value, means
// the defaults.
type Options struct {
	// MeterProvider gets the metrics. Default: the global one, otel.GetMeterProvider. A provider of
	// package go.opentelemetry.io/otel/metric/noop turns them off.
	MeterProvider metric.MeterProvider

	// TracerProvider gets the spans. Default: the global one, otel.GetTracerProvider. A provider of
	// package go.opentelemetry.io/otel/trace/noop turns them off.
	TracerProvider trace.TracerProvider

	// Keys adds keys to the spans as singlefill.keys, names of locks as singlefill.lock.name,
	// names of their holders as singlefill.lock.holder, and the texts of errors, which may contain keys and names, as
	// descriptions of the status. All of these may be secret.
	// Default: no.
	Keys bool
}

// withDefaults returns a copy.
func (o *Options) withDefaults() (c Options) {
	if o != nil {
		c = *o
	}
	if c.MeterProvider == nil {
		c.MeterProvider = otel.GetMeterProvider()
	}
	if c.TracerProvider == nil {
		c.TracerProvider = otel.GetTracerProvider()
	}
	return c
}

func (o *Options) meter() metric.Meter { return o.MeterProvider.Meter(scope) }

// Instrument adds the metrics and spans of this package to a cache. Call it once for each cache, before
// its first use: a load that runs already gets no span.
//
// Most programs ignore the registration. Its Unregister ends the metrics that are read from Stats and
// frees the cache, for a program that closes caches while it goes on. What the cache itself reports,
// its loads, waits and failed commands, cannot be removed from it and ends with it.
//
// Instrument returns an error, and adds nothing to the cache, if cache is nil or if the MeterProvider
// refuses an instrument.
func Instrument(cache Cache, opts *Options) (metric.Registration, error) {
	if v := reflect.ValueOf(cache); !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil() {
		return nil, errors.New("singlefill/otel: cache is nil: a *singlefill.Cache is needed")
	}
	o := opts.withDefaults()
	name := cacheKey.String(cache.Namespace())
	loads, err := newLoads(&o, name)
	if err != nil {
		return nil, err
	}
	registration, err := observeStats(o.meter(), cache, name)
	if err != nil {
		return nil, err
	}
	cache.AddTrace(loads.trace())
	return registration, nil
}

// Attributes of metrics and spans.
const (
	cacheKey  attribute.Key = "singlefill.cache"
	layerKey  attribute.Key = "singlefill.layer"
	resultKey attribute.Key = "singlefill.result"
	reasonKey attribute.Key = "singlefill.reason"
	kindKey   attribute.Key = "singlefill.kind"
	opKey     attribute.Key = "singlefill.op"
	lockKey   attribute.Key = "singlefill.lock"
)

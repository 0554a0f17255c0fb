package otel_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/redis/go-redis/v9"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	metricnoop "go.opentelemetry.io/otel/metric/noop"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
	sfotel "github.com/singlefill/singlefill/otel"
)

func TestMain(m *testing.M) { redistest.Main(m) }

// A telemetry records the metrics and spans of a test.
type telemetry struct {
	sfotel.Options
	spans  *tracetest.SpanRecorder
	reader *sdkmetric.ManualReader
}

// newTelemetry returns a telemetry. The test fails if a span is never ended. A second end has no effect.
func newTelemetry(t testing.TB) *telemetry {
	x := &telemetry{spans: tracetest.NewSpanRecorder(), reader: sdkmetric.NewManualReader()}
	x.TracerProvider = sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(x.spans))
	x.MeterProvider = sdkmetric.NewMeterProvider(sdkmetric.WithReader(x.reader))
	t.Cleanup(func() {
		if started, ended := len(x.spans.Started()), len(x.spans.Ended()); started != ended {
			t.Errorf("%d spans have begun, and %d have ended", started, ended)
		}
	})
	return x
}

// newCache returns a cache that is instrumented with x.
func (x *telemetry) newCache(t testing.TB, rdb redis.UniversalClient, namespace string,
	opts *singlefill.Options[string]) *singlefill.Cache[string] {
	t.Helper()
	c := cachetest.NewCacheIn(t, rdb, namespace, opts)
	x.instrument(t, c)
	return c
}

func (x *telemetry) instrument(t testing.TB, c sfotel.Cache) metric.Registration {
	t.Helper()
	registration, err := sfotel.Instrument(c, &x.Options)
	redistest.Must(t, err)
	return registration
}

// request returns a context with the span of a request, which x does not record.
func (x *telemetry) request(ctx context.Context) (context.Context, trace.SpanContext) {
	n := byte(requests.Add(1))
	of := trace.NewSpanContext(trace.SpanContextConfig{
		TraceID: trace.TraceID{1, n}, SpanID: trace.SpanID{1, n}, TraceFlags: trace.FlagsSampled,
	})
	return trace.ContextWithSpanContext(ctx, of), of
}

var requests atomic.Int64

// collect returns the metrics of this module.
func (x *telemetry) collect(t testing.TB) []metricdata.Metrics {
	t.Helper()
	var all metricdata.ResourceMetrics
	redistest.Must(t, x.reader.Collect(t.Context(), &all))
	var metrics []metricdata.Metrics
	for _, scope := range all.ScopeMetrics {
		metrics = append(metrics, scope.Metrics...)
	}
	return metrics
}

// values returns the values of the metrics, without zeros, and for histograms the number of
// observations: by name and by attributes in the order of their names, all without "singlefill.".
func (x *telemetry) values(t testing.TB) map[string]float64 {
	t.Helper()
	values := make(map[string]float64)
	add := func(name string, attrs attribute.Set, v float64) {
		if v != 0 {
			name = strings.TrimPrefix(name, "singlefill.")
			values[strings.Join(append([]string{name}, words(attrs.ToSlice())...), " ")] = v
		}
	}
	for _, m := range x.collect(t) {
		switch data := m.Data.(type) {
		case metricdata.Sum[int64]:
			for _, p := range data.DataPoints {
				add(m.Name, p.Attributes, float64(p.Value))
			}
		case metricdata.Gauge[float64]:
			for _, p := range data.DataPoints {
				add(m.Name, p.Attributes, p.Value)
			}
		case metricdata.Histogram[float64]:
			for _, p := range data.DataPoints {
				add(m.Name, p.Attributes, float64(p.Count))
			}
		default:
			t.Errorf("%s has data of type %T", m.Name, data)
		}
	}
	return values
}

func (x *telemetry) wantValues(t testing.TB, want map[string]float64) {
	t.Helper()
	if got := x.values(t); !maps.Equal(got, want) {
		t.Errorf("values:\n%s\nwant:\n%s", lines(got), lines(want))
	}
}

// lines returns values as text, a line for each.
func lines(values map[string]float64) string {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(values)) {
		fmt.Fprintln(&b, name, values[name])
	}
	return b.String()
}

// words returns attributes as texts.
func words(attrs []attribute.KeyValue) (words []string) {
	for _, a := range attrs {
		words = append(words, strings.TrimPrefix(string(a.Key), "singlefill.")+"="+a.Value.String())
	}
	slices.Sort(words)
	return words
}

// wantSpans compares the spans that have been ended, in any order. A span is its name, the attributes
// in the order of their names, and its status if that is Error.
func (x *telemetry) wantSpans(t testing.TB, want ...string) {
	t.Helper()
	var got []string
	for _, s := range x.spans.Ended() {
		line := s.Name() + ": " + strings.Join(words(s.Attributes()), " ")
		if status := s.Status(); status.Code.String() == "Error" {
			line += fmt.Sprintf(", Error %q", status.Description)
		}
		got = append(got, line)
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("spans:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func gives(v string) singlefill.Loader[string] {
	return func(context.Context, string) (string, error) { return v, nil }
}

func fails(err error) singlefill.Loader[string] {
	return func(context.Context, string) (string, error) { return "", err }
}

type fakeCache struct{ traces []*singlefill.Trace }

func (*fakeCache) Namespace() string              { return "ns" }
func (*fakeCache) Stats() singlefill.Stats        { return singlefill.Stats{} }
func (c *fakeCache) AddTrace(t *singlefill.Trace) { c.traces = append(c.traces, t) }

// A hit calls nothing of this package.
func TestInstrument_HitsAreFree(t *testing.T) {
	t.Parallel()
	var c fakeCache
	newTelemetry(t).instrument(t, &c)
	if tr := c.traces[0]; tr.Hit != nil || tr.Miss != nil || tr.Stale != nil {
		t.Error("it is called for hits")
	}
}

// An error names what is wrong, and nothing is added to the cache.
func TestInstrument_Errors(t *testing.T) {
	t.Parallel()
	for _, none := range []sfotel.Cache{nil, (*singlefill.Cache[string])(nil)} { // the second: New returned an error
		if _, err := sfotel.Instrument(none, nil); err == nil || !strings.Contains(err.Error(), "cache is nil") {
			t.Errorf("a nil cache: %v", err)
		}
	}
	if _, err := sfotel.LockTrace("", nil); err == nil || !strings.Contains(err.Error(), `label is ""`) {
		t.Errorf("an empty label: %v", err)
	}
	for _, name := range []string{"singlefill.loads", "singlefill.gets", "callback"} {
		var c fakeCache
		_, err := sfotel.Instrument(&c, &sfotel.Options{MeterProvider: refusingProvider{refuses: name}})
		if !errors.Is(err, errRefused) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s is refused: err = %v, want one that wraps the provider's and names it", name, err)
		}
		if len(c.traces) > 0 {
			t.Errorf("%s is refused: the cache has a Trace", name)
		}
	}
	const lost = "singlefill.lock.lost"
	tr, err := sfotel.LockTrace("jobs", &sfotel.Options{MeterProvider: refusingProvider{refuses: lost}})
	if !errors.Is(err, errRefused) || !strings.Contains(err.Error(), lost) || tr != nil {
		t.Errorf("%s is refused: %v, %v", lost, tr, err)
	}
}

var errRefused = errors.New("refused")

// A refusingProvider refuses one counter, or callbacks.
type refusingProvider struct {
	metricnoop.MeterProvider
	refuses string
}

func (p refusingProvider) Meter(string, ...metric.MeterOption) metric.Meter {
	return refusingMeter{refuses: p.refuses}
}

type refusingMeter struct {
	metricnoop.Meter
	refuses string
}

func (m refusingMeter) check(name string) error {
	if name == m.refuses {
		return errRefused
	}
	return nil
}

func (m refusingMeter) Int64Counter(name string, _ ...metric.Int64CounterOption) (metric.Int64Counter, error) {
	return metricnoop.Int64Counter{}, m.check(name)
}

func (m refusingMeter) Int64ObservableCounter(name string, _ ...metric.Int64ObservableCounterOption) (metric.Int64ObservableCounter, error) {
	return metricnoop.Int64ObservableCounter{}, m.check(name)
}

func (m refusingMeter) RegisterCallback(metric.Callback, ...metric.Observable) (metric.Registration, error) {
	return metricnoop.Registration{}, m.check("callback")
}

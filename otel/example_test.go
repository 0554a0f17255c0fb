package otel_test

import (
	"context"
	"fmt"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	"go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/singlefill/singlefill"
	sfotel "github.com/singlefill/singlefill/otel"
)

func Example() {
	ctx := context.Background()
	server, err := miniredis.Run() // in production: redis.NewClient with the address of your Redis
	if err != nil {
		panic(err)
	}
	defer server.Close()
	rdb := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer rdb.Close()

	// A program sets these up once, in production with exporters.
	spans, reader := tracetest.NewInMemoryExporter(), metric.NewManualReader()
	tracers := trace.NewTracerProvider(trace.WithSyncer(spans)) // in production: trace.WithBatcher
	defer tracers.Shutdown(ctx)
	meters := metric.NewMeterProvider(metric.WithReader(reader)) // in production: a metric.NewPeriodicReader
	defer meters.Shutdown(ctx)
	otel.SetTracerProvider(tracers)
	otel.SetMeterProvider(meters)

	users, err := singlefill.New[string](rdb, "users", 5*time.Minute, nil)
	if err != nil {
		panic(err)
	}
	if _, err := sfotel.Instrument(users, nil); err != nil {
		panic(err)
	}

	for range 3 {
		if _, err := users.GetOrLoad(ctx, "42", func(context.Context, string) (string, error) { return "Ada", nil }); err != nil {
			panic(err)
		}
	}
	if err := users.Close(); err != nil { // a span may end after the call that it is for
		panic(err)
	}
	for _, span := range spans.GetSpans() {
		fmt.Println("span:", span.Name)
	}
	var metrics metricdata.ResourceMetrics
	if err := reader.Collect(ctx, &metrics); err != nil {
		panic(err)
	}
	for _, m := range metrics.ScopeMetrics[0].Metrics {
		if m.Name == "singlefill.gets" {
			for _, p := range m.Data.(metricdata.Sum[int64]).DataPoints {
				result, _ := p.Attributes.Value("singlefill.result")
				if p.Value > 0 {
					fmt.Println(m.Name, result.AsString(), p.Value)
				}
			}
		}
	}
	// Unordered output:
	// span: load users
	// singlefill.gets hit 2
	// singlefill.gets miss 1
}

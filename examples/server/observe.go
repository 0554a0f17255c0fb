package main

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"os"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/singlefill/singlefill/lock"
	sfotel "github.com/singlefill/singlefill/otel"
	sfprometheus "github.com/singlefill/singlefill/prometheus"
	"go.opentelemetry.io/otel/exporters/stdout/stdouttrace"
	"go.opentelemetry.io/otel/metric/noop"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	nospans "go.opentelemetry.io/otel/trace/noop"
)

// observe returns the handler of /metrics. Spans go to tracers.
func observe(c *caches, outbox *lock.Locker, tracers trace.TracerProvider) (http.Handler, error) {
	spans := &sfotel.Options{TracerProvider: tracers, MeterProvider: noop.NewMeterProvider()} // Prometheus has the metrics
	for _, cache := range []sfotel.Cache{c.products, c.catalog} {
		if _, err := sfotel.Instrument(cache, spans); err != nil {
			return nil, err
		}
	}
	collector := sfprometheus.NewCollector(c.products, c.catalog)
	outbox.AddTrace(collector.LockTrace("outbox"))
	registry := prometheus.NewRegistry()
	registry.MustRegister(collector, collectors.NewGoCollector())
	return promhttp.HandlerFor(registry, promhttp.HandlerOpts{}), nil
}

// openSpans returns where spans go: to a file as JSON, or nowhere if its name is empty. In production an
// exporter of OTLP sends them to a collector.
func openSpans(name string) (tracers trace.TracerProvider, stop func(), err error) {
	if name == "" {
		return nospans.NewTracerProvider(), func() {}, nil
	}
	file, err := os.OpenFile(name, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, nil, err
	}
	exporter, err := stdouttrace.New(stdouttrace.WithWriter(file))
	if err != nil {
		file.Close()
		return nil, nil, err
	}
	provider := sdktrace.NewTracerProvider(sdktrace.WithBatcher(exporter))
	return provider, func() {
		if err := errors.Join(provider.Shutdown(context.Background()), file.Close()); err != nil {
			slog.Error("spans may be lost", "file", name, "err", err)
		}
	}, nil
}

// health answers 200 also while Redis is away: the service works without it, and a restart would not
// bring it back.
func (s *service) health(w http.ResponseWriter, _ *http.Request) {
	state := "ok"
	if s.products.Stats().BreakerOpen || s.catalog.Stats().BreakerOpen {
		state = "away"
	}
	reply(w, map[string]string{"redis": state})
}

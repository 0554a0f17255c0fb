package main

import (
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/singlefill/singlefill/lock"
	sfotel "github.com/singlefill/singlefill/otel"
	sfprometheus "github.com/singlefill/singlefill/prometheus"
	"go.opentelemetry.io/otel/metric/noop"
)

// observe returns the handler of /metrics. Spans go to the global TracerProvider, which a program sets to one with an
// exporter of OTLP: see otel.SetTracerProvider.
func observe(c *caches, outbox *lock.Locker) (http.Handler, error) {
	spans := &sfotel.Options{MeterProvider: noop.NewMeterProvider()} // Prometheus has the metrics
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

// health answers 200 also while Redis is away: the service works without it, and a restart would not
// bring it back.
func (s *service) health(w http.ResponseWriter, _ *http.Request) {
	state := "ok"
	if s.products.Stats().BreakerOpen || s.catalog.Stats().BreakerOpen {
		state = "away"
	}
	reply(w, map[string]string{"redis": state})
}

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/lock"
	sfotel "github.com/singlefill/singlefill/otel"
	sfprometheus "github.com/singlefill/singlefill/prometheus"
	"go.opentelemetry.io/otel/exporters/stdout/stdouttrace"
	"go.opentelemetry.io/otel/metric/noop"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	nospans "go.opentelemetry.io/otel/trace/noop"
)

// observe returns the handler of /metrics, and writes to the log what an operator has to know. Spans go
// to tracers.
func observe(products *singlefill.Cache[Product], outbox *lock.Locker,
	tracers trace.TracerProvider) (http.Handler, error) {
	products.AddTrace(singlefill.LogTrace(slog.With("cache", products.Namespace()), nil))
	spans := &sfotel.Options{TracerProvider: tracers, MeterProvider: noop.NewMeterProvider()} // Prometheus has the metrics
	if _, err := sfotel.Instrument(products, spans); err != nil {
		return nil, err
	}
	collector := sfprometheus.NewCollector(products)
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
	if s.products.Stats().BreakerOpen {
		state = "away"
	}
	reply(w, map[string]string{"redis": state})
}

// startPrometheus starts a Prometheus that scrapes this service, if the program is there. It returns the
// address of its page, or nothing.
func startPrometheus(program, service string) (address string, stop func(), err error) {
	stop = func() {}
	if _, err := exec.LookPath(program); program == "" || errors.Is(err, exec.ErrNotFound) {
		return "", stop, nil
	}
	dir, err := os.MkdirTemp("", "prometheus")
	if err != nil {
		return "", stop, err
	}
	stop = func() { os.RemoveAll(dir) }
	config := fmt.Sprintf("global: {scrape_interval: 1s}\nscrape_configs:\n  - job_name: server\n    static_configs: [{targets: [%q]}]\n", service)
	file := filepath.Join(dir, "prometheus.yml")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		return "", stop, err
	}
	if address, err = freeAddress(); err != nil {
		return "", stop, err
	}
	cmd := exec.Command(program, "--config.file="+file, "--storage.tsdb.path="+filepath.Join(dir, "data"),
		"--web.listen-address="+address, "--log.level=error")
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		return "", stop, err
	}
	return address, func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		os.RemoveAll(dir)
	}, nil
}

func freeAddress() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	return l.Addr().String(), nil
}

// graphs returns the address of a page of Prometheus with some panels of the dashboard, which is for
// Grafana: grafana/singlefill.json.
func graphs(prometheus string) string {
	query := make(url.Values)
	for i, expr := range []string{
		`sum by (layer, result) (rate(singlefill_gets_total[15s]))`,
		`sum by (kind, result) (rate(singlefill_loads_total[15s]))`,
		`histogram_quantile(0.99, sum by (le) (rate(singlefill_load_duration_seconds_bucket[15s])))`,
		`singlefill_breaker_open`,
	} {
		query.Set(fmt.Sprintf("g%d.expr", i), expr)
		query.Set(fmt.Sprintf("g%d.tab", i), "0")
		query.Set(fmt.Sprintf("g%d.range_input", i), "5m")
	}
	return "http://" + prometheus + "/graph?" + query.Encode()
}

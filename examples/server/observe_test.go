package main

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/singlefilltest"
)

// body returns what the service answers to a GET.
func (w *world) body(t *testing.T, path string) string {
	t.Helper()
	rec := w.send(t.Context(), http.MethodGet, path, "")
	if rec.Code != http.StatusOK {
		t.Fatalf("GET %s: %d %s", path, rec.Code, rec.Body)
	}
	return rec.Body.String()
}

// The metrics tell of the cache and of the lock of the outbox, and the health of an outage, in which the
// service works.
func TestObserve_Outage(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		metrics := func(want ...string) {
			t.Helper()
			got := w.body(t, "/metrics")
			for _, line := range want {
				if !strings.Contains(got, line+"\n") {
					t.Errorf("the metrics lack %s", line)
				}
			}
		}
		health := func(want string) bool { return strings.Contains(w.body(t, "/health"), want) }
		if !health(`"redis":"ok"`) {
			t.Error("not healthy at the beginning")
		}
		metrics(`singlefill_gets_total{cache="products",layer="near",result="hit"} 1`,
			`singlefill_loads_total{cache="products",kind="call",result="value"} 1`,
			`singlefill_lock_acquired_total{lock="outbox"} 0`)
		resume := singlefilltest.Silence(t, w.rdb)
		w.check(t, http.MethodPut, teapot, http.StatusAccepted, "")
		for begun := time.Now(); !health(`"redis":"away"`); {
			if time.Since(begun) > time.Minute {
				t.Fatal("an outage is not told")
			}
			w.check(t, http.MethodGet, "", http.StatusOK, `"Teapot"`)
		}
		metrics(`singlefill_breaker_open{cache="products"} 1`)
		resume()
		time.Sleep(2 * time.Second)
		w.checkOutbox(t, 0)
		metrics(`singlefill_lock_acquired_total{lock="outbox"} 1`, `singlefill_lock_held{lock="outbox"} 0`)
	})
}

// The span of a load belongs to the request that began it. Spans that are waiting to be written when the
// service ends are written.
func TestObserve_Spans(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "spans")
	p := start(t, redistest.Start(t).Addr, "-spans="+file)
	p.answerQueries()
	p.check(t, "/products/42", http.StatusOK, product42)
	p.check(t, "/products/42", http.StatusOK, product42)
	redistest.Must(t, p.Signal(syscall.SIGTERM))
	p.checkEnd(t)

	type span struct {
		Name                string
		SpanContext, Parent struct{ SpanID string }
	}
	var spans []span
	f, err := os.Open(file)
	redistest.Must(t, err)
	defer f.Close()
	for lines := json.NewDecoder(f); lines.More(); {
		var s span
		redistest.Must(t, lines.Decode(&s))
		spans = append(spans, s)
	}
	const request, load = "GET /products/{id}", "load products"
	var requests []string // IDs
	var loads []string    // IDs of their parents
	for _, s := range spans {
		switch s.Name {
		case request:
			requests = append(requests, s.SpanContext.SpanID)
		case load:
			loads = append(loads, s.Parent.SpanID)
		}
	}
	if len(requests) != 2 || len(loads) != 1 || !slices.Contains(requests, loads[0]) {
		t.Errorf("two requests for one product have the spans %+v", spans)
	}
}

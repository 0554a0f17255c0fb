package main

import (
	"net/http"
	"strings"
	"testing"
	"time"

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

package main

import (
	"net/http"
	"testing"
	"time"
)

// An update makes the catalog stale: it is served once more, and refreshed behind.
func TestCatalog_StaleAfterAnUpdate(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.answers(t, http.MethodPost, "/clear", http.StatusNoContent, "")
		w.answers(t, http.MethodGet, "/catalog", http.StatusOK, `"renamed":0`)
		w.check(t, http.MethodPut, teapot, http.StatusNoContent, "")
		w.answers(t, http.MethodGet, "/catalog", http.StatusOK, `"renamed":0`)
		time.Sleep(time.Second)
		w.answers(t, http.MethodGet, "/catalog", http.StatusOK, `"renamed":1`)
	})
}

// After a Clear nothing is in the caches.
func TestClear(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.answers(t, http.MethodPost, "/clear", http.StatusNoContent, "")
		loads := w.products.Stats().Loads
		w.check(t, http.MethodGet, "", http.StatusOK, `"Product 42"`)
		if n := w.products.Stats().Loads - loads; n != 1 {
			t.Errorf("%d loads, want one", n)
		}
	})
}

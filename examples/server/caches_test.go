package main

import (
	"net/http"
	"strings"
	"sync"
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

// A database that is overloaded costs those a 503 for which there is no old value.
func TestOverloaded(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.answers(t, http.MethodPost, "/clear", http.StatusNoContent, "")
		w.answers(t, http.MethodGet, "/catalog", http.StatusOK, `"products":999`)
		w.memory.queries.Add(maxQueries)
		defer w.memory.queries.Add(-maxQueries)
		var requests sync.WaitGroup
		for range 10 {
			requests.Go(func() { w.answers(t, http.MethodGet, "/products/7", http.StatusServiceUnavailable, "overloaded") })
		}
		requests.Wait()
		w.check(t, http.MethodPut, teapot, http.StatusNoContent, "") // makes the catalog stale
		w.answers(t, http.MethodGet, "/catalog", http.StatusOK, `"products":999`)
	})
}

// What Redis refuses is told for each cache.
func TestCheck(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		if err := w.caches.check(t.Context()); err != nil {
			t.Error(err)
		}
		_ = w.rdb.Close()
		if err := w.caches.check(t.Context()); err == nil || !strings.Contains(err.Error(), "check of products") {
			t.Errorf("without Redis: %v", err)
		}
	})
}

package main

import (
	"fmt"
	"net/http"
	"testing"
	"time"
)

// An update makes the catalog stale: it is served once more, and refreshed behind.
func TestCatalog_StaleAfterAnUpdate(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.answers(t, http.MethodPost, "/clear", http.StatusNoContent, "")
		w.answers(t, http.MethodGet, "/catalog", http.StatusOK, `"renamed":0`)
		time.Sleep(10 * time.Second)
		w.maxAge(t, "/catalog", 40, 50) // of a minute less the jitter
		w.check(t, http.MethodPut, teapot, http.StatusNoContent, "")
		w.maxAge(t, "/catalog", 0, 0)
		time.Sleep(time.Second)
		w.answers(t, http.MethodGet, "/catalog", http.StatusOK, `"renamed":1`)
	})
}

// maxAge fails the test unless a client may keep the answer for least to most seconds.
func (w *world) maxAge(t *testing.T, path string, least, most int) {
	t.Helper()
	var seconds int
	header := w.send(t.Context(), http.MethodGet, path, "").Header().Get("Cache-Control")
	if _, err := fmt.Sscanf(header, "private, max-age=%d", &seconds); err != nil || seconds < least || seconds > most {
		t.Errorf("GET %s: Cache-Control %q, %v; want %d to %d", path, header, err, least, most)
	}
}

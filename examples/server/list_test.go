package main

import (
	"net/http"
	"strings"
	"testing"
	"time"
)

// A list takes one query for what is not in the cache, and leaves out what does not exist.
func TestList(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		const want = `[{"id":"7","name":"Product 7"},{"id":"42","name":"Product 42"}]`
		for _, takes := range []time.Duration{500 * time.Millisecond, 0} {
			begun := time.Now()
			rec := w.send(t.Context(), http.MethodGet, "/products?id=7&id=1000&id=42", "")
			if got := strings.TrimSpace(rec.Body.String()); rec.Code != http.StatusOK || got != want {
				t.Errorf("%d %s, want %s", rec.Code, got, want)
			}
			if took := time.Since(begun); took != takes {
				t.Errorf("it took %v, want %v", took, takes)
			}
		}
	})
}

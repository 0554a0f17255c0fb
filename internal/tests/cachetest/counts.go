package cachetest

import (
	"maps"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/alicebob/miniredis/v2"

	"github.com/singlefill/singlefill/internal/redistest"
)

// WantCalls checks what the server has executed since ResetCalls, except what the test itself
// sends.
func WantCalls(t testing.TB, server *redistest.Server, what string, want map[string]int64) {
	t.Helper()
	got := server.AllCalls()
	for _, own := range []string{"info", "config|resetstat", "hello"} {
		delete(got, own)
	}
	if !maps.Equal(got, want) {
		t.Errorf("%s: commands %v, want %v", what, got, want)
	}
}

// HitsMayBeLate reports whether the test's client may answer from its own cache, for a moment, what
// was true before a write: counts are not exact then.
func HitsMayBeLate(t *testing.T) bool { return strings.Contains(t.Name()+"/", "/csc/") }

// WantCommands checks how many commands a server gets while during runs.
func WantCommands(t *testing.T, m *miniredis.Miniredis, what string, least, most int, during func()) {
	t.Helper()
	n := m.CommandCount()
	during()
	synctest.Wait()
	if n = m.CommandCount() - n; n < least || n > most {
		t.Errorf("%s: %d commands, want %d to %d", what, n, least, most)
	}
}

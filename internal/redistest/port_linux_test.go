package redistest

import (
	"runtime"
	"testing"
)

// A port is reserved once.
func TestReserve_Once(t *testing.T) {
	t.Parallel()
	port := freePort()
	runtime.GC()
	if reserve(port) {
		t.Errorf("port %d is given twice", port)
	}
}

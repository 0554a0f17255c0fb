package redistest

import (
	"runtime"
	"testing"
)

func TestAPortIsGivenOnce(t *testing.T) {
	t.Parallel()
	port := freePort()
	runtime.GC()
	if reserve(port) {
		t.Errorf("port %d is given twice", port)
	}
}

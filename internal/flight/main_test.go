package flight

import (
	"testing"
	"testing/synctest"

	"github.com/singlefill/singlefill/internal/redistest"
)

func TestMain(m *testing.M) { redistest.Main(m) }

// inBubble runs a test in a bubble of testing/synctest, in parallel with others.
func inBubble(t *testing.T, run func(t *testing.T)) {
	t.Parallel()
	synctest.Test(t, run)
}

// runInBubble runs a subtest in a bubble.
func runInBubble(t *testing.T, name string, run func(t *testing.T)) {
	t.Run(name, func(t *testing.T) { synctest.Test(t, run) })
}

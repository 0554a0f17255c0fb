// Package cache_test asserts promises of the cache that hold in every order in which the commands
// of several processes can reach Redis: see package schedule. A plan with several faults has too
// many orders, so a sample of them is run. With -short or -race each test runs a small sample.
package cache_test

import (
	"runtime/debug"
	"testing"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/schedule"
)

func TestMain(m *testing.M) {
	debug.SetGCPercent(400) // an order leaves little memory in use and much behind
	redistest.Main(m)
}

// explore runs a scenario in all orders of plan.
func explore(t *testing.T, plan schedule.Plan, run func(w *schedule.World)) {
	t.Helper()
	if redistest.Quick() || redistest.Race {
		plan.AtLeast, plan.Sample = 0, 10
	}
	schedule.Explore(t, plan, run)
}

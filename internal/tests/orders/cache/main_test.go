// Package cache_test asserts promises of the cache that hold in every order in which the commands
// of several processes can reach Redis: see package schedule. A plan with several faults has too
// many orders, so a sample of them is run. With -short each test runs a small sample.
package cache_test

import (
	"testing"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/schedule"
)

func TestMain(m *testing.M) { redistest.Main(m) }

// explore runs a scenario in all orders of plan.
func explore(t *testing.T, plan schedule.Plan, run func(w *schedule.World)) {
	t.Helper()
	if redistest.Quick() {
		plan.AtLeast, plan.Sample = 0, 20
	}
	schedule.Explore(t, plan, run)
}

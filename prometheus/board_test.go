package prometheus_test

import (
	"encoding/json"
	"os"
	"regexp"
	"testing"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// The panels of the dashboard use metrics that there are.
func TestBoard_Metrics(t *testing.T) {
	t.Parallel()
	data, err := os.ReadFile("../grafana/singlefill.json")
	redistest.Must(t, err)
	var board struct {
		Panels []struct {
			Type, Title string
			Targets     []struct{ Expr string }
		}
	}
	redistest.Must(t, json.Unmarshal(data, &board))
	exported := exportedMetrics(t)
	for _, panel := range board.Panels {
		if panel.Type != "row" && len(panel.Targets) == 0 {
			t.Errorf("the panel %q shows nothing", panel.Title)
		}
		for _, target := range panel.Targets {
			for _, name := range regexp.MustCompile(`singlefill_\w+`).FindAllString(target.Expr, -1) {
				if !exported[name] {
					t.Errorf("the panel %q: %s is no metric", panel.Title, name)
				}
			}
		}
	}
}

// exportedMetrics returns the names of what a Collector exports; a histogram has three.
func exportedMetrics(t *testing.T) map[string]bool {
	t.Helper()
	_, rdb := redistest.StartMini(t)
	registry, c := register(t, cachetest.NewCacheIn[string](t, rdb, "ns", nil))
	c.LockTrace("lock")
	exported := map[string]bool{"singlefill_near_proof_age_seconds": true} // absent without a proof
	families, err := registry.Gather()
	redistest.Must(t, err)
	for _, family := range families {
		for _, part := range []string{"", "_bucket", "_sum", "_count"} {
			exported[family.GetName()+part] = true
		}
	}
	return exported
}

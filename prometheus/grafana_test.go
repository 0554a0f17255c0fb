package prometheus_test

import (
	"os"
	"regexp"
	"testing"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// The dashboard and the alert rules use metrics that there are.
func TestGrafana_Metrics(t *testing.T) {
	t.Parallel()
	exported := exportedMetrics(t)
	for _, file := range []string{"../grafana/singlefill.json", alertRules} {
		text, err := os.ReadFile(file)
		redistest.Must(t, err)
		names := regexp.MustCompile(`singlefill_\w+`).FindAllString(string(text), -1)
		if len(names) == 0 {
			t.Errorf("%s uses no metric", file)
		}
		for _, name := range names {
			if !exported[name] {
				t.Errorf("%s: %s is no metric", file, name)
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

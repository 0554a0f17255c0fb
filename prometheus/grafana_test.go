package prometheus_test

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/singlefill/singlefill/internal/redistest"
)

// The dashboard and the alert rules use metrics that there are.
func TestGrafana_Metrics(t *testing.T) {
	t.Parallel()
	names, err := os.ReadFile("testdata/metrics.txt") // see TestCollector_Names
	redistest.Must(t, err)
	exported := make(map[string]bool)
	for line := range strings.Lines(string(names)) {
		name, _, _ := strings.Cut(line, " ")
		for _, part := range []string{"", "_bucket", "_sum", "_count"} { // of a histogram
			exported[name+part] = true
		}
	}
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

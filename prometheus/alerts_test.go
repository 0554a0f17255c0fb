package prometheus_test

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/singlefill/singlefill/internal/redistest"
)

const alertRules = "../grafana/alerts.yml"

// promtool accepts the rules, and each has a runbook line.
func TestAlerts_Rules(t *testing.T) {
	t.Parallel()
	if out, err := exec.Command(program(t, "promtool"), "check", "rules", alertRules).CombinedOutput(); err != nil {
		t.Errorf("promtool: %v\n%s", err, out)
	}
	rules, err := os.ReadFile(alertRules)
	redistest.Must(t, err)
	if alerts, runbooks := len(alertNames(t)), strings.Count(string(rules), "runbook:"); alerts == 0 || alerts != runbooks {
		t.Errorf("%d alerts have %d runbook lines", alerts, runbooks)
	}
}

// program returns a program of Prometheus. PROMETHEUS names the server, beside which promtool is;
// otherwise it is looked up. Without it the test is skipped, or fails if PROMETHEUS_REQUIRED=1.
func program(t testing.TB, name string) string {
	t.Helper()
	if server := os.Getenv("PROMETHEUS"); server != "" {
		name = filepath.Join(filepath.Dir(server), name)
	}
	path, err := exec.LookPath(name)
	switch {
	case err == nil:
	case os.Getenv("PROMETHEUS_REQUIRED") == "1":
		t.Fatalf("%v, and PROMETHEUS_REQUIRED=1 is set", err)
	default:
		t.Skipf("%v: install Prometheus, or set PROMETHEUS=$(scripts/servers prometheus)", err)
	}
	return path
}

func alertNames(t testing.TB) (names []string) {
	t.Helper()
	rules, err := os.ReadFile(alertRules)
	redistest.Must(t, err)
	for _, m := range regexp.MustCompile(`- alert: Singlefill(\w+)`).FindAllSubmatch(rules, -1) {
		names = append(names, string(m[1]))
	}
	return names
}

// metrics has what one process counts in a minute, or the value of a gauge, by name and labels.
type metrics map[string]float64

const (
	nearHits  = `gets_total{layer="near",result="hit"}`
	hits      = `gets_total{layer="redis",result="hit"}`
	misses    = `gets_total{layer="redis",result="miss"}`
	loaded    = `loads_total{kind="call",result="value"}`
	failed    = `loads_total{kind="call",result="error"}`
	panicked  = `loads_total{kind="refresh",result="panic"}`
	unlocked  = `loads_unlocked_total`
	unlimited = `loads_unlimited_total`
	queued    = `loads_queued`
	onError   = `stale_served_total{reason="load_failed"}`
	stored    = `stores_total{result="stored"}`
	fenced    = `stores_total{result="fenced"}`
	notStored = `stores_total{result="error"}`
	badValues = `bad_values_total`
	current   = `audits_total{result="current"}`
	staleHits = `audits_total{result="stale"}`
	getErrors = `redis_errors_total{op="get"}`
	opens     = `breaker_opened_total`
	open      = `breaker_open`
	drops     = `near_drops_total`
	proofAge  = `near_proof_age_seconds`
	granted   = `lock_acquired_total{lock="jobs"}`
	lost      = `lock_lost_total{lock="jobs"}`
	lockError = `lock_redis_errors_total{lock="jobs",op="acquire"}`
)

var (
	// A busy day has each kind of mishap now and then.
	day = metrics{
		nearHits: 30000, hits: 6000, misses: 60, loaded: 60, failed: 1, panicked: 0.01, unlocked: 0.1, unlimited: 0.1,
		queued: 0, onError: 1, stored: 58, fenced: 1, notStored: 0.1, badValues: 0.01, getErrors: 1, opens: 0, open: 0,
		current: 300, staleHits: 0.05,
		drops: 0, proofAge: 0.3, granted: 30, lost: 0, lockError: 0.1,
	}
	// In a quiet night the whole fleet has a few calls, and half of them go wrong.
	night = metrics{
		hits: 2, misses: 1, loaded: 0.5, failed: 0.5, unlocked: 0.2, unlimited: 0.2, onError: 0.5, stored: 0.2, fenced: 0.2,
		notStored: 0.1, badValues: 0.3, current: 0.02, staleHits: 0.002, getErrors: 0.3, proofAge: 100_000, granted: 0.5, lockError: 0.2,
	}
	// In the minute of a failover Redis does not answer for a while, and loses what it had last.
	failover = metrics{
		misses: 500, loaded: 400, failed: 50, unlocked: 400, unlimited: 300, queued: 30, onError: 50, notStored: 100, getErrors: 300,
		opens: 2, open: 1, drops: 1, proofAge: 50, lost: 2, lockError: 20,
	}
	// In its first minute a process has nothing in memory.
	started = metrics{hits: 25000, misses: 500, loaded: 500, getErrors: 5}
)

// plus returns the sum.
func (m metrics) plus(more metrics) metrics {
	m = maps.Clone(m)
	for name, v := range more {
		m[name] += v
	}
	return m
}

// of returns the share of one process of n.
func (m metrics) of(n int) metrics {
	m = maps.Clone(m)
	for name := range m {
		m[name] /= float64(n)
	}
	return m
}

// A process has metrics from one minute to another.
type process struct{ from, to int }

func (p process) lives(minute int) bool { return p.from <= minute && minute < p.to }

// A history is a group of a test for promtool.
type history struct {
	name      string
	processes []process
	minutes   int
	at        func(process, minute int) metrics
	fires     []string
}

func (h *history) write(b *strings.Builder) {
	fmt.Fprintf(b, "  - name: %s\n    interval: 1m\n    input_series:\n", h.name)
	for i, p := range h.processes {
		for _, name := range slices.Sorted(maps.Keys(day)) {
			fmt.Fprintf(b, "      - series: '%s'\n        values: '", seriesOf(name, i))
			count := 0.
			for minute := range h.minutes {
				switch v := h.at(i, minute)[name]; {
				case !p.lives(minute) && p.lives(minute-1):
					b.WriteString("stale ")
				case !p.lives(minute):
					b.WriteString("_ ")
				case name == queued || name == open || name == proofAge:
					fmt.Fprint(b, v, " ")
				default:
					count += v
					fmt.Fprint(b, int(count), " ")
				}
			}
			b.WriteString("'\n")
		}
	}
	b.WriteString("    promql_expr_test:\n      - expr: group by (alertname) (last_over_time(ALERTS{alertstate=\"firing\"}[1d]))\n")
	fmt.Fprintf(b, "        eval_time: %dm\n        exp_samples:\n", h.minutes-1)
	for _, name := range h.fires {
		fmt.Fprintf(b, "          - {labels: '{alertname=\"Singlefill%s\"}', value: 1}\n", name)
	}
}

// seriesOf returns the series of a metric in a process. Metrics of locks have no label cache.
func seriesOf(name string, process int) string {
	name, labels, _ := strings.Cut(name, "{")
	labels = strings.TrimSuffix(labels, "}")
	if !strings.HasPrefix(name, "lock_") {
		labels = strings.TrimPrefix(labels+`,cache="users"`, ",")
	}
	return fmt.Sprintf(`singlefill_%s{job="shop",instance="%d",%s}`, name, process, labels)
}

func promtool(t *testing.T, histories []history) {
	t.Helper()
	rules, err := filepath.Abs(alertRules)
	redistest.Must(t, err)
	b := new(strings.Builder)
	fmt.Fprintf(b, "rule_files: [%s]\nevaluation_interval: 1m\ntests:\n", rules)
	for i := range histories {
		histories[i].write(b)
	}
	file := filepath.Join(t.TempDir(), "test.yml")
	redistest.Must(t, os.WriteFile(file, []byte(b.String()), 0o600))
	if out, err := exec.Command(program(t, "promtool"), "test", "rules", file).CombinedOutput(); err != nil {
		t.Errorf("promtool: %v\n%s", err, out)
	}
}

// No alert fires for a healthy fleet, whatever its size: with a failover of Redis, a rolling
// deployment, and a quiet night.
func TestAlerts_Healthy(t *testing.T) {
	t.Parallel()
	const failsOver, deploys, sleeps, minutes = 30, 60, 90, 180
	var histories []history
	for _, n := range []int{1, 4, 20} {
		var processes []process
		for i := range n {
			ends := deploys + i*20/n
			processes = append(processes, process{0, ends}, process{ends + 1, minutes})
		}
		at := func(i, minute int) metrics {
			switch {
			case minute == failsOver:
				return day.plus(failover)
			case minute == processes[i].from:
				return day.plus(started)
			case minute >= sleeps:
				return night.of(n)
			}
			return day
		}
		histories = append(histories, history{fmt.Sprintf("%d processes", n), processes, minutes, at, nil})
	}
	promtool(t, histories)
}

// Each fault fires its alerts, and no other one.
func TestAlerts_Faults(t *testing.T) {
	t.Parallel()
	const begins, minutes = 20, 75
	always := func(int) bool { return true }
	tests := []struct {
		name  string
		fault metrics // added to each minute of a busy day
		of    int     // processes: the first ones have the fault
		size  int     // of the fleet
		when  func(minute int) bool
		fires string
	}{
		{"Redis is dead", metrics{open: 1, unlocked: 1000, unlimited: 1000, loaded: 1000, proofAge: 3000}, 4, 4, always,
			"BreakerOpen LoadsUnlimited LoadsUnlocked NearUnproven"},
		{"one process of four is cut off", metrics{open: 1}, 1, 4, always, "BreakerOpen"},
		{"one process of twenty is cut off", metrics{open: 1, unlocked: 1000, loaded: 1000, proofAge: 3000}, 1, 20, always, "LoadsUnlocked"},
		{"the breaker opens and closes", metrics{opens: 1}, 4, 4, always, "BreakerOpen"},
		{"the fill lock times out", metrics{unlocked: 10}, 4, 4, always, "LoadsUnlocked"},
		{"the semaphore of MaxFleetLoads is refused", metrics{unlimited: 10}, 4, 4, always, "LoadsUnlimited"},
		{"the source fails", metrics{failed: 20, onError: 100}, 4, 4, always, "LoadsFailing StaleOnError"},
		{"the Loader panics", metrics{panicked: 20}, 4, 4, always, "LoadsFailing"},
		{"the source is slow", metrics{queued: 20}, 1, 4, always, "LoadsQueued"},
		{"queues come and go", metrics{queued: 20}, 4, 4, func(minute int) bool { return minute%4 == 0 }, ""},
		{"values cannot be encoded", metrics{notStored: 10}, 4, 4, always, "StoresFailing"},
		{"a job deletes keys in a loop", metrics{fenced: 100}, 4, 4, always, "Fenced"},
		{"two types share a namespace", metrics{badValues: 500}, 4, 4, always, "BadValues"},
		{"Deletes are lost", metrics{staleHits: 10}, 4, 4, always, "AuditsStale"},
		{"commands are refused", metrics{getErrors: 500}, 4, 4, always, "RedisErrors"},
		{"the ttl is too short", metrics{misses: 100_000, loaded: 100_000, stored: 100_000}, 4, 4, always, "HitRatioLow"},
		{"the log is evicted", metrics{drops: 1}, 4, 4, always, "NearDropped"},
		{"the log cannot be read", metrics{proofAge: 3000}, 4, 4, always, "NearUnproven"},
		{"holders freeze", metrics{lost: 1}, 1, 4, func(minute int) bool { return minute%6 == 0 }, "LeasesLost"},
		{"commands of locks are refused", metrics{lockError: 30}, 4, 4, always, "LockErrors"},
	}
	var histories []history
	fired := map[string]bool{}
	for _, test := range tests {
		processes := slices.Repeat([]process{{0, minutes}}, test.size)
		at := func(i, minute int) metrics {
			if minute >= begins && i < test.of && test.when(minute) {
				return day.plus(test.fault)
			}
			return day
		}
		fires := strings.Fields(test.fires)
		for _, name := range fires {
			fired[name] = true
		}
		histories = append(histories, history{test.name, processes, minutes, at, fires})
	}
	promtool(t, histories)
	for _, name := range alertNames(t) {
		if !fired[name] {
			t.Errorf("no fault fires %s", name)
		}
	}
}

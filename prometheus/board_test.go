package prometheus_test

import (
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
)

var draw = flag.String("draw", "", "`file` for a picture of the dashboard, drawn from the run of TestBoard")

// program returns a program of Prometheus. PROMETHEUS names the server, beside which promtool is;
// otherwise both are looked up. Without them the test is skipped, or fails if PROMETHEUS_REQUIRED=1.
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

// A panel of the dashboard.
type panel struct {
	Type        string
	Title       string
	Targets     []struct{ Expr, LegendFormat string }
	GridPos     struct{ X, Y, W, H int }
	FieldConfig struct{ Defaults struct{ Unit string } }
}

func panels(t testing.TB) (all []panel) {
	t.Helper()
	data, err := os.ReadFile("../grafana/singlefill.json")
	redistest.Must(t, err)
	var board struct{ Panels []panel }
	redistest.Must(t, json.Unmarshal(data, &board))
	return slices.DeleteFunc(board.Panels, func(p panel) bool { return p.Type == "row" })
}

// A server is a running Prometheus.
type server struct{ url string }

// startPrometheus starts a Prometheus that scrapes targets.
func startPrometheus(t testing.TB, targets ...string) *server {
	t.Helper()
	dir := t.TempDir()
	file := filepath.Join(dir, "prometheus.yml")
	config := fmt.Sprintf("global: {scrape_interval: 250ms, scrape_timeout: 250ms}\nscrape_configs:\n  - job_name: shop\n    static_configs: [{targets: ['%s']}]\n", strings.Join(targets, "', '"))
	redistest.Must(t, os.WriteFile(file, []byte(config), 0o600))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	redistest.Must(t, err)
	address := l.Addr().String()
	l.Close()
	var log strings.Builder
	cmd := exec.Command(program(t, "prometheus"), "--config.file="+file, "--storage.tsdb.path="+filepath.Join(dir, "data"),
		"--web.listen-address="+address, "--log.level=warn")
	cmd.Stderr = &log
	redistest.Must(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("Prometheus wrote:\n%s", &log)
		}
	})
	s := &server{"http://" + address}
	redistest.Await(t, "Prometheus is ready", func() bool {
		resp, err := http.Get(s.url + "/-/ready")
		if err == nil {
			resp.Body.Close()
		}
		return err == nil && resp.StatusCode == http.StatusOK
	})
	return s
}

// A point is a value of a series at a time.
type point struct {
	at time.Time
	v  float64
}

func (p *point) UnmarshalJSON(data []byte) error {
	var pair [2]any
	if err := json.Unmarshal(data, &pair); err != nil {
		return err
	}
	seconds, _ := pair[0].(float64)
	text, _ := pair[1].(string)
	var err error
	p.at = time.UnixMilli(int64(seconds * 1000))
	p.v, err = strconv.ParseFloat(text, 64)
	return err
}

// ask sends a query, and returns the values of each series by the legend.
func (s *server) ask(path string, query url.Values, legend string) (map[string][]point, error) {
	resp, err := http.Get(s.url + path + "?" + query.Encode())
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	var reply struct {
		Error string
		Data  struct {
			Result []struct {
				Metric map[string]string
				Value  *point
				Values []point
			}
		}
	}
	if err := json.NewDecoder(resp.Body).Decode(&reply); err != nil || reply.Error != "" {
		return nil, fmt.Errorf("%s: %v %s", query.Get("query"), err, reply.Error)
	}
	series := make(map[string][]point)
	for _, r := range reply.Data.Result {
		if r.Value != nil {
			r.Values = []point{*r.Value}
		}
		name := placeholder.ReplaceAllStringFunc(legend, func(s string) string { return r.Metric[s[2:len(s)-2]] })
		series[name] = r.Values
	}
	return series, nil
}

var placeholder = regexp.MustCompile(`\{\{\w+\}\}`)

// filled replaces the variables of the dashboard.
var filled = strings.NewReplacer("$__rate_interval", "3s", "$__range", "1m", "$job", ".*", "$cache", ".*")

// now returns what a panel shows now. A series without a number is left out.
func (s *server) now(t testing.TB, p panel) map[string]float64 {
	t.Helper()
	values := make(map[string]float64)
	for _, target := range p.Targets {
		series, err := s.ask("/api/v1/query", url.Values{"query": {filled.Replace(target.Expr)}}, target.LegendFormat)
		if err != nil {
			t.Fatalf("%s: %v", p.Title, err)
		}
		for name, points := range series {
			if v := points[0].v; !math.IsNaN(v) {
				values[name] = v
			}
		}
	}
	return values
}

// A reading is what a panel shows.
type reading map[string]float64

func (r reading) has(names ...string) bool {
	return !slices.ContainsFunc(names, func(name string) bool { _, ok := r[name]; return !ok })
}

// some reports whether all these are there and above zero.
func (r reading) some(names ...string) bool {
	return r.has(names...) && !slices.ContainsFunc(names, func(name string) bool { return r[name] <= 0 })
}

// none reports whether all these are there and zero.
func (r reading) none(names ...string) bool {
	return r.has(names...) && !slices.ContainsFunc(names, func(name string) bool { return r[name] != 0 })
}

// all reports whether the values of a cache in all processes are v.
func (r reading) all(v float64, prefix string) bool {
	n := 0
	for name, got := range r {
		if strings.HasPrefix(name, prefix) {
			if n++; got != v {
				return false
			}
		}
	}
	return n == 2
}

// shows tells what each panel shows while all is well, while Redis is dead and the source fails, and
// when both are back: without the last one, what it shows while all is well.
var shows = map[string][3]func(r reading) bool{
	"Hit ratio by layer": {
		func(r reading) bool { return r.some("near", "redis") && r["near"]+r["redis"] < 1 },
		func(r reading) bool { return r.none("redis") },
		func(r reading) bool { return r.some("near", "redis") },
	},
	"Gets and loads": {
		func(r reading) bool { return r.some("gets", "misses", "loads") && r["misses"] < r["gets"] },
		func(r reading) bool { return r.some("gets", "misses", "loads") },
	},
	"Load duration": { // they sleep for 5 to 15 ms
		func(r reading) bool { return r["p50"] > .0025 && r["p50"] <= r["p99"] },
		func(r reading) bool { return r["p50"] > .0025 && r["p50"] <= r["p99"] },
	},
	"Loads by result": {
		func(r reading) bool { return r.some("value") && r.none("error", "panic", "not_found", "unlocked") },
		func(r reading) bool { return r.some("error", "unlocked") },
		func(r reading) bool { return r.some("value") && r.none("error", "unlocked") },
	},
	"Loads now": {
		func(r reading) bool { return r.has("running", "queued") },
		func(r reading) bool { return r.has("running", "queued") },
	},
	"Waits for another process": {
		func(r reading) bool { return r.some("p50", "p99", "waits/s") },
		func(r reading) bool { return r.has("waits/s") },
	},
	"Stale values served, and why": {
		func(r reading) bool { return r.some("revalidating") && r.none("load_failed") },
		func(r reading) bool { return r.some("load_failed") },
	},
	"Outcomes of loads in Redis": {
		func(r reading) bool { return r.some("stored", "fenced") },
		func(r reading) bool { return r.none("stored", "fenced") },
	},
	"Audited hits": {
		func(r reading) bool {
			return r["hits checked"] > 10 && r.none("older than a second") && r["nines at least, at 95 %"] > 0.5
		},
		func(r reading) bool { return r.has("hits checked") },
		func(r reading) bool { return r["hits checked"] > 10 && r.none("older than a second") },
	},
	"Redis errors": {
		func(r reading) bool { return len(r) == 0 },
		func(r reading) bool { return len(r) > 0 },
	},
	"Breaker": {
		func(r reading) bool { return r.all(0, "products ") && r.all(0, "carts ") },
		func(r reading) bool { return r.all(1, "products ") && r.all(1, "carts ") },
	},
	"Commands queued": {
		func(r reading) bool { return len(r) == 2 },
		func(r reading) bool { return len(r) == 2 },
	},
	"Near": {
		func(r reading) bool { return r.some("proof age") && r.has("drops/s") },
		func(r reading) bool { return r["proof age"] > 1 }, // older than MaxLag: memory serves nothing
		func(r reading) bool { return r.some("proof age") && r["proof age"] < 10 },
	},
	"Leases": {
		func(r reading) bool { return r.has("jobs") && r["jobs"] <= 2 },
		func(r reading) bool { return r.none("jobs") },
	},
	"Acquired and lost": {
		func(r reading) bool { return r.some("jobs acquired") && r.none("jobs lost") },
		func(r reading) bool { return r.none("jobs acquired") },
		func(r reading) bool { return r.some("jobs acquired") },
	},
	"Waits for a lock, p99": {
		func(r reading) bool { return r.some("jobs") },
		func(reading) bool { return true }, // they wait until Redis is back
	},
	"Holds, p50 and p99": {
		func(r reading) bool { return r["jobs p50"] > .01 && r["jobs p50"] <= r["jobs p99"] },
		func(reading) bool { return true },
	},
}

// Each panel of the dashboard shows what happens to a service of two processes whose Redis is killed and
// comes back.
func TestBoard(t *testing.T) {
	t.Parallel()
	program(t, "prometheus")
	redisServer := redistest.Start(t)
	var shops []*redistest.Process
	var targets []string
	for range 2 {
		p := redistest.Spawn(t, "shop", redisServer.Addr)
		shops, targets = append(shops, p), append(targets, p.Expect("metrics at "))
	}
	s := startPrometheus(t, targets...)
	board := panels(t)
	if len(board) != len(shows) {
		t.Errorf("the dashboard has %d panels, and %d are expected", len(board), len(shows))
	}
	begun := time.Now()
	check := func(phase int, what string) {
		t.Helper()
		for _, p := range board {
			expected := shows[p.Title]
			want := expected[phase]
			if phase == 2 && want == nil {
				want = expected[0]
			}
			if want == nil {
				t.Errorf("nothing is expected of the panel %q", p.Title)
				continue
			}
			var last map[string]float64
			deadline := time.Now().Add(40 * time.Second)
			for {
				if last = s.now(t, p); want(last) {
					break
				}
				if time.Now().After(deadline) {
					t.Fatalf("%s: the panel %q shows %v", what, p.Title, last)
				}
				time.Sleep(100 * time.Millisecond)
			}
		}
	}
	// For a picture each state lasts for a while.
	last := func() {
		if *draw != "" {
			time.Sleep(20 * time.Second)
		}
	}
	check(0, "all is well")
	last()
	redisServer.Kill()
	for _, p := range shops {
		p.Send("fail")
	}
	check(1, "Redis is dead, and the source fails")
	last()
	redisServer.Restart()
	for _, p := range shops {
		p.Send("mend")
	}
	check(2, "both are back")
	last()
	if *draw != "" {
		picture, err := s.picture(board, begun.Add(4*time.Second), time.Now())
		if err == nil {
			err = os.WriteFile(*draw, picture, 0o666)
		}
		if err != nil {
			t.Error(err)
		}
	}
}

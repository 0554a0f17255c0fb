package prometheus_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
	"github.com/singlefill/singlefill/lock"
	sfprometheus "github.com/singlefill/singlefill/prometheus"
)

func TestMain(m *testing.M) { redistest.Main(m) }

// register returns a registry with a Collector of caches.
func register(t testing.TB, caches ...sfprometheus.Cache) (*prometheus.Registry, *sfprometheus.Collector) {
	t.Helper()
	r, c := prometheus.NewPedanticRegistry(), sfprometheus.NewCollector(caches...)
	redistest.Must(t, r.Register(c))
	return r, c
}

// values returns the samples of a registry: by name and labels in the order of their names, without
// buckets, and without zeros.
func values(t testing.TB, r *prometheus.Registry) map[string]float64 {
	t.Helper()
	families, err := r.Gather()
	redistest.Must(t, err)
	samples := make(map[string]float64)
	for _, f := range families {
		for _, m := range f.Metric {
			var labels []string
			for _, l := range m.Label {
				labels = append(labels, l.GetName()+"="+l.GetValue())
			}
			v := m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			if v != 0 {
				samples[strings.TrimPrefix(f.GetName(), "singlefill_")+" "+strings.Join(labels, " ")] = v
			}
		}
	}
	return samples
}

func wantValues(t testing.TB, r *prometheus.Registry, want map[string]float64) {
	t.Helper()
	if got := values(t, r); !maps.Equal(got, want) {
		t.Errorf("values are %v, want %v", got, want)
	}
}

func fails(err error) singlefill.Loader[string] {
	return func(context.Context, string) (string, error) { return "", err }
}

// An error whose methods panic is a failed load.
func TestCollector_ErrorThatPanics(t *testing.T) {
	t.Parallel()
	_, rdb := redistest.StartMini(t)
	c := cachetest.NewCacheIn[string](t, rdb, "ns", nil)
	r, _ := register(t, c)
	_, _ = c.GetOrLoad(t.Context(), "k", fails(brokenError{}))
	_ = c.Close()
	if got := values(t, r)["loads_total cache=ns kind=call result=error"]; got != 1 {
		t.Errorf("%v failed loads, want 1", got)
	}
}

type brokenError struct{}

func (brokenError) Error() string { panic("Error") }
func (brokenError) Is(error) bool { panic("Is") }

// Each field of Stats gets to the metric that is named after it, and each call of the Trace is counted.
func TestCollector_StatsAndTrace(t *testing.T) {
	t.Parallel()
	c := &fakeCache{stats: singlefill.Stats{
		Hits: 100, NearHits: 30, StaleHits: 25, NearStale: 10, Misses: 200, Shared: 3, Stale: 50, StaleOnError: 6,
		LoadsUnlocked: 7, LoadsUnlimited: 8, Loading: 9, Queued: 11, LocksLost: 12,
		Stored: 13, StoreErrors: 14, Fenced: 16, Refused: 17, CommandsQueued: 18, BreakerOpen: true, BreakerOpens: 19,
		BadValues: 21, Audits: 47, AuditsStale: 24, TagCalls: 26, TagKeys: 27, TagClears: 28, TagRebuilds: 29, NearDrops: 22, NearAge: 1500 * time.Millisecond,
	}}
	r, _ := register(t, c)
	failure := &singlefill.ManyError{Errs: map[string]error{"other": singlefill.ErrNotFound}}
	for _, err := range []error{nil, singlefill.ErrNotFound, failure, new(singlefill.PanicError)} {
		c.trace.LoadDone(c.trace.LoadStart(t.Context(), "k"), singlefill.LoadInfo{Keys: 1, Err: err, Refresh: true})
	}
	ctx := c.trace.LoadStart(t.Context(), "a")
	for _, key := range []string{"a", "b", "c"} { // a ManyLoader counts once for its keys
		c.trace.LoadDone(ctx, singlefill.LoadInfo{Key: key, Keys: 3})
	}
	c.trace.WaitDone(t.Context(), singlefill.WaitInfo{})
	c.trace.RedisError(t.Context(), "get", errors.New("no"))
	wantValues(t, r, map[string]float64{
		"gets_total cache=ns layer=near result=hit":          20, // 30 - 10
		"gets_total cache=ns layer=near result=stale":        10,
		"gets_total cache=ns layer=redis result=hit":         55, // 100 - 30 - (25 - 10)
		"gets_total cache=ns layer=redis result=stale":       15,
		"gets_total cache=ns layer=redis result=miss":        200,
		"gets_shared_total cache=ns":                         3,
		"stale_served_total cache=ns reason=revalidating":    44,
		"stale_served_total cache=ns reason=load_failed":     6,
		"loads_unlocked_total cache=ns":                      7,
		"loads_unlimited_total cache=ns":                     8,
		"loads_running cache=ns":                             9,
		"loads_queued cache=ns":                              11,
		"load_locks_lost_total cache=ns":                     12,
		"stores_total cache=ns result=stored":                13,
		"stores_total cache=ns result=error":                 14,
		"stores_total cache=ns result=fenced":                16,
		"redis_refused_total cache=ns":                       17,
		"redis_commands_queued cache=ns":                     18,
		"breaker_open cache=ns":                              1,
		"breaker_opened_total cache=ns":                      19,
		"bad_values_total cache=ns":                          21,
		"audits_total cache=ns result=current":               23, // 47 - 24
		"audits_total cache=ns result=stale":                 24,
		"tag_calls_total cache=ns":                           26,
		"tag_keys_total cache=ns":                            27,
		"tag_clears_total cache=ns":                          28,
		"tag_rebuilds_total cache=ns":                        29,
		"near_drops_total cache=ns":                          22,
		"near_proof_age_seconds cache=ns":                    1.5,
		"loads_total cache=ns kind=call result=value":        3,
		"loads_total cache=ns kind=refresh result=value":     1,
		"loads_total cache=ns kind=refresh result=not_found": 1,
		"loads_total cache=ns kind=refresh result=error":     1,
		"loads_total cache=ns kind=refresh result=panic":     1,
		"load_duration_seconds cache=ns kind=call":           1,
		"load_duration_seconds cache=ns kind=refresh":        4,
		"wait_duration_seconds cache=ns":                     1,
		"redis_errors_total cache=ns op=get":                 1,
	})
}

// Caches with one namespace are added.
func TestCollector_SameNamespace(t *testing.T) {
	t.Parallel()
	_, rdb := redistest.StartMini(t)
	ns := redistest.Namespace(t)
	a, b := cachetest.NewCacheIn[string](t, rdb, ns, nil), cachetest.NewCacheIn[string](t, rdb, ns, nil)
	r, collector := register(t, a)
	collector.Add(b)
	for _, c := range []*singlefill.Cache[string]{a, b} {
		redistest.Must(t, c.Set(t.Context(), "k", "v"))
		_, err := c.Get(t.Context(), "k")
		redistest.Must(t, err)
	}
	wantValues(t, r, map[string]float64{"gets_total cache=" + ns + " layer=redis result=hit": 2})
}

// A hit calls nothing of a Collector.
func TestCollector_HitsAreFree(t *testing.T) {
	t.Parallel()
	var c fakeCache
	sfprometheus.NewCollector(&c)
	if tr := c.trace; tr.Hit != nil || tr.Miss != nil || tr.Stale != nil {
		t.Error("a Collector is called for hits")
	}
}

type fakeCache struct {
	stats singlefill.Stats
	trace *singlefill.Trace
}

func (*fakeCache) Namespace() string              { return "ns" }
func (c *fakeCache) Stats() singlefill.Stats      { return c.stats }
func (c *fakeCache) AddTrace(t *singlefill.Trace) { c.trace = t }

// Leases and waits are counted under the label that the program has chosen, not under the name.
func TestCollector_Locks(t *testing.T) {
	t.Parallel()
	r, collector := register(t)
	tr, info := collector.LockTrace("jobs"), lock.LeaseInfo{Name: "of one user", Duration: time.Minute}
	tr.Acquired(t.Context(), info)
	tr.Acquired(t.Context(), info)
	tr.Acquired(t.Context(), info)
	tr.Released(t.Context(), info)
	tr.Lost(t.Context(), info)
	tr.Expired(t.Context(), info)
	for _, err := range []error{nil, fmt.Errorf("%w: %w", lock.ErrBusy, context.DeadlineExceeded), errors.New("no")} {
		info.Err = err
		tr.Waited(t.Context(), info)
	}
	tr.RedisError(t.Context(), "acquire", errors.New("no"))
	wantValues(t, r, map[string]float64{
		"lock_held lock=jobs": 1, "lock_acquired_total lock=jobs": 3, "lock_lost_total lock=jobs": 1, "lock_expired_total lock=jobs": 1, "lock_hold_duration_seconds lock=jobs": 2,
		"lock_wait_duration_seconds lock=jobs result=acquired": 1, "lock_wait_duration_seconds lock=jobs result=busy": 1,
		"lock_wait_duration_seconds lock=jobs result=error": 1, "lock_redis_errors_total lock=jobs op=acquire": 1,
	})
}

// Names, labels and help follow the conventions, every metric is described, and a cache that has done
// nothing has all metrics, with zeros.
func TestCollector_Conventions(t *testing.T) {
	t.Parallel()
	_, rdb := redistest.StartMini(t)
	r, collector := register(t, cachetest.NewCacheIn[string](t, rdb, redistest.Namespace(t), nil))
	collector.LockTrace("jobs")
	problems, err := testutil.GatherAndLint(r)
	if err != nil || len(problems) > 0 {
		t.Errorf("%v, %v", problems, err)
	}
	n, err := testutil.GatherAndCount(r)
	if err != nil || n < 50 {
		t.Errorf("%d series of a new cache and lock, %v", n, err)
	}
	if n, err := testutil.GatherAndCount(r, "singlefill_near_proof_age_seconds"); n != 0 || err != nil {
		t.Errorf("without Near the age of the proof has %d series, %v", n, err)
	}
}

// A cache without errors has a zero for each op that Trace.RedisError documents.
func TestCollector_Ops(t *testing.T) {
	t.Parallel()
	source, err := os.ReadFile("../trace.go")
	redistest.Must(t, err)
	doc := regexp.MustCompile(`(?s)op is its purpose: (.*?)\.\n`).FindSubmatch(source)
	if doc == nil {
		t.Fatal("Trace.RedisError lists no ops")
	}
	want := regexp.MustCompile(`\([^)]*\)|//|\bor\b|,`).ReplaceAllString(string(doc[1]), " ")
	r, _ := register(t, new(fakeCache))
	families, err := r.Gather()
	redistest.Must(t, err)
	var got []string
	for _, f := range families {
		for _, m := range f.Metric {
			for _, l := range m.Label {
				if l.GetName() == "op" {
					got = append(got, l.GetValue())
				}
			}
		}
	}
	if want := slices.Sorted(slices.Values(strings.Fields(want))); !slices.Equal(got, want) {
		t.Errorf("the ops are %q, want %q", got, want)
	}
}

// The metrics and their labels are listed in testdata/metrics.txt, and stay within v1.
func TestCollector_Names(t *testing.T) {
	t.Parallel()
	described := make(chan *prometheus.Desc, 100)
	sfprometheus.NewCollector().Describe(described)
	close(described)
	var got, want []string
	for d := range described {
		m := regexp.MustCompile(`fqName: "(\w+)".*variableLabels: \{([^}]*)\}`).FindStringSubmatch(d.String())
		if m == nil {
			t.Fatalf("%s has no name", d)
		}
		got = append(got, strings.TrimSpace(m[1]+" "+strings.ReplaceAll(m[2], ",", " ")))
	}
	names, err := os.ReadFile("testdata/metrics.txt")
	redistest.Must(t, err)
	for line := range strings.Lines(string(names)) {
		want = append(want, strings.TrimSpace(line))
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("the metrics are\n%s\nand the file has\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

package otel_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/singlefill/singlefill"
)

// Names, units and kinds of all metrics. Counters only grow, gauges and up-down counters are what there
// is now, and histograms are of seconds, with the buckets of singlefill.
func TestMetrics_Conventions(t *testing.T) {
	t.Parallel()
	x := newTelemetry(t)
	var c fakeNear
	x.instrument(t, &c)
	c.useAll(t)
	useAllOfLock(t, x.lockTrace(t))
	var got []string
	for _, m := range x.collect(t) {
		kind := ""
		switch data := m.Data.(type) {
		case metricdata.Sum[int64]:
			if kind = "current"; data.IsMonotonic {
				kind = "counter"
			}
		case metricdata.Gauge[float64]:
			kind = "gauge"
		case metricdata.Histogram[float64]:
			kind = "histogram"
			if b := data.DataPoints[0].Bounds; b[0] != .001 || b[len(b)-1] != 30 {
				t.Errorf("%s has the buckets %v", m.Name, b)
			}
		}
		if m.Description == "" {
			t.Errorf("%s has no description", m.Name)
		}
		got = append(got, fmt.Sprintf("%s %s %s", strings.TrimPrefix(m.Name, "singlefill."), kind, m.Unit))
	}
	want := []string{
		"audits counter {hit}",
		"bad_values counter {value}",
		"breaker.open current {breaker}",
		"breaker.opened counter {time}",
		"gets counter {call}",
		"gets.shared counter {call}",
		"load.duration histogram s",
		"load.locks_lost counter {lock}",
		"loads counter {load}",
		"loads.queued current {load}",
		"loads.running current {load}",
		"loads.unlimited counter {load}",
		"loads.unlocked counter {load}",
		"lock.acquired counter {lease}",
		"lock.expired counter {lease}",
		"lock.held current {lease}",
		"lock.hold.duration histogram s",
		"lock.lost counter {lease}",
		"lock.redis.errors counter {command}",
		"lock.wait.duration histogram s",
		"near.drops counter {time}",
		"near.proof.age gauge s",
		"redis.commands.queued current {command}",
		"redis.errors counter {command}",
		"redis.refused counter {command}",
		"stale.served counter {value}",
		"stores counter {outcome}",
		"tag.calls counter {call}",
		"tag.clears counter {call}",
		"tag.keys counter {key}",
		"tag.rebuilds counter {call}",
		"wait.duration histogram s",
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("metrics:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// Each field of Stats gets to the metric that is named after it, and each call of the Trace is counted. The
// age of the proof is absent without one.
func TestMetrics_StatsAndTrace(t *testing.T) {
	t.Parallel()
	x, y := newTelemetry(t), newTelemetry(t)
	var c fakeNear
	x.instrument(t, &c)
	y.instrument(t, &fakeCache{})
	for _, m := range y.collect(t) {
		if data, ok := m.Data.(metricdata.Gauge[float64]); ok && len(data.DataPoints) > 0 {
			t.Errorf("%s of a cache without Near is %v", m.Name, data.DataPoints[0].Value)
		}
	}
	c.useAll(t)
	tr := c.traces[0]
	failure := &singlefill.ManyError{Errs: map[string]error{"other": singlefill.ErrNotFound}}
	for _, err := range []error{singlefill.ErrNotFound, failure, new(singlefill.PanicError)} {
		tr.LoadDone(tr.LoadStart(t.Context(), "k"), singlefill.LoadInfo{Keys: 1, Err: err, Refresh: true})
	}
	ctx := tr.LoadStart(t.Context(), "a")
	for _, key := range []string{"a", "b", "c"} { // a ManyLoader counts once for its keys
		tr.LoadDone(ctx, singlefill.LoadInfo{Key: key, Keys: 3})
	}
	x.wantValues(t, map[string]float64{
		"gets cache=ns layer=near result=hit":          20, // 30 - 10
		"gets cache=ns layer=near result=stale":        10,
		"gets cache=ns layer=redis result=hit":         55, // 100 - 30 - (25 - 10)
		"gets cache=ns layer=redis result=stale":       15,
		"gets cache=ns layer=redis result=miss":        200,
		"gets.shared cache=ns":                         3,
		"stale.served cache=ns reason=revalidating":    44,
		"stale.served cache=ns reason=load_failed":     6,
		"loads.unlocked cache=ns":                      7,
		"loads.unlimited cache=ns":                     8,
		"loads.running cache=ns":                       9,
		"loads.queued cache=ns":                        11,
		"load.locks_lost cache=ns":                     12,
		"stores cache=ns result=stored":                13,
		"stores cache=ns result=error":                 14,
		"stores cache=ns result=fenced":                16,
		"redis.refused cache=ns":                       17,
		"redis.commands.queued cache=ns":               18,
		"breaker.open cache=ns":                        1,
		"breaker.opened cache=ns":                      19,
		"bad_values cache=ns":                          21,
		"audits cache=ns result=current":               23, // 47 - 24
		"audits cache=ns result=stale":                 24,
		"tag.calls cache=ns":                           26,
		"tag.keys cache=ns":                            27,
		"tag.clears cache=ns":                          28,
		"tag.rebuilds cache=ns":                        29,
		"near.drops cache=ns":                          22,
		"near.proof.age cache=ns":                      1.5,
		"loads cache=ns kind=call result=value":        4,
		"loads cache=ns kind=refresh result=not_found": 1,
		"loads cache=ns kind=refresh result=error":     1,
		"loads cache=ns kind=refresh result=panic":     1,
		"load.duration cache=ns kind=call":             2,
		"load.duration cache=ns kind=refresh":          3,
		"wait.duration cache=ns":                       1,
		"redis.errors cache=ns op=get":                 1,
	})
}

// A fakeNear is a fakeCache whose Stats have another number in each field.
type fakeNear struct{ fakeCache }

func (*fakeNear) Stats() singlefill.Stats {
	return singlefill.Stats{
		Hits: 100, NearHits: 30, StaleHits: 25, NearStale: 10, Misses: 200, Shared: 3, Stale: 50, StaleOnError: 6,
		LoadsUnlocked: 7, LoadsUnlimited: 8, Loading: 9, Queued: 11, LocksLost: 12,
		Stored: 13, StoreErrors: 14, Fenced: 16, Refused: 17, CommandsQueued: 18, BreakerOpen: true, BreakerOpens: 19,
		BadValues: 21, Audits: 47, AuditsStale: 24, TagCalls: 26, TagKeys: 27, TagClears: 28, TagRebuilds: 29, NearDrops: 22, NearAge: 1500 * time.Millisecond,
	}
}

// useAll calls all functions of the Trace once.
func (c *fakeNear) useAll(t *testing.T) {
	tr := c.traces[0]
	ctx := tr.LoadStart(t.Context(), "k")
	tr.LoadDone(ctx, singlefill.LoadInfo{Key: "k", Keys: 1})
	tr.ShareDone(t.Context(), singlefill.ShareInfo{})
	tr.WaitDone(t.Context(), singlefill.WaitInfo{})
	tr.RedisError(t.Context(), "get", errors.New("no"))
}

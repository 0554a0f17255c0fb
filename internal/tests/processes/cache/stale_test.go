package cache_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// An outage of the source costs one load per RetryAfter in the fleet, and no reader gets an error, however
// loads fail.
//
//fault:source-down
func TestStaleIfError_Outage(t *testing.T) {
	t.Parallel()
	const retryAfter, outage = time.Second, 6 * time.Second
	g := newGroup(t, config{Direct: true, StaleWhileRevalidate: 30 * time.Minute, StaleIfError: 2 * time.Hour, RetryAfter: retryAfter})
	keys := []struct {
		name  string
		late  time.Duration
		load  plan
		stale []outcome
	}{
		{"served at once", time.Minute, plan{Fail: "no answer"}, []outcome{{gotStale, "1"}}},
		{"served on error", time.Hour, plan{Fail: "no answer"},
			[]outcome{{gotStaleFor(gotOwn), "1: no answer"}, {gotStaleFor(gotRemote), "1: no answer"}}},
		{"served on panic", time.Hour, plan{Panic: "a bug"},
			[]outcome{{gotStaleFor(gotPanic), "1: a bug"}, {gotStaleFor(gotRemote), "1: singlefill: Loader panicked: a bug"}}},
	}
	setSource := func(key, value string) {
		redistest.Must(t, g.rdb.Set(t.Context(), sourceKey(g.namespace, key), value, 0).Err())
	}
	for _, key := range keys {
		setSource(key.name, "1")
		g.fill(key.name)
		_, e := cachetest.GetEntry(t, g.rdb, g.namespace, key.name)
		e.FreshUntil = time.Now().Add(-key.late)
		cachetest.PutEntry(t, g.rdb, g.namespace, key.name, e, time.Hour)
		setSource(key.name, sourceDown)
	}
	begun := g.now()
	for _, key := range keys {
		key.load.Source = true
		g.read(key.name, key.name, 2, 20*time.Millisecond, key.load)
	}
	for g.now().Sub(begun) < outage {
		for _, key := range keys {
			g.wantServed(key.name, 10)
		}
	}
	for _, key := range keys {
		setSource(key.name, "2")
	}
	took := g.now().Sub(begun)

	for _, key := range keys {
		after := outcome{gotValue, "2"}
		for _, p := range g.members {
			redistest.Await(t, fmt.Sprintf("readers of %q get the new value in %s", key.name, p.name), func() bool {
				return counted(p.tally(key.name).Outcomes)[after] > 0
			})
		}
		for o, n := range g.stop(key.name) {
			if o != after && !slices.Contains(key.stale, o) {
				t.Errorf("%d readers of %q got %v", n, key.name, o)
			}
		}
		g.wantNoOverlap(key.name)

		var at []time.Time
		for _, p := range g.members {
			for _, r := range p.unread {
				if r.Event == "begun" && r.Tag == key.name && r.Value == sourceDown {
					at = append(at, r.At)
				}
			}
		}
		slices.SortFunc(at, time.Time.Compare)
		for i := range at[1:] {
			if gap := at[i+1].Sub(at[i]); gap < retryAfter {
				t.Errorf("%q: load %d of the outage began %v after the one before", key.name, i+1, gap)
			}
		}
		most := int(took/retryAfter) + 1
		if n := len(at); n > most || n < most/3 {
			t.Errorf("%q: %d loads in an outage of %v, want %d to %d", key.name, n, took, most/3, most)
		}
	}
}

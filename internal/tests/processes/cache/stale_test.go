package cache_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/redistest"
)

// A failed load gives the old value to all its callers, and is not repeated until RetryAfter.
//
//fault:source-down
func TestStaleIfError_FailedLoad(t *testing.T) {
	const callers = 10
	hung := shortLock
	hung.LoadTimeout = 2600 * time.Millisecond
	tests := []struct {
		name   string
		plan   plan
		holder config
		here   outcome
		remote string
	}{
		{"error", plan{Block: true, Fail: "no such table"}, config{}, outcome{gotOwn, "no such table"}, "no such table"},
		{"panic", plan{Block: true, Panic: "index out of range"}, config{}, outcome{gotPanic, "index out of range"}, "index out of range"},
		{"hangs until LoadTimeout", plan{Block: true, IgnoreCtx: true}, hung, outcome{gotDeadline, ""}, "LoadTimeout"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			hangs := test.holder.LoadTimeout > 0
			f := newFleet(t)
			start := func(c config) *process {
				c.StaleIfError, c.RetryAfter = time.Hour, 5*time.Minute
				return f.start(c)
			}
			g := &group{fleet: f, members: []*process{start(test.holder), start(config{}), start(config{}), start(config{})}}
			holder, others := g.members[0], g.members[1:]
			v := g.fill("k")
			g.members[1].expire("k")
			old := g.stored("k")
			loads := 1
			steps := 3
			if hangs {
				steps = 2 // a LoadTimeout each
			}
			for step := range steps {
				tag := fmt.Sprint("step", step)
				loads++
				holder.get(tag, "k", callers, test.plan)
				holder.begun(tag)
				holder.joined(tag)
				var groups []waiters
				for _, p := range others {
					p.get(tag, "k", callers, plan{})
					groups = append(groups, waiters{p, tag, "k"})
				}
				// A caller that is too late to wait for a load that hangs gets the same from its
				// failure record.
				if !hangs {
					awaitWaiting(groups...)
					holder.release(tag)
				}
				holder.wantDone(tag, callers, gotStaleFor(test.here.Kind), v+": "+test.here.Text)
				wantRemote := func(p *process, tag string) {
					t.Helper()
					for o, n := range p.done(tag) {
						if o.Kind != gotStaleFor(gotRemote) || !strings.HasPrefix(o.Text, v+": ") || !strings.Contains(o.Text, test.remote) || n != callers {
							t.Errorf("%d callers of %s got %v", n, p.name, o)
						}
					}
				}
				for _, p := range others {
					wantRemote(p, tag)
				}
				if hangs {
					holder.release(tag)
					holder.await("ended", tag)
				}
				g.wantLoads("k", loads)

				// Until RetryAfter no process loads, and no caller waits.
				again := tag + " again"
				for _, p := range g.members {
					p.get(again, "k", callers, plan{Fail: "loaded too soon"})
				}
				for _, p := range g.members {
					wantRemote(p, again)
				}
				g.wantLoads("k", loads)

				// RetryAfter passes.
				redistest.Must(t, f.rdb.Del(t.Context(), lockKey(f.namespace, "k")).Err())
				if !hangs { // only the first process has a short LoadTimeout
					g.members = append(g.members[1:], g.members[0])
					holder, others = g.members[0], g.members[1:]
				}
			}
			if got := g.stored("k"); got != old {
				t.Errorf("Redis has %q, and had %q", got, old)
			}
			holder.get("good", "k", callers, plan{})
			good := holder.begun("good").Value
			holder.wantDone("good", callers, gotValue, good)
			g.wantAll("k", callers, gotValue, good)
			g.wantNoOverlap("k")
		})
	}
}

// An outage of the source costs one load per RetryAfter in the fleet, and no reader gets an error.
//
//fault:source-down
func TestStaleIfError_Outage(t *testing.T) {
	t.Parallel()
	const retryAfter, outage = time.Second, 6 * time.Second
	g := newGroup(t, config{Direct: true, StaleWhileRevalidate: 30 * time.Minute, StaleIfError: 2 * time.Hour, RetryAfter: retryAfter})
	keys := []struct {
		name  string
		late  time.Duration
		stale []outcome
	}{
		{"served at once", time.Minute, []outcome{{gotStale, "1"}}},
		{"served on error", time.Hour, []outcome{{gotStaleFor(gotOwn), "1: no answer"}, {gotStaleFor(gotRemote), "1: no answer"}}},
	}
	for _, key := range keys {
		g.setSource(key.name, "1")
		g.fill(key.name)
		g.rewrite(key.name, func(e *entry.Entry) { e.FreshUntil = time.Now().Add(-key.late) })
		g.setSource(key.name, sourceDown)
	}
	begun := g.now()
	for _, key := range keys {
		g.read(key.name, key.name, 2, 20*time.Millisecond, plan{Source: true, Fail: "no answer"})
	}
	for g.now().Sub(begun) < outage {
		for _, key := range keys {
			g.wantServed(key.name, 10)
		}
	}
	for _, key := range keys {
		g.setSource(key.name, "2")
	}
	took := g.now().Sub(begun)

	for _, key := range keys {
		after := outcome{gotValue, "2"}
		for _, p := range g.members {
			redistest.Await(t, fmt.Sprintf("readers of %q get the new value in %s", key.name, p.name), func() bool {
				return counted(p.tally(key.name).Outcomes)[after] > 0
			})
		}
		for o, n := range g.stop(key.name, gotValue, gotStale, gotStaleFor(gotOwn), gotStaleFor(gotRemote)) {
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

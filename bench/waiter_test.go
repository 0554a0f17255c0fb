package bench

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill/internal/redistest"
)

// A step is what a process did in a stampede.
type step struct {
	What     string
	From, To time.Time
}

func (m *member) took(what string, from time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.steps = append(m.steps, step{what, from, time.Now()})
}

// traced is singlefill that remembers its commands.
func (m *member) traced(addr string) getter {
	rdb := dialed(addr, m.sent.count)
	rdb.AddHook(redistest.Commands(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
		from := time.Now()
		err := next(ctx, cmd)
		what := cmd.Name()
		if _, reply, found := strings.Cut(cmd.String(), ": ["); found {
			what = "script: " + strings.Fields(reply)[0]
		}
		m.took(what, from)
		return err
	}))
	return m.filled(rdb)
}

// BenchmarkWaiter traces one process of a stampede on one key that another one loads in 10 ms. Of all that
// wait it is the one whose calls end as late after the load as those of half of them.
func BenchmarkWaiter(b *testing.B) {
	s := redistest.Start(b)
	h := &herd{role: "singlefill, traced"}
	h.renew(b, s, 8)
	type trace struct {
		steps []step
		load  step
	}
	var waiters []trace
	for round := range rounds(b) {
		order := stampede{At: time.Now().Add(50 * time.Millisecond), Prefix: fmt.Sprint("herd-", round), Keys: 1,
			Goroutines: herdGoroutines, Load: 10 * time.Millisecond}
		for _, p := range h.processes {
			p.Order(order)
		}
		var load step
		var others []trace
		for _, p := range h.processes {
			var r reports
			p.Hear(&r)
			if i := slices.IndexFunc(r.Steps, func(s step) bool { return s.What == "load" }); i >= 0 {
				load = r.Steps[i]
			} else {
				others = append(others, trace{steps: r.Steps})
			}
		}
		for _, w := range others {
			waiters = append(waiters, trace{w.steps, load})
		}
	}
	late := func(t trace) time.Duration { return t.steps[len(t.steps)-1].To.Sub(t.load.To) } // of its calls
	slices.SortFunc(waiters, func(x, y trace) int { return cmp.Compare(late(x), late(y)) })
	median := waiters[len(waiters)/2]
	median.load.What = "load elsewhere"
	for i, s := range append([]step{median.load}, median.steps...) {
		report(b, fmt.Sprintf("one_of_8/10ms/%d %s", i+1, s.What), func(b *testing.B) {
			b.ReportMetric(s.From.Sub(median.load.From).Seconds()*1e3, "from-ms")
			b.ReportMetric(s.To.Sub(median.load.From).Seconds()*1e3, "to-ms")
		})
	}
}

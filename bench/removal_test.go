package bench

import (
	"strings"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
)

// A removal removes values of a namespace.
type removal struct {
	name   string
	store  func() // the values, before it
	remove func() error
	left   int // values

	took    []float64 // ns
	longest []float64 // ns, of a command or script, on the server
	seen    latencies // by others
}

// compareRemovals measures how long removals take, and what others notice of them.
func compareRemovals(b *testing.B, s *redistest.Server, namespace string, removals []removal) {
	quiet := time.Second
	if quick {
		quiet = 20 * time.Millisecond
	}
	ctx := b.Context()
	redistest.Must(b, s.Admin().Set(ctx, bystanderKey, strings.Repeat("x", 100), time.Hour).Err())
	redistest.Must(b, s.Admin().ConfigSet(ctx, "slowlog-log-slower-than", "1000").Err()) // µs
	redistest.Must(b, s.Admin().ConfigSet(ctx, "slowlog-max-len", "100000").Err())
	readers := redistest.Spawn(b, bystanderRole, s.Addr)
	readers.Expect("ready")
	var before, ignored latencies
	for round := range rounds(b) {
		for i := range removals {
			r := &removals[(i+round)%len(removals)]
			r.store()
			redistest.Must(b, s.Admin().SlowLogReset(ctx).Err()) // of a long log it takes long itself
			time.Sleep(quiet)                                    // the server may still free memory
			ignored.note(readers)
			time.Sleep(quiet)
			before.note(readers)
			begun := time.Now()
			if err := r.remove(); err != nil {
				b.Fatalf("%s: %v", r.name, err)
			}
			r.took = append(r.took, float64(time.Since(begun)))
			r.seen.note(readers)
			var longest time.Duration
			for _, command := range must(s.Admin().SlowLogGet(ctx, -1).Result()) {
				longest = max(longest, command.Duration)
			}
			r.longest = append(r.longest, float64(longest))
			if n := countValues(b, s, namespace); n != r.left {
				b.Fatalf("%s: %d values are left, want %d", r.name, n, r.left)
			}
		}
	}
	for _, r := range removals {
		report(b, r.name, func(b *testing.B) {
			b.ReportMetric(Median(r.took), "ns/op")
			b.ReportMetric(Quantile(r.longest, 1)/1e6, "longest-command-ms")
			r.seen.show(b)
		})
	}
	report(b, "none of them", before.show) // last, since the first row has all columns
}

func countValues(b *testing.B, s *redistest.Server, namespace string) (n int) {
	values := s.Admin().Scan(b.Context(), 0, namespace+":{*}", 10_000).Iterator()
	for values.Next(b.Context()) {
		n++
	}
	redistest.Must(b, values.Err())
	return n
}

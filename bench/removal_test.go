package bench

import (
	"context"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

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

const bystanderRole = "bystander"

func init() { redistest.Role(bystanderRole, runBystanders) }

// bystanders is how many connections read while a namespace is cleared, and bystanderPause how long
// each of them pauses between two reads. Without pauses they would measure how busy they keep the
// machine.
const (
	bystanders     = 100
	bystanderPause = 20 * time.Millisecond
)

// bystanderKey is in no namespace that is cleared.
const bystanderKey = "bystander"

// runBystanders reads all the time. It answers each line with the times of the reads since the last
// line, in µs.
func runBystanders(p *redistest.Child) {
	var mu sync.Mutex
	var took []int64
	for range bystanders {
		rdb := dialed(p.Args[0], func(o *redis.Options) { o.PoolSize = 1 })
		must(rdb.Ping(context.Background()).Result())
		go func() {
			for time.Sleep(rand.N(bystanderPause)); ; time.Sleep(bystanderPause) {
				begun := time.Now()
				must(rdb.Get(context.Background(), bystanderKey).Result())
				us := time.Since(begun).Microseconds()
				mu.Lock()
				took = append(took, us)
				mu.Unlock()
			}
		}()
	}
	p.Say("ready")
	for _, ok := p.Next(); ok; _, ok = p.Next() {
		mu.Lock()
		reads := took
		took = nil
		mu.Unlock()
		p.Report(reads)
	}
}

// latencies are latencies of reads, in ms.
type latencies []float64

// note adds what a process of bystanders has read since the last note.
func (l *latencies) note(p *redistest.Process) {
	p.Send("reads")
	var reads []int64
	p.Hear(&reads)
	for _, us := range reads {
		*l = append(*l, float64(us)/1e3)
	}
}

func (l latencies) show(b *testing.B) {
	b.ReportMetric(Median(l), "p50-ms")
	b.ReportMetric(Quantile(l, 0.99), "p99-ms")
	b.ReportMetric(Quantile(l, 1), "max-ms")
}

// populate stores a value under the keys of a namespace. A script does it in a tenth of the time.
func populate(b *testing.B, s *redistest.Server, namespace string, keys int, value string) {
	const step = 10_000
	set := redis.NewScript(`for i = ARGV[1], ARGV[2] do
	redis.call('SET', ARGV[3] .. string.format('%d', i) .. '}', ARGV[4], 'EX', 3600)
end`)
	for i := 0; i < keys; i += step {
		err := set.Run(b.Context(), s.Admin(), nil, i, min(i+step, keys)-1, namespace+":{", value).Err()
		if err != nil && err != redis.Nil {
			b.Fatal(err)
		}
	}
	if n := s.Admin().DBSize(b.Context()).Val(); n != int64(keys)+1 {
		b.Fatalf("%d keys in place of %d", n, keys+1)
	}
}

package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

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

// runBystanders reads all the time. It answers each line with what the reads have taken since the
// last one, in µs.
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

// latencies are those of reads, in ms.
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

// clears measures how long it takes to remove the values of a namespace, and what others notice of
// it.
func clears(b *testing.B, keys int) {
	if quick {
		keys = 2000
	}
	s := redistest.Start(b)
	rdb, namespace := open(b, s.Addr), redistest.Namespace(b)
	ctx := b.Context()
	c := must(singlefill.New[string](rdb, namespace, time.Hour, nil))
	b.Cleanup(func() { _ = c.Close() })
	store := func() { populate(b, s, namespace, keys) }
	compareRemovals(b, s, namespace, []removal{
		{name: "Clear", store: store, remove: func() error { return c.Clear(ctx) }},
		{name: "SCAN and UNLINK, by hand", store: store, remove: func() error { return clearByHand(ctx, rdb, namespace) }},
	})
}

// populate stores values of 100 B under the keys of a namespace. A script does it in a tenth of the
// time; what the values hold does not matter here.
func populate(b *testing.B, s *redistest.Server, namespace string, keys int) {
	populateWith(b, s, namespace, keys, strings.Repeat("x", 100))
}

func populateWith(b *testing.B, s *redistest.Server, namespace string, keys int, value string) {
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

// clearByHand scans once. A value that is loaded during the scan may stay, or come back.
func clearByHand(ctx context.Context, rdb *redis.Client, namespace string) error {
	for cursor := uint64(0); ; {
		keys, next, err := rdb.Scan(ctx, cursor, fmt.Sprintf("%s:{*}", namespace), 1000).Result()
		if err == nil && len(keys) > 0 {
			err = rdb.Unlink(ctx, keys...).Err()
		}
		if cursor = next; err != nil || cursor == 0 {
			return err
		}
	}
}

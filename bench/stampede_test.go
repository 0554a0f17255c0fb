package bench

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
)

// herdGoroutines is the number of goroutines in each of the 8 processes of a stampede at new keys.
const herdGoroutines = 100

func BenchmarkStampede(b *testing.B) {
	for _, keys := range []int{1, 100} {
		for _, load := range []time.Duration{10 * time.Millisecond, 137 * time.Millisecond, 1370 * time.Millisecond} {
			name := strings.Replace(fmt.Sprintf("%d_keys/%v_load", keys, load), "1_keys", "1_key", 1)
			b.Run(name, func(b *testing.B) { stampedes(b, 8, 4, keys, load) })
		}
	}
}

// A herd is the processes of one contender.
type herd struct {
	name   string
	role   string  // of its processes: see members
	varies float64 // by which share the duration of a load varies, up or down
	learns bool    // it may profit from earlier loads
	fresh  bool    // each stampede has new processes, which have seen no load

	processes []*redistest.Process
	extra     []float64 // ms, of each call: beyond the duration of the load
	polls     []float64 // of each process that waited
	loads     float64   // of all stampedes
	commands  float64
}

// newHerds returns a herd for each contender; with polling also one that gets no wake-ups.
func newHerds(polling bool) []*herd {
	herds := []*herd{
		{name: "singlefill, load time known", role: "singlefill", learns: true},
		{name: "singlefill, load time ±30 %", role: "singlefill", learns: true, varies: 0.3},
		{name: "singlefill, new processes", role: "singlefill", fresh: true},
		{name: "go-redis/cache", role: "go-redis/cache"},
		{name: "singleflight", role: "singleflight"},
		{name: "singleflight, SET NX, poll every 100 ms", role: "SET NX"},
		{name: "rueidisaside", role: "rueidisaside"},
	}
	if polling {
		herds = slices.Insert(herds, 3, &herd{name: "singlefill, no wake-ups", role: "singlefill, no wake-ups", fresh: true})
	}
	return herds
}

// stampedes runs warmUps first, for contenders that can learn how long a load takes.
func stampedes(b *testing.B, processes, warmUps, keys int, load time.Duration) {
	s := redistest.Start(b)
	polling := keys == 1 && load > 100*time.Millisecond // the longer the load, the longer the pauses
	herds := newHerds(polling)
	number := 0
	run := func(h *herd) { // with new keys
		number++
		h.stampede(b, s, processes, stampede{
			Keys: keys, Prefix: fmt.Sprint("herd-", number), Goroutines: herdGoroutines,
			Load: time.Duration(float64(load) * (1 + h.varies*(2*rand.Float64()-1))),
		})
	}
	for _, h := range herds {
		for i := range warmUps {
			if i == 0 || h.learns {
				run(h)
			}
		}
		h.extra, h.polls, h.loads, h.commands = nil, nil, 0, 0
	}
	n := 0.0
	for round := range rounds(b) {
		n++
		for i := range herds {
			run(herds[(i+round)%len(herds)])
		}
	}
	for _, h := range herds {
		report(b, h.name, func(b *testing.B) {
			b.ReportMetric(h.loads/n/float64(keys), "loads/key")
			b.ReportMetric(Median(h.extra), "p50-ms")
			b.ReportMetric(Quantile(h.extra, 0.99), "p99-ms")
			b.ReportMetric(Quantile(h.extra, 0.99)/load.Seconds()/1e3*100, "p99-%")
			b.ReportMetric(Median(h.polls), "polls")
			b.ReportMetric(Quantile(h.polls, 1), "most-polls")
			b.ReportMetric(h.commands/n, "commands")
			b.ReportMetric(h.commands/n/float64(processes), "commands/process")
		})
	}
}

// stampede runs one stampede.
func (h *herd) stampede(b *testing.B, s *redistest.Server, processes int, order stampede) {
	if h.fresh || h.processes == nil {
		h.renew(b, s, processes)
	}
	order.At = time.Now().Add(50 * time.Millisecond)
	tell(h.processes, order)
	for _, p := range h.processes {
		var r reports
		hear(p, &r)
		for _, took := range r.Took {
			h.extra = append(h.extra, (took-order.Load).Seconds()*1e3)
		}
		for _, n := range r.Polls {
			h.polls = append(h.polls, float64(n))
		}
		h.loads += float64(r.Loads)
		h.commands += float64(r.Commands)
	}
}

func (h *herd) renew(b *testing.B, s *redistest.Server, processes int) {
	for _, p := range h.processes {
		p.Kill()
	}
	h.processes = nil
	for range processes {
		h.processes = append(h.processes, redistest.Spawn(b, h.role, s.Addr))
	}
	for _, p := range h.processes {
		p.Expect("ready")
	}
}

package bench

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
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
	name     string
	role     string  // of its processes: see members
	varies   float64 // by which share the duration of a load varies, up or down
	learns   bool    // it may profit from earlier loads
	fresh    bool    // each stampede has new processes, which have seen no load
	shuffled bool    // each call has its keys in another order
	once     bool    // each key must be loaded once in all

	processes []*redistest.Process
	seen
}

// seen is what the stampedes of a herd have cost.
type seen struct {
	extra    []float64 // ms, of each call: beyond the duration of the load
	loads    float64   // of keys
	calls    float64   // of the load
	commands float64
	trips    float64 // reads of the server from its connections: a pipeline is one, or one for each 16 KB
	unlocked float64 // loads without the lock
	stored   float64
}

// newHerds returns a herd for each contender; with polling also a herd without wake-ups.
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
	polling := keys == 1 && load > 100*time.Millisecond // the longer the load, the longer the pauses
	herds := newHerds(polling)
	n := runHerds(b, herds, processes, warmUps, stampede{Keys: keys, Goroutines: herdGoroutines, Load: load})
	for _, h := range herds {
		report(b, h.name, func(b *testing.B) {
			b.ReportMetric(h.loads/n/float64(keys), "loads/key")
			h.reportExtra(b)
			b.ReportMetric(h.commands/n, "commands")
			b.ReportMetric(h.commands/n/float64(processes), "commands/process")
		})
	}
}

// manyStampedes are stampedes of calls for many keys, of so many callers in each process.
func manyStampedes(b *testing.B, processes, callers int, query time.Duration) {
	herds := []*herd{
		{name: "singlefill, load time known", role: "many, singlefill", once: true, learns: true},
		{name: "singlefill, new processes", role: "many, singlefill", once: true, fresh: true},
		{name: "singlefill, keys in random order", role: "many, singlefill", once: true, learns: true, shuffled: true},
		{name: "singleflight", role: "many, singleflight"},
	}
	order := stampede{Keys: manyKeysOfACall, Together: true, Goroutines: callers, Load: query}
	if quick {
		order.Goroutines = min(callers, 2)
	}
	n := runHerds(b, herds, processes, 4, order)
	for _, h := range herds {
		report(b, h.name, func(b *testing.B) {
			b.ReportMetric(h.loads/n/manyKeysOfACall, "loads/key")
			b.ReportMetric(h.calls/n, "queries")
			h.reportExtra(b)
			b.ReportMetric(h.trips/n, "round_trips")
			b.ReportMetric(h.commands/n, "commands")
		})
	}
}

func (s seen) reportExtra(b *testing.B) {
	b.ReportMetric(median(s.extra), "p50-ms")
	b.ReportMetric(quantile(s.extra, 0.99), "p99-ms")
	b.ReportMetric(quantile(s.extra, 1), "max-ms")
}

// runHerds runs stampedes of the herds in turn, each with new keys, and returns their number. It runs
// warmUps first.
func runHerds(b *testing.B, herds []*herd, processes, warmUps int, order stampede) (n float64) {
	s := redistest.Start(b)
	number := 0
	run := func(h *herd) {
		number++
		order := order
		order.Prefix, order.Shuffled = fmt.Sprint("herd-", number), h.shuffled
		order.Load = time.Duration(float64(order.Load) * (1 + h.varies*(2*rand.Float64()-1)))
		h.stampede(b, s, processes, order)
	}
	for _, h := range herds {
		for i := range warmUps {
			if i == 0 || h.learns {
				run(h)
			}
		}
		h.seen = seen{}
	}
	for round := range rounds(b) {
		n++
		for i := range herds {
			run(herds[(i+round)%len(herds)])
		}
	}
	return n
}

// stampede runs one stampede.
func (h *herd) stampede(b *testing.B, s *redistest.Server, processes int, order stampede) {
	if h.fresh || h.processes == nil {
		h.renew(b, s, processes)
	}
	before := infoOf(b, s, "stats")["total_reads_processed"]
	order.At = time.Now().Add(50 * time.Millisecond)
	loads := make(map[string]int)
	for _, p := range h.processes {
		p.Order(order)
	}
	for _, p := range h.processes {
		var r reports
		p.Hear(&r)
		for _, took := range r.Took {
			h.extra = append(h.extra, (took-order.Load).Seconds()*1e3)
		}
		for key, n := range r.Loads {
			loads[key] += n
			h.loads += float64(n)
		}
		h.calls += float64(r.Calls)
		h.commands += float64(r.Commands)
		h.unlocked += float64(r.Stats.LoadsUnlocked)
		h.stored += float64(r.Stats.Stored)
	}
	h.trips += infoOf(b, s, "stats")["total_reads_processed"] - before - 1 // without this INFO
	if len(loads) != order.Keys {
		b.Fatalf("%s: %d of %d keys were loaded", h.name, len(loads), order.Keys)
	}
	for key, n := range loads {
		if h.once && n != 1 {
			b.Fatalf("%s: %s was loaded %d times", h.name, key, n)
		}
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

// infoOf returns the numbers in a section of INFO.
func infoOf(b *testing.B, s *redistest.Server, section string) map[string]float64 {
	text := must(s.Admin().Info(b.Context(), section).Result())
	numbers := make(map[string]float64)
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		if v, err := strconv.ParseFloat(value, 64); err == nil {
			numbers[name] = v
		}
	}
	return numbers
}

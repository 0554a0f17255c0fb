package bench

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

// BenchmarkGrowth measures one hit with growing numbers of goroutines, keys and processes, relative
// to GET and decode.
func BenchmarkGrowth(b *testing.B) {
	for _, n := range []int{1, 10, 100, 1000, 10_000} {
		b.Run(fmt.Sprintf("goroutines/%d", n), func(b *testing.B) { manyGoroutines(b, n) })
	}
	for _, n := range []int{1, 100, 10_000, 100_000} {
		b.Run(fmt.Sprintf("keys/%d", n), func(b *testing.B) { manyKeys(b, n) })
	}
	for _, n := range []int{1, 2, 4, 8, 16} {
		b.Run(fmt.Sprintf("processes/%d", n), func(b *testing.B) { manyProcesses(b, n, 2000) })
	}
}

// manyGoroutines reads at least five times in each goroutine: the first read is slower, as the
// stack grows.
func manyGoroutines(b *testing.B, n int) {
	rdb := open(b, redistest.Start(b).Addr, patiently)
	h := newHits(b, n, n, 100)
	race{ops: max(5*n, 1000), goroutines: n, bases: []string{"floor"}, contenders: []contender{
		h.floor(rdb), h.singlefill("singlefill", newCache(b, rdb, patient)),
	}}.run(b)
}

// patiently sets timeouts for crowds that wait longer for a connection than go-redis does by
// default.
func patiently(o *redis.Options) {
	o.PoolTimeout, o.ReadTimeout, o.WriteTimeout = time.Minute, time.Minute, time.Minute
}

// manyKeys reads distant keys, one after the other.
func manyKeys(b *testing.B, n int) {
	rdb := open(b, redistest.Start(b).Addr)
	h := newHits(b, 0, n, 100)
	r := race{ops: 500, bases: []string{"floor"}, contenders: []contender{
		h.floor(rdb), h.singlefill("singlefill", newCache(b, rdb, patient)),
	}}
	for i := range r.contenders {
		op, at := r.contenders[i].op, 0
		r.contenders[i].op = func(int) error { at += 7919; return op(at) }
	}
	r.run(b)
}

const readerRole = "reader"

func init() { redistest.Role(readerRole, runReader) }

// A reading is an order to a reader.
type reading struct {
	Contender int
	Ops       int
	At        time.Time
}

// manyProcesses makes n processes read at the same time, with one goroutine each. The time of one
// operation is the total time divided by the total number of operations: its cost on a busy
// machine.
func manyProcesses(b *testing.B, n, ops int) {
	s := redistest.Start(b)
	children := make([]*redistest.Process, n)
	for i := range children {
		children[i] = redistest.Spawn(b, readerRole, s.Addr, strconv.Itoa(i))
	}
	for _, c := range children {
		c.Expect("ready")
	}
	block := func(contender int) float64 {
		r := reading{contender, max(ops/n, 100), time.Now().Add(20 * time.Millisecond)}
		for _, c := range children {
			c.Order(r)
		}
		var begun, ended []time.Time
		for _, c := range children {
			var times [2]time.Time
			c.Hear(&times)
			begun, ended = append(begun, times[0]), append(ended, times[1])
		}
		took := slices.MaxFunc(ended, time.Time.Compare).Sub(slices.MinFunc(begun, time.Time.Compare))
		return float64(took) / float64(n*r.Ops)
	}
	var times [2][]float64
	for round := range rounds(b) {
		for i := range times {
			i = (i + round) % 2
			times[i] = append(times[i], block(i))
		}
	}
	for i, name := range []string{"floor", "singlefill"} {
		report(b, name, func(b *testing.B) {
			b.ReportMetric(Median(times[i]), "ns/op")
			b.ReportMetric(Median(ratios(times[i], times[0])), "×floor")
		})
	}
}

func runReader(p *redistest.Child) {
	rdb := dialed(p.Args[0])
	h := &hits{
		contexts: []context.Context{context.Background()},
		keys:     []string{"order:" + p.Args[1]},
		value:    orderOf(100),
	}
	c := must(singlefill.New[order](rdb, "orders", time.Hour, nil))
	contenders := []contender{h.floor(rdb), h.singlefill("singlefill", c)}
	for _, c := range contenders {
		must(0, share(100, 0, c.op))
	}
	p.Say("ready")
	for r := range redistest.Orders[reading](p) {
		time.Sleep(time.Until(r.At))
		begun := time.Now()
		must(0, share(r.Ops, 0, contenders[r.Contender].op))
		p.Report([2]time.Time{begun, time.Now()})
	}
}

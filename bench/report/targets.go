package main

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/singlefill/singlefill/bench"
)

// A target is a bound on one metric, in each of some rows.
type target struct {
	what string
	path string // of the rows: a regular expression
	unit string
	per  string // divisor of the metric: a path, a contender of the same scenario, or empty
	// throughput says that the metric is a ratio of times, and limit a minimum ratio of
	// throughputs.
	throughput bool
	limit      float64
}

const waiters = "singlefill, (load time .*|new processes)" // of a stampede

var targets = []target{
	{what: "hit, serial: time, × floor",
		path: "Hit/serial/.*/singlefill", unit: "×floor", limit: 1.05},
	{what: "the same: allocations more",
		path: "Hit/serial/.*/singlefill", unit: "+allocs", limit: 1},
	{what: "hits, 64 goroutines, 64 keys: throughput, × floor",
		path: "Hit/64 goroutines/64 keys, 2KB/singlefill", unit: "×floor", throughput: true, limit: 0.9},
	{what: "hits, 64 goroutines, 1 key, 2 KB: throughput, × go-redis/cache",
		path: "Hit/64 goroutines/1 key, 2KB/singlefill", unit: "×go-redis/cache", throughput: true, limit: 1},
	{what: "hit, client-side caching, 2 and 64 KB: time, × `GET` and decode",
		path: "Hit/client-side caching/(2|64)KB/singlefill", unit: "×floor", limit: 1.3},
	{what: "hit in memory, a string, serial: time, × otter with expiring entries",
		path: "Near/near hit, .*/serial/singlefill", per: "otter, its entries expire", unit: "×otter", limit: 1.6},
	{what: "the same, 64 goroutines",
		path: "Near/near hit, .*/64 goroutines/singlefill", per: "otter, its entries expire", unit: "×otter", limit: 2},
	{what: "the same, serial: allocations",
		path: "Near/near hit, (a string|100).*/serial/singlefill", unit: "allocs", limit: 0},
	{what: "miss, serial: time, × the three commands by hand",
		path: "Miss/serial/.*/singlefill", unit: "×three by hand", limit: 1.15},
	{what: "100 hits in one call, 100 B: time, × pipeline and decode",
		path: "Many/100 hits/100B/singlefill", unit: "×floor", limit: 1.25},
	{what: "the same, 2 KB",
		path: "Many/100 hits/2KB/singlefill", unit: "×floor", limit: 1.1},
	{what: "100 cold keys in one call, query of 5 ms: time, × by hand with the same locks",
		path: "Many/100 cold keys/query of 5 ms/singlefill", per: "by hand, with locks", unit: "×by hand", limit: 1.15},
	{what: "stampede of 800 callers, 100 keys in one call: p99 beyond the load",
		path: "Many/stampede/.*/singlefill, .*", unit: "p99-ms", limit: 120},
	{what: "stampede, 1 key, 10 ms: p99 beyond the load, × rueidisaside",
		path: "Stampede/1 key/10ms load/" + waiters, unit: "p99-ms", per: "rueidisaside", limit: 1.3},
	{what: "the same, 137 ms and 1.37 s",
		path: "Stampede/1 key/(137ms|1.37s) load/" + waiters, unit: "p99-ms", per: "rueidisaside", limit: 1.1},
	{what: "the same: commands, × rueidisaside",
		path: "Stampede/1 key/.*/" + waiters, unit: "commands", per: "rueidisaside", limit: 0.5},
	{what: "the same: commands of each process",
		path: "Stampede/1 key/.*/" + waiters, unit: "commands/process", limit: 8},
	{what: "stampede, 100 keys, 137 ms and 1.37 s: p99 beyond the load, × rueidisaside",
		path: "Stampede/100 keys/(137ms|1.37s) load/" + waiters, unit: "p99-ms", per: "rueidisaside", limit: 1.5},
}

// A measurement is what is compared with a target.
type measurement struct {
	row    *row
	alone  bool      // no other row has to meet the target
	values []float64 // one for each run of the benchmark
}

// measure returns the measurement of the row that is farthest from meeting the target. ok is false
// if a row, or its divisor, was not measured.
func (t target) measure(all results) (worst measurement, ok bool) {
	rows := all.matching(t.path)
	for _, r := range rows {
		m := measurement{r, len(rows) == 1, t.values(all, r)}
		if len(m.values) == 0 {
			return measurement{}, false
		}
		if worst.row == nil || t.excess(m) > t.excess(worst) {
			worst = m
		}
	}
	return worst, worst.row != nil
}

// values returns the metric of each run, divided by the metric of the divisor in the same run.
func (t target) values(all results, r *row) []float64 {
	values := slices.Clone(r.values[t.unit])
	if t.per != "" {
		path := t.per
		if !strings.Contains(path, "/") {
			path = r.part + "/" + r.table + "/" + r.scenario + "/" + t.per
		}
		per := all.find(path)
		if per == nil || len(per.values[t.unit]) != len(values) {
			return nil
		}
		for i := range values {
			values[i] /= per.values[t.unit][i]
		}
	}
	if t.throughput {
		for i := range values {
			values[i] = 1 / values[i]
		}
	}
	return values
}

// excess returns by how much the measurement misses the target; it is negative if it does better.
func (t target) excess(m measurement) float64 {
	if t.throughput {
		return t.limit - bench.Median(m.values)
	}
	return bench.Median(m.values) - t.limit
}

func writeTargets(w io.Writer, all results) {
	fmt.Fprint(w, "| | target | measured | |\n|---|---:|---:|---|\n")
	for _, t := range targets {
		sign, unit := "≤", t.unit
		if t.throughput {
			sign = "≥"
		}
		if t.per != "" {
			unit = "×"
		}
		measured, verdict := "", "not measured"
		if m, ok := t.measure(all); ok {
			measured, verdict = cell(unit, m.values), t.verdict(m)
		}
		fmt.Fprintf(w, "| %s | %s %s | %s | %s |\n", t.what, sign, format(unit, t.limit), measured, verdict)
	}
}

func (t target) verdict(m measurement) string {
	switch {
	case t.excess(m) <= 0:
		return "met"
	case m.alone:
		return "**missed**"
	}
	return fmt.Sprintf("**missed**, most by: %s, %s", m.row.scenario, m.row.contender)
}

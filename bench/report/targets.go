package main

import (
	"fmt"
	"io"
)

// A target is a bound on one metric.
type target struct {
	what       string
	path, unit string
	per        string // path of the divisor of the metric, or empty
	// throughput says that the metric is a ratio of times, and limit a minimum ratio of
	// throughputs.
	throughput bool
	limit      float64
}

var targets = []target{
	{
		what: "hit, serial, 100 B: time, × floor",
		path: "Hit/serial/100B/singlefill", unit: "×floor", limit: 1.05,
	},
	{
		what: "hit, serial, 2 KB: time, × floor",
		path: "Hit/serial/2KB/singlefill", unit: "×floor", limit: 1.05,
	},
	{
		what: "hit, serial, 64 KB: time, × floor",
		path: "Hit/serial/64KB/singlefill", unit: "×floor", limit: 1.05,
	},
	{
		what: "hit, serial: allocations more than the floor's",
		path: "Hit/serial/2KB/singlefill", unit: "+allocs", limit: 8,
	},
	{
		what: "hits, 64 goroutines, 64 keys: throughput, × floor",
		path: "Hit/64 goroutines/64 keys, 2KB/singlefill", unit: "×floor", throughput: true, limit: 0.9,
	},
	{
		what: "the same on AutoPipeline",
		path: "Hit/64 goroutines/64 keys, 2KB, AutoPipeline/singlefill", unit: "×floor", throughput: true, limit: 0.9,
	},
	{
		what: "hits, 64 goroutines, 1 key, 100 B: throughput, × floor",
		path: "Hit/64 goroutines/1 key, 100B/singlefill", unit: "×floor", throughput: true, limit: 6,
	},
	{
		what: "the same: throughput, × go-redis/cache",
		path: "Hit/64 goroutines/1 key, 100B/singlefill", unit: "×go-redis/cache", throughput: true, limit: 1,
	},
	{
		what: "the same, 2 KB: throughput, × go-redis/cache",
		path: "Hit/64 goroutines/1 key, 2KB/singlefill", unit: "×go-redis/cache", throughput: true, limit: 1,
	},
	{
		what: "hit, client-side caching, 100 B: time, × GET and decode",
		path: "Hit/client-side caching/100B/singlefill", unit: "×floor", limit: 1.3,
	},
	{
		what: "hit, client-side caching, 2 KB: time, × GET and decode",
		path: "Hit/client-side caching/2KB/singlefill", unit: "×floor", limit: 1.3,
	},
	{
		what: "hit, client-side caching, 64 KB: time, × GET and decode",
		path: "Hit/client-side caching/64KB/singlefill", unit: "×floor", limit: 1.3,
	},
	{
		what: "miss, serial, 100 B: time, × the three commands by hand",
		path: "Miss/serial/100B/singlefill", unit: "×three by hand", limit: 1.1,
	},
	{
		what: "miss, serial, 2 KB: time, × the three commands by hand",
		path: "Miss/serial/2KB/singlefill", unit: "×three by hand", limit: 1.1,
	},
	{
		what: "miss, serial, 64 KB: time, × the three commands by hand",
		path: "Miss/serial/64KB/singlefill", unit: "×three by hand", limit: 1.1,
	},
	{
		what: "stampede, 137 ms, load time known: p99 beyond the load, ms",
		path: "Stampede/1 key/137ms load/singlefill, load time known", unit: "p99-ms", limit: 5,
	},
	{
		what: "the same: polls of a waiting process",
		path: "Stampede/1 key/137ms load/singlefill, load time known", unit: "polls", limit: 12,
	},
	{
		what: "stampede, 1.37 s, load time known: p99 beyond the load, ms",
		path: "Stampede/1 key/1.37s load/singlefill, load time known", unit: "p99-ms", limit: 10,
	},
	{
		what: "the same: polls of a waiting process",
		path: "Stampede/1 key/1.37s load/singlefill, load time known", unit: "polls", limit: 30,
	},
	{
		what: "stampede, 137 ms, load time ±30 %: p99 beyond the load, % of it",
		path: "Stampede/1 key/137ms load/singlefill, load time ±30 %", unit: "p99-%", limit: 15,
	},
	{
		what: "stampede, 1.37 s, load time ±30 %: p99 beyond the load, % of it",
		path: "Stampede/1 key/1.37s load/singlefill, load time ±30 %", unit: "p99-%", limit: 15,
	},
	{
		what: "stampede, 137 ms, new processes: p99 beyond the load, % of it",
		path: "Stampede/1 key/137ms load/singlefill, new processes", unit: "p99-%", limit: 30,
	},
	{
		what: "stampede, 1.37 s, new processes: p99 beyond the load, % of it",
		path: "Stampede/1 key/1.37s load/singlefill, new processes", unit: "p99-%", limit: 30,
	},
	{
		what: "free mutex, acquire and release: time, × redislock",
		path: "Lock/acquire and release/free/Mutex", unit: "×redislock", limit: 1.05,
	},
	{
		what: "the same: time, × redsync",
		path: "Lock/acquire and release/free/Mutex", unit: "×redsync", limit: 1.05,
	},
	{
		what: "10,000 goroutines: × floor, compared with 1",
		path: "Growth/goroutines/10000/singlefill", per: "Growth/goroutines/1/singlefill", unit: "×floor", limit: 1.1,
	},
	{
		what: "100,000 keys: × floor, compared with 1",
		path: "Growth/keys/100000/singlefill", per: "Growth/keys/1/singlefill", unit: "×floor", limit: 1.1,
	},
	{
		what: "16 processes: × floor, compared with 1",
		path: "Growth/processes/16/singlefill", per: "Growth/processes/1/singlefill", unit: "×floor", limit: 1.1,
	},
}

// measure returns the measured value and whether it meets the target. ok is false if it was not
// measured.
func (t target) measure(all results) (v float64, met, ok bool) {
	v, ok = all.median(t.path, t.unit)
	if !ok {
		return 0, false, false
	}
	if t.per != "" {
		base, ok := all.median(t.per, t.unit)
		if !ok {
			return 0, false, false
		}
		v /= base
	}
	if t.throughput {
		v = 1 / v
		return v, v >= t.limit, true
	}
	return v, v <= t.limit, true
}

func writeTargets(w io.Writer, all results) {
	fmt.Fprint(w, "| | target | measured | |\n| --- | ---: | ---: | --- |\n")
	for _, t := range targets {
		v, met, ok := t.measure(all)
		sign, verdict := "≤", "met"
		if t.throughput {
			sign = "≥"
		}
		if !met {
			verdict = "**missed**"
		}
		measured := fmt.Sprintf("%.2f", v)
		if v >= 10 {
			measured = fmt.Sprintf("%.0f", v)
		}
		if !ok {
			measured, verdict = "", "not measured"
		}
		fmt.Fprintf(w, "| %s | %s %v | %s | %s |\n", t.what, sign, t.limit, measured, verdict)
	}
}

package main

import (
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/singlefill/singlefill/bench"
)

const sample = `date: 2026-01-02
cpu: A processor
cores: 2
kernel: Linux 6.1
go: go1.26
redis: 7.0
load: 0.1, 0.2, 0.3
command: scripts/bench hits
goos: linux
BenchmarkHit/serial/2KB/floor-2   	 3	 24000 ns/op	 0 +allocs	 1.000 ×floor
BenchmarkHit/serial/2KB/go-redis/cache-2   	 3	 48000 ns/op	 4 +allocs	 2.000 ×floor
BenchmarkHit/serial/2KB/singlefill-2   	 3	 25000 ns/op	 5 +allocs	 1.040 ×floor
BenchmarkHit/serial/2KB/singlefill-2   	 3	 26000 ns/op	 5 +allocs	 1.060 ×floor
BenchmarkHit/serial/2KB/singlefill-2   	 3	 25200 ns/op	 5 +allocs	 1.050 ×floor
BenchmarkHit/64_goroutines/1_key/singlefill-2   	 3	 25200 ns/op	 0.2 ×floor	 0.5 ×go-redis/cache
BenchmarkGrowth/keys/1/floor-2   	 3	 20000 ns/op	 1 ×floor
BenchmarkGrowth/keys/100000/floor-2   	 3	 20000 ns/op	 1 ×floor
BenchmarkGrowth/keys/1/singlefill-2   	 3	 21000 ns/op	 1.05 ×floor
BenchmarkGrowth/keys/100000/singlefill-2   	 3	 26000 ns/op	 1.26 ×floor
PASS
`

func parsed(t *testing.T) results {
	t.Helper()
	var all results
	if err := all.read(strings.NewReader(sample)); err != nil {
		t.Fatal(err)
	}
	return all
}

// fill replaces sections with results, and no others.
func TestFill_Sections(t *testing.T) {
	const text = "a\n<!-- begin: Hit -->\nold\n<!-- end: Hit -->\nb\n<!-- begin: Lock -->\nold\n<!-- end: Lock -->\n"
	const want = `a
<!-- begin: Hit -->

` + "`scripts/bench hits`, 2026-01-02, load before 0.1:" + `

| serial, × floor | 2KB |
|---|---:|
| floor | 24.0 µs |
| go-redis/cache | 2.00 |
| singlefill | 1.05 |

| 64 goroutines, × floor | 1 key |
|---|---:|
| singlefill | 0.20 |

<!-- end: Hit -->
b
<!-- begin: Lock -->
old
<!-- end: Lock -->
`
	once := fill(text, parsed(t))
	if once != want {
		t.Errorf("got\n%s\nwant\n%s", once, want)
	}
	if twice := fill(once, parsed(t)); twice != once {
		t.Errorf("a second time it is not the same:\n%s", twice)
	}
}

// cell contains each unit once.
func TestCell(t *testing.T) {
	for _, test := range []struct {
		unit   string
		values []float64
		want   string
	}{
		{"p50-ms", []float64{1.5, 2.5, 3.5}, "2.5 ms (1.5–3.5)"},
		{"p50-ms", []float64{0.5, 2.5, 3.5}, "2.5 ms (500 µs–3.5 ms)"},
		{"p50-ms", []float64{2.5}, "2.5 ms"},
		{"ns/op", []float64{1, 2, 1000}, "2 ns"},
		{"×floor", []float64{0.01, 0.02, 0.9}, "0.02 (0.01–0.90)"},
		{"+allocs", []float64{5}, "+5"},
		{"loads/key", []float64{1.5}, "1.5"},
		{"hit ratio", []float64{0.7512, 0.7514}, "0.751"},
	} {
		if got := cell(test.unit, test.values); got != test.want {
			t.Errorf("cell(%q, %v) = %q, want %q", test.unit, test.values, got, test.want)
		}
	}
}

// A target is compared with the median of the runs, in the worst of its rows.
func TestTarget_Measure(t *testing.T) {
	for _, test := range []struct {
		target
		measured float64
		met      bool
	}{
		{target{path: "Hit/serial/2KB/singlefill", unit: "×floor", limit: 1.05}, 1.05, true},
		{target{path: "Hit/serial/2KB/singlefill", unit: "×floor", limit: 1.04}, 1.05, false},
		{target{path: "Hit/64 goroutines/1 key/singlefill", unit: "×floor", throughput: true, limit: 5}, 5, true},
		{target{path: "Hit/64 goroutines/1 key/singlefill", unit: "×floor", throughput: true, limit: 6}, 5, false},
		{target{path: "Growth/keys/100000/singlefill", per: "Growth/keys/1/singlefill", unit: "×floor", limit: 1.1}, 1.2, false},
		{target{path: `Growth/keys/\d+/singlefill`, per: "floor", unit: "ns/op", limit: 1.3}, 1.3, true},
		{target{path: `Growth/keys/\d+/singlefill`, per: "floor", unit: "ns/op", limit: 1.2}, 1.3, false},
	} {
		m, ok := test.measure(parsed(t))
		v, met := bench.Median(m.values), test.excess(m) <= 0
		if !ok || met != test.met || v < test.measured*0.999 || v > test.measured*1.001 {
			t.Errorf("%+v: measured %v, met %v, ok %v; want %v, %v", test.target, v, met, ok, test.measured, test.met)
		}
	}
	for _, missing := range []target{
		{path: "Hit/serial/64KB/singlefill", unit: "×floor"},
		{path: "Hit/serial/2KB/singlefill", unit: "p99-ms"},
		{path: "Hit/serial/2KB/singlefill", unit: "ns/op", per: "rueidis"},
	} {
		if m, ok := missing.measure(parsed(t)); ok {
			t.Errorf("%+v was not measured, and is %v", missing, m.values)
		}
	}
}

// A ratio is that of the measurements of one run, and a missed target names the worst row.
func TestWriteTargets(t *testing.T) {
	before := targets
	t.Cleanup(func() { targets = before })
	targets = []target{
		{what: "one", path: "Lock/a/b/ours", unit: "p99-ms", per: "theirs", limit: 1.5, why: "of a reason"},
		{what: "two", path: "Lock/a/.*/ours", unit: "p99-ms", limit: 3},
		{what: "three", path: "Lock/none/.*/ours", unit: "p99-ms", limit: 250},
	}
	var all results
	if err := all.read(strings.NewReader(`BenchmarkLock/a/b/ours 1 2 p99-ms
BenchmarkLock/a/b/theirs 1 1 p99-ms
BenchmarkLock/a/c/ours 1 9 p99-ms
BenchmarkLock/a/b/ours 1 30 p99-ms
BenchmarkLock/a/b/theirs 1 30 p99-ms
BenchmarkLock/a/c/ours 1 8 p99-ms
BenchmarkLock/a/b/ours 1 2 p99-ms
BenchmarkLock/a/b/theirs 1 2 p99-ms
BenchmarkLock/a/c/ours 1 7 p99-ms
`)); err != nil {
		t.Fatal(err)
	}
	var got strings.Builder
	writeTargets(&got, all)
	const want = `| | target | measured | |
|---|---:|---:|---|
| one | ≤ 1.50 | 1.00 (1.00–2.00) | met; of a reason |
| two | ≤ 3.0 ms | 8.0 ms (7.0–9.0) | **missed**, most by: c, ours |
| three | ≤ 250 ms |  | not measured |
`
	if got.String() != want {
		t.Errorf("got\n%s\nwant\n%s", got.String(), want)
	}
}

// Tables with the same contenders and units become one; one without units is left out; several units have a
// column each.
func TestWritePart_Joined(t *testing.T) {
	var all results
	if err := all.read(strings.NewReader(`cpu: A processor
BenchmarkHandOver/drain,_after_a_hold_of_6s/x/ours 1 2 commands
BenchmarkHandOver/a/b/ours 1 2 p50-ms
BenchmarkHandOver/a/b/theirs 1 3 p50-ms
BenchmarkHandOver/c/d/ours 1 4 p50-ms
BenchmarkHandOver/c/d/theirs 1 5 p50-ms
BenchmarkHandOver/c/e/theirs 1 6 p50-ms
BenchmarkHandOver/f/g/ours 1 4 p50-ms 7 commands
`)); err != nil {
		t.Fatal(err)
	}
	var got strings.Builder
	writePart(&got, all, "handover")
	const want = `
|  | a, b | c, d | c, e |
|---|---:|---:|---:|
| ours | 2.0 ms | 4.0 ms |  |
| theirs | 3.0 ms | 5.0 ms | 6.0 ms |

| f | g: p50 | commands |
|---|---:|---:|
| ours | 4.0 ms | 7 |
`
	if _, tables, _ := strings.Cut(got.String(), ":\n"); tables != want {
		t.Errorf("got\n%s\nwant\n%s", tables, want)
	}
}

// The results that are kept have the rows of each target, and each table of which columns are chosen.
func TestResults_HaveWhatIsShown(t *testing.T) {
	files, err := filepath.Glob("../results/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("results: %v, %v", files, err)
	}
	var all results
	for _, file := range files {
		f, err := os.Open(file)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(all.read(f), f.Close()); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
	}
	for _, target := range targets {
		if _, ok := target.measure(all); !ok {
			t.Errorf("%s: no result of %s with %s", target.what, target.path, target.unit)
		}
	}
	for table, units := range columns {
		rows := all.matching(table + "/.*")
		if len(rows) == 0 {
			t.Errorf("no result of %s", table)
		}
		for _, unit := range units {
			if len(rows) > 0 && len(rows[0].values[unit]) == 0 {
				t.Errorf("%s has no %s", table, unit)
			}
		}
	}
}

// The plot is well-formed XML, and has a line for each contender of each table.
func TestGrowth_Plot(t *testing.T) {
	plot := string(growth(parsed(t)))
	d := xml.NewDecoder(strings.NewReader(plot))
	for {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("%v in\n%s", err, plot)
		}
	}
	for _, want := range []string{">keys, floor<", ">keys, singlefill<", ">100,000<", "L620.0 "} {
		if !strings.Contains(plot, want) {
			t.Errorf("%q is not in\n%s", want, plot)
		}
	}
	if growth(results{}) != nil {
		t.Error("there is a plot of nothing")
	}
}

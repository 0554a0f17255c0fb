package fleet

import (
	"bytes"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

var docs = flag.String("scale", "", "simulate everything, and write it to scale.md and the plots in this folder")

var (
	sizes   = []int{10, 100, 1000, 10_000}
	lengths = []time.Duration{10 * time.Millisecond, 100 * time.Millisecond, time.Second, 10 * time.Second}
)

// Kinds of stampedes.
const (
	first   = "first"
	known   = "constant"
	varying = "±30 %"
	dead    = "holder dies"
)

// A row is the result of all stampedes of one kind.
type row struct {
	processes int
	length    time.Duration
	kind      string
	result
}

// TestScale measures the costs of a server, simulates stampedes, and writes the page and its plots.
// Without -scale it writes a copy, from the smallest fleet only.
func TestScale(t *testing.T) {
	t.Parallel()
	folder, sizes, lengths, commands := *docs, sizes, lengths, 100_000
	if folder == "" {
		folder, sizes, lengths, commands = t.TempDir(), sizes[:1], lengths[:1], 2000
		page, err := os.ReadFile("../../docs/scale.md")
		if err != nil {
			t.Fatal(err)
		}
		write(t, folder, "scale.md", page)
	}
	c := measure(t, commands)
	var rows []row
	for _, n := range sizes {
		for _, length := range lengths {
			inFleet(t, n, c, false, func(f *fleet) {
				begun := len(rows)
				rows = append(rows, f.constant(length)...)
				// Ten stampedes of larger fleets take too long.
				if n <= 1000 && length <= time.Second {
					rows = append(rows, f.varying(length))
				}
				for _, r := range rows[begun:] {
					t.Log(strings.Join(r.cells(c), " "))
				}
			})
		}
		writeTable(t, folder, c, rows) // intermediate results
		writePlots(t, folder, c, rows)
	}
}

func (f *fleet) constant(length time.Duration) (rows []row) {
	s := stampede{keys: "constant", length: func() time.Duration { return length }}
	kinds := []string{first, known}
	if length == time.Second { // similar for the other lengths: most of it is LockTTL
		kinds = append(kinds, dead)
	}
	for _, kind := range kinds {
		s.dies = kind == dead
		rows = append(rows, row{len(f.processes), length, kind, f.run(s)})
	}
	return rows
}

func (f *fleet) varying(length time.Duration) row {
	s := stampede{keys: "varying", length: func() time.Duration {
		return time.Duration((0.7 + 0.6*rand.Float64()) * float64(length))
	}}
	for range 6 {
		f.run(s) // so that the processes learn how long a load takes
	}
	r := row{len(f.processes), length, varying, f.run(s)}
	for range 3 {
		r.add(f.run(s))
	}
	return r
}

var columns = []string{
	"processes", "load", "kind", "loads per key", "late, p50", "p99", "max", "bound",
	"polls, p50", "max", "commands/s, mean", "peak", "longest queue", "dead for",
}

func (r row) cells(c costs) []string {
	bound, took := "", ""
	if r.kind == first || r.kind == known {
		bound = short(bounds{costs: c, waiters: r.processes * hotKeys, length: r.length, known: r.kind == known}.late())
	}
	if r.taken != nil {
		took = short(slices.Max(r.taken))
	}
	loads := fmt.Sprint(slices.Min(r.loads))
	if most := slices.Max(r.loads); most != slices.Min(r.loads) {
		loads += fmt.Sprint(" to ", most)
	}
	return []string{
		thousands(r.processes), fmt.Sprint(r.length), r.kind, loads,
		short(quantile(r.late, 0.5)), short(quantile(r.late, 0.99)), short(quantile(r.late, 1)), bound,
		fmt.Sprint(quantile(r.polls, 0.5)), fmt.Sprint(quantile(r.polls, 1)),
		thousands(r.mean()), thousands(r.peak()), short(r.queued), took,
	}
}

// mean and peak are commands per second: over the whole time, and in the busiest window.
func (r row) mean() int { return int(float64(r.commands) / r.lasted.Seconds()) }
func (r row) peak() int { return slices.Max(r.windows) * int(time.Second/window) }

// short formats a time with two digits.
func short(d time.Duration) string {
	unit := time.Microsecond
	for d >= 100*unit {
		unit *= 10
	}
	return d.Round(unit).String()
}

func thousands(n int) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

const begin, end = "<!-- begin of what scripts/scale writes -->\n", "<!-- end of what scripts/scale writes -->\n"

func writeTable(t *testing.T, folder string, c costs, rows []row) {
	name := filepath.Join(folder, "scale.md")
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok1 := bytes.Cut(text, []byte(begin))
	_, after, ok2 := bytes.Cut(rest, []byte(end))
	if !ok1 || !ok2 {
		t.Fatalf("%s has no %q and %q", name, begin, end)
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "The server: %v for a script, %v for any other command, as measured on a redis-server here; %v there and back.\n"+
		"Each stampede: %d hot keys; every process asks for each of them within %v.\n\n", c.script, c.plain, c.trip, hotKeys, within)
	fmt.Fprintf(&b, "| %s |\n|%s\n", strings.Join(columns, " | "), strings.Repeat(" ---: |", len(columns)))
	for _, r := range rows {
		fmt.Fprintf(&b, "| %s |\n", strings.Join(r.cells(c), " | "))
	}
	write(t, folder, "scale.md", slices.Concat(before, []byte(begin), b.Bytes(), []byte(end), after))
}

func write(t *testing.T, folder, name string, data []byte) {
	if err := os.WriteFile(filepath.Join(folder, name), data, 0o644); err != nil {
		t.Fatal(err)
	}
}

func writePlots(t *testing.T, folder string, c costs, rows []row) {
	ms := func(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
	late := chart{
		title: "How late the slowest 1 % of waiters get the value", x: "processes", y: "ms after the load's end, p99",
		xticks: floats(sizes), yticks: decades(1, 1000),
	}
	polls := chart{
		title: "How often a waiting process asks", x: "processes", y: "polls, median",
		xticks: floats(sizes), yticks: []float64{1, 2, 5, 10, 20, 50, 100},
	}
	commands := chart{
		title: "What the server is given to do around 1 s loads", x: "processes", y: "commands per second",
		xticks: floats(sizes), yticks: decades(100, 1_000_000),
	}
	for i, length := range lengths {
		for _, kind := range []string{first, known} {
			of := func(value func(r row) float64) series {
				s := series{name: fmt.Sprintf("%v, %s", length, kind), color: i, dashed: kind == first}
				for _, r := range rows {
					if r.length == length && r.kind == kind {
						s.points = append(s.points, [2]float64{float64(r.processes), value(r)})
					}
				}
				return s
			}
			late.series = append(late.series, of(func(r row) float64 { return ms(quantile(r.late, 0.99)) }))
			polls.series = append(polls.series, of(func(r row) float64 { return float64(quantile(r.polls, 0.5)) }))
			if length == time.Second {
				mean, peak := of(func(r row) float64 { return float64(r.mean()) }), of(func(r row) float64 { return float64(r.peak()) })
				mean.name, peak.name = kind+", mean", kind+", peak"
				mean.color, peak.color = 0, 1
				commands.series = append(commands.series, mean, peak)
			}
		}
	}
	floor := series{name: "one script each", color: -1}
	capacity := series{name: "the server's limit", color: -1}
	for _, n := range sizes {
		floor.points = append(floor.points, [2]float64{float64(n), ms(time.Duration(n*hotKeys) * c.script)})
		capacity.points = append(capacity.points, [2]float64{float64(n), float64(time.Second / c.script)})
	}
	late.series = append(late.series, floor)
	commands.series = append(commands.series, capacity)
	write(t, folder, "scale-late.svg", late.svg())
	write(t, folder, "scale-polls.svg", polls.svg())
	write(t, folder, "scale-commands.svg", commands.svg())

	largest := rows[len(rows)-1].processes
	over := chart{
		title: fmt.Sprintf("%s processes: what the server is given to do around one 1 s load", thousands(largest)),
		x:     "ms since the first one asked", y: "commands per second", linear: true,
	}
	for _, r := range rows {
		if r.processes != largest || r.length != time.Second || r.kind != first && r.kind != known {
			continue
		}
		s := series{name: r.kind, color: len(over.series), dashed: r.kind == first}
		for i, n := range r.windows {
			s.points = append(s.points, [2]float64{float64(i) * ms(window), float64(n * int(time.Second/window))})
		}
		over.series = append(over.series, s)
	}
	over.fit()
	write(t, folder, "scale-time.svg", over.svg())
}

func floats(values []int) (all []float64) {
	for _, v := range values {
		all = append(all, float64(v))
	}
	return all
}

func decades(from, to float64) (all []float64) {
	for v := from; v <= to; v *= 10 {
		all = append(all, v)
	}
	return all
}

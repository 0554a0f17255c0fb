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

	"github.com/singlefill/singlefill/internal/chart"
	"github.com/singlefill/singlefill/internal/redistest"
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
	wakeUps   bool
	processes int
	length    time.Duration
	kind      string
	result
}

// TestScale measures the costs of a server, simulates stampedes, and writes the page and its plots.
// Without -scale it writes a copy, from the smallest fleet only.
func TestScale(t *testing.T) {
	if testing.Short() || redistest.Race {
		t.Skip("a report, for which nothing runs that other tests do not")
	}
	t.Parallel()
	folder, sizes, lengths, commands := *docs, sizes, lengths, 100_000
	if folder == "" {
		folder, sizes, lengths, commands = copyOfPage(t), sizes[:1], lengths[:1], 2000
	}
	c := measure(t, commands)
	var rows []row
	for _, n := range sizes {
		for _, length := range lengths {
			for _, wakeUps := range []bool{true, false} {
				inFleet(t, n, c, wakeUps, func(f *fleet) {
					begun := len(rows)
					rows = append(rows, f.constant(length)...)
					// Ten stampedes of larger fleets take too long.
					if n <= 1000 && length <= time.Second {
						rows = append(rows, f.varying(length))
					}
					for i := range rows[begun:] {
						r := &rows[begun+i]
						r.wakeUps = wakeUps
						t.Log(r.String())
					}
				})
			}
		}
		writeTable(t, folder, c, rows) // intermediate results
		writePlots(t, folder, c, rows)
	}
}

// copyOfPage returns a folder with a copy of the page, to be written to.
func copyOfPage(t *testing.T) (folder string) {
	folder = t.TempDir()
	page, err := os.ReadFile("../../docs/scale.md")
	redistest.Must(t, err)
	write(t, folder, "scale.md", page)
	return folder
}

func (f *fleet) constant(length time.Duration) (rows []row) {
	s := stampede{keys: "constant", length: func() time.Duration { return length }}
	kinds := []string{first, known}
	if length == time.Second { // similar for the other lengths: most of it is LockTTL
		kinds = append(kinds, dead)
	}
	for _, kind := range kinds {
		s.dies = kind == dead
		rows = append(rows, row{processes: len(f.processes), length: length, kind: kind, result: f.run(s)})
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
	r := row{processes: len(f.processes), length: length, kind: varying, result: f.run(s)}
	for range 3 {
		r.add(f.run(s))
	}
	return r
}

// String has what the page leaves out, for the log.
func (r row) String() string {
	return fmt.Sprintf("%d processes, wake-ups %v, %v %s: %d loads, late %v at the median and %v at most,"+
		" %d polls at most, %d commands a second, %d in the busiest window, %v queued, replaced after %v",
		r.processes, r.wakeUps, r.length, r.kind, slices.Max(r.loads), quantile(r.late, 0.5), quantile(r.late, 1),
		quantile(r.polls, 1), r.mean(), r.peak(), r.queued, r.taken)
}

// each is commands per waiter. A connection counts as one.
func (r row) each() float64 { return float64(r.commands) / float64(len(r.loads)*r.processes) }

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

const (
	begin, end         = "<!-- begin of what scripts/scale writes -->\n", "<!-- end of what scripts/scale writes -->\n"
	beginNear, endNear = "<!-- begin of what scripts/scale writes about Near -->\n", "<!-- end of what scripts/scale writes about Near -->\n"
)

// writeTable writes a line for each size and length: how late 99 % of the waiters are at most, and what each
// of them sends. The log of the test has more of each row.
func writeTable(t *testing.T, folder string, c costs, rows []row) {
	find := func(like row, kind string, wakeUps bool) *row {
		i := slices.IndexFunc(rows, func(r row) bool {
			return r.processes == like.processes && r.length == like.length && r.kind == kind && r.wakeUps == wakeUps
		})
		if i < 0 {
			return &row{}
		}
		return &rows[i]
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "%v for a script, %v for another command, %v for a message to a listener, %v for a connection, as\n"+
		"measured on a redis-server here; %v there and back; %d hot keys, for which every process asks within %v.\n\n",
		c.script, c.plain, c.message, c.connection, c.trip, hotKeys, within)
	fmt.Fprintf(&b, "| processes | load | late, first | no wake-ups | constant | no wake-ups |"+
		" commands, first | no wake-ups | constant | no wake-ups | longest queue |\n|---:|---:|%s\n", strings.Repeat("---:|", 9))
	for _, like := range rows {
		if like.kind != first || !like.wakeUps || like.length == 100*time.Millisecond { // the plots have it
			continue
		}
		fmt.Fprintf(&b, "| %s | %v |", chart.Thousands(like.processes), like.length)
		var late, each string
		var queued time.Duration
		for _, kind := range []string{first, known} {
			for _, wakeUps := range []bool{true, false} {
				r := find(like, kind, wakeUps)
				late += " " + short(quantile(r.late, 0.99)) + " |"
				each += fmt.Sprintf(" %.1f |", r.each())
				queued = max(queued, r.queued)
			}
		}
		fmt.Fprintf(&b, "%s%s %s |\n", late, each, short(queued))
	}
	writeBetween(t, folder, begin, end, b.Bytes())
}

// writeBetween replaces what is between two marks of scale.md.
func writeBetween(t *testing.T, folder, begin, end string, data []byte) {
	text, err := os.ReadFile(filepath.Join(folder, "scale.md"))
	redistest.Must(t, err)
	before, rest, ok1 := bytes.Cut(text, []byte(begin))
	_, after, ok2 := bytes.Cut(rest, []byte(end))
	if !ok1 || !ok2 {
		t.Fatalf("scale.md has no %q and %q", begin, end)
	}
	write(t, folder, "scale.md", slices.Concat(before, []byte(begin), data, []byte(end), after))
}

func write(t *testing.T, folder, name string, data []byte) {
	redistest.Must(t, os.WriteFile(filepath.Join(folder, name), data, 0o644))
}

func writePlots(t *testing.T, folder string, c costs, rows []row) {
	ms := func(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
	late := chart.Chart{
		Title: "How late the slowest 1 % of waiters get a value loaded for the first time", X: "processes", Y: "ms after the load's end, p99",
		XTicks: floats(sizes), YTicks: decades(0.1, 1000),
	}
	each := chart.Chart{
		Title: "What a waiter sends during a first load", X: "processes", Y: "commands",
		XTicks: floats(sizes), YTicks: []float64{2, 5, 10, 20, 50, 100},
	}
	commands := chart.Chart{
		Title: "What the server is given to do around first loads of 1 s", X: "processes", Y: "commands per second",
		XTicks: floats(sizes), YTicks: decades(10, 1_000_000),
	}
	ways := map[bool]string{true: "", false: ", no wake-ups"}
	for i, length := range lengths {
		for _, wakeUps := range []bool{true, false} {
			of := func(value func(r row) float64) chart.Series {
				s := chart.Series{Name: length.String() + ways[wakeUps], Color: i, Dashed: !wakeUps}
				for _, r := range rows {
					if r.length == length && r.kind == first && r.wakeUps == wakeUps {
						s.Points = append(s.Points, [2]float64{float64(r.processes), value(r)})
					}
				}
				return s
			}
			late.Series = append(late.Series, of(func(r row) float64 { return ms(quantile(r.late, 0.99)) }))
			each.Series = append(each.Series, of(row.each))
			if length == time.Second {
				mean, peak := of(func(r row) float64 { return float64(r.mean()) }), of(func(r row) float64 { return float64(r.peak()) })
				mean.Name, peak.Name = "mean"+ways[wakeUps], "peak"+ways[wakeUps]
				mean.Color, peak.Color = 0, 1
				commands.Series = append(commands.Series, mean, peak)
			}
		}
	}
	floor := chart.Series{Name: "one script each", Color: -1}
	capacity := chart.Series{Name: "the server's limit", Color: -1}
	for _, n := range sizes {
		floor.Points = append(floor.Points, [2]float64{float64(n), ms(time.Duration(n*hotKeys) * c.script)})
		capacity.Points = append(capacity.Points, [2]float64{float64(n), float64(time.Second / c.script)})
	}
	late.Series = append(late.Series, floor)
	commands.Series = append(commands.Series, capacity)
	write(t, folder, "scale-late.svg", late.SVG())
	write(t, folder, "scale-each.svg", each.SVG())
	write(t, folder, "scale-commands.svg", commands.SVG())

	largest := rows[len(rows)-1].processes
	over := chart.Chart{
		Title: fmt.Sprintf("%s processes: what the server is given to do around a first load of 1 s", chart.Thousands(largest)),
		X:     "ms since the first one asked", Y: "commands per second", Linear: true,
	}
	for _, r := range rows {
		if r.processes != largest || r.length != time.Second || r.kind != first {
			continue
		}
		s := chart.Series{Name: "1s" + ways[r.wakeUps], Color: len(over.Series), Dashed: !r.wakeUps}
		for i, n := range r.windows {
			s.Points = append(s.Points, [2]float64{float64(i) * ms(window), float64(n * int(time.Second/window))})
		}
		over.Series = append(over.Series, s)
	}
	over.Fit()
	write(t, folder, "scale-time.svg", over.SVG())
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

package main

import (
	"bufio"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/singlefill/singlefill/bench"
)

// A row is one contender of one scenario: BenchmarkPart/table/scenario/contender.
type row struct {
	part, table, scenario, contender string

	units  []string
	values map[string][]float64 // by unit: one for each run of the benchmark
}

func (r *row) path() string { return r.part + "/" + r.table + "/" + r.scenario + "/" + r.contender }

type results struct {
	rows     []*row
	settings map[string]setting // by part
}

// A setting is where and how a part was measured, by the names of its lines.
type setting map[string]string

func (s setting) machine() string {
	return fmt.Sprintf("%s, %s cores, %s, %s, Redis %s", s["cpu"], s["cores"], s["kernel"], s["go"], s["redis"])
}

// run has the day, and the load average of the minute before: 0 on a machine that does nothing else.
func (s setting) run() string {
	load, _, _ := strings.Cut(s["load"], ",")
	return fmt.Sprintf("%s, load before %s:", s["date"], load)
}

var processors = regexp.MustCompile(`-\d+$`)

// read adds the output of go test -bench. Lines "name: value" before it describe where and how it
// was measured.
func (all *results) read(from io.Reader) error {
	if all.settings == nil {
		all.settings = make(map[string]setting)
	}
	about := make(setting)
	lines := bufio.NewScanner(from)
	for lines.Scan() {
		if name, value, found := strings.Cut(lines.Text(), ": "); found {
			about[name] = strings.TrimSpace(value)
			continue
		}
		name, found := strings.CutPrefix(lines.Text(), "Benchmark")
		fields := strings.Fields(name)
		if !found || len(fields) < 4 {
			continue
		}
		parts := strings.SplitN(strings.ReplaceAll(processors.ReplaceAllString(fields[0], ""), "_", " "), "/", 4)
		if len(parts) < 4 {
			continue
		}
		all.settings[parts[0]] = about
		r := all.row(parts)
		for i := 2; i+1 < len(fields); i += 2 {
			v, err := strconv.ParseFloat(fields[i], 64)
			if err != nil {
				return fmt.Errorf("%q: %w", lines.Text(), err)
			}
			unit := strings.ReplaceAll(fields[i+1], "_", " ")
			if r.values[unit] == nil {
				r.units = append(r.units, unit)
			}
			r.values[unit] = append(r.values[unit], v)
		}
	}
	return lines.Err()
}

func (all *results) row(parts []string) *row {
	if r := all.find(strings.Join(parts, "/")); r != nil {
		return r
	}
	r := &row{parts[0], parts[1], parts[2], parts[3], nil, make(map[string][]float64)}
	all.rows = append(all.rows, r)
	return r
}

// find returns the row of a path, or nil.
func (all *results) find(path string) *row {
	for _, r := range all.rows {
		if r.path() == path {
			return r
		}
	}
	return nil
}

// matching returns the rows whose whole path matches a regular expression.
func (all *results) matching(path string) (rows []*row) {
	pattern := regexp.MustCompile("^(?:" + path + ")$")
	for _, r := range all.rows {
		if pattern.MatchString(r.path()) {
			rows = append(rows, r)
		}
	}
	return rows
}

// median returns the median of a metric. ok is false if it was not measured.
func (all *results) median(path, unit string) (m float64, ok bool) {
	if r := all.find(path); r != nil && len(r.values[unit]) > 0 {
		return bench.Median(r.values[unit]), true
	}
	return 0, false
}

// columns are the units to show of a table: a column for each in each scenario. Of no units, the table is left
// out: a target or the README has what is to be read of it. Any other table shows its last ratio, or what it
// has without one.
var columns = map[string][]string{
	"Hit/64 goroutines": {"×floor"},
	"Hit/in memory":     {},
	"Many/stampede":     {"p99-ms", "round trips"},
	"Many/one process":  {"p99-ms"},
	"Many/one caller":   {"p50-ms"},
	"Stampede/1 key":    {"p99-ms", "commands"},
	"Stampede/100 keys": {"p99-ms", "commands"},
}

// shown returns the units that the table of r shows.
func (r *row) shown() []string {
	if units, ok := columns[r.part+"/"+r.table]; ok {
		return units
	}
	for _, unit := range slices.Backward(r.units) {
		if strings.HasPrefix(unit, "×") {
			return []string{unit}
		}
	}
	return r.units
}

// title returns the column title of a unit.
func title(unit string) string {
	switch {
	case unit == "ns/op":
		return "time"
	case strings.HasPrefix(unit, "×"):
		return "× " + strings.TrimPrefix(unit, "×")
	}
	if unit, found := strings.CutSuffix(unit, "-ms"); found {
		return unit
	}
	return unit
}

// median returns the median of the runs. The contender with which others are compared has its time in place
// of a ratio. It is empty for what was not measured.
func (r *row) median(unit string) string {
	if r == nil || len(r.values[unit]) == 0 {
		return ""
	}
	values := r.values[unit]
	if strings.HasPrefix(unit, "×") && slices.Min(values) == 1 && slices.Max(values) == 1 {
		unit, values = "ns/op", r.values["ns/op"]
	}
	return format(unit, bench.Median(values))
}

// cell returns the median of the runs and, for ratios and waiting times, the minimum and the
// maximum.
func cell(unit string, values []float64) string {
	if len(values) == 0 {
		return ""
	}
	show := func(v float64) string { return format(unit, v) }
	m := show(bench.Median(values))
	if ratio := strings.HasPrefix(unit, "×"); !ratio && !strings.HasSuffix(unit, "-ms") {
		return m
	}
	least, most := show(bench.Quantile(values, 0)), show(bench.Quantile(values, 1))
	if least == most {
		return m
	}
	if number, unit, found := strings.Cut(least, " "); found && strings.HasSuffix(most, " "+unit) {
		least, most = number, strings.TrimSuffix(most, " "+unit)
		if !strings.HasSuffix(m, " "+unit) {
			most += " " + unit
		}
	}
	return fmt.Sprintf("%s (%s–%s)", m, least, most)
}

func format(unit string, v float64) string {
	switch {
	case strings.HasPrefix(unit, "×") && v < 0.095:
		return strconv.FormatFloat(v, 'g', 2, 64)
	case strings.HasPrefix(unit, "×") && v >= 10:
		return fmt.Sprintf("%.0f", v)
	case strings.HasPrefix(unit, "×"):
		return fmt.Sprintf("%.2f", v)
	case unit == "ns/op":
		return duration(v)
	case strings.HasSuffix(unit, "-ms"):
		return duration(v * 1e6)
	case strings.HasPrefix(unit, "+"):
		return fmt.Sprintf("%+.0f", v)
	case v != 0 && v < 10:
		return strings.TrimSuffix(fmt.Sprintf("%.1f", v), ".0")
	}
	return fmt.Sprintf("%.0f", v)
}

func duration(ns float64) string {
	for _, u := range []struct {
		name string
		ns   float64
	}{{"ms", 1e6}, {"µs", 1e3}} {
		if ns >= u.ns || ns <= -u.ns {
			return strconv.FormatFloat(ns/u.ns, 'f', digits(ns/u.ns), 64) + " " + u.name
		}
	}
	return strconv.FormatFloat(ns, 'f', 0, 64) + " ns"
}

// digits returns how many digits to show after the point, to get two or three in all.
func digits(v float64) int {
	if v < 100 && v > -100 {
		return 1
	}
	return 0
}

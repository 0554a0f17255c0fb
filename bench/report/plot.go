package main

import (
	"math"
	"slices"
	"strconv"

	"github.com/singlefill/singlefill/bench"
	"github.com/singlefill/singlefill/internal/chart"
)

// growth plots the time of one hit over the number of goroutines, keys and processes. It returns nil if
// they were not measured.
func growth(all results) []byte {
	c := chart.Chart{
		Title: "Time of one hit in a growing load",
		X:     "goroutines, keys, processes", Y: "µs per hit",
		XTicks: []float64{1, 10, 100, 1000, 10_000, 100_000}, YTicks: []float64{10, 20, 50, 100},
	}
	var tables []string
	for _, r := range all.rows {
		if r.part != "Growth" {
			continue
		}
		if !slices.Contains(tables, r.table) {
			tables = append(tables, r.table)
		}
		name := r.table + ", " + r.contender
		i := slices.IndexFunc(c.Series, func(s chart.Series) bool { return s.Name == name })
		if i < 0 {
			i = len(c.Series)
			color := slices.Index(tables, r.table)
			c.Series = append(c.Series, chart.Series{Name: name, Color: color, Dashed: r.contender == "floor"})
		}
		if n, err := strconv.ParseFloat(r.scenario, 64); err == nil {
			point := [2]float64{n, bench.Median(r.values["ns/op"]) / 1e3}
			c.Series[i].Points = append(c.Series[i].Points, point)
		}
	}
	if c.Series == nil {
		return nil
	}
	return c.SVG()
}

// waiter plots the steps of a process that waits for another one, in the first run. It returns nil if that was
// not measured.
func waiter(all results) []byte {
	c := chart.Chart{Title: "A process that waits for a load of 10 ms in another one", X: "ms since the load began", Y: "step",
		Linear: true, YTicks: []float64{0}}
	var first, last float64
	for _, r := range all.rows {
		if r.part != "Waiter" {
			continue
		}
		from, to, y := r.values["from-ms"][0], r.values["to-ms"][0], float64(len(c.YTicks))
		first, last = min(first, from), max(last, to)
		c.YTicks = append(c.YTicks, y)
		c.Series = append(c.Series, chart.Series{Name: r.contender, Color: (len(c.YTicks) - 2) % 4, Points: [][2]float64{{from, y}, {to, y}}})
	}
	if c.Series == nil {
		return nil
	}
	c.YTicks = append(c.YTicks, float64(len(c.YTicks)))
	for x := math.Floor(first/5) * 5; x < last+5; x += 5 {
		c.XTicks = append(c.XTicks, x)
	}
	return c.SVG()
}

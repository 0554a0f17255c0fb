package main

import (
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// A seconds is a duration, in JSON a number of seconds.
type seconds time.Duration

func (s seconds) MarshalJSON() ([]byte, error) {
	return strconv.AppendFloat(nil, time.Duration(s).Seconds(), 'f', -1, 64), nil
}

func (s seconds) String() string {
	d := time.Duration(s)
	switch a := d.Abs(); {
	case d == 0:
		return "-"
	case a < time.Second:
		return d.Round(time.Millisecond).String()
	case a < time.Minute:
		return d.Round(100 * time.Millisecond).String()
	case a < 48*time.Hour:
		return strings.Replace(strings.Replace(d.Round(time.Second).String(), "m0s", "m", 1), "h0m", "h", 1)
	}
	return fmt.Sprintf("%.1fd", d.Hours()/24)
}

// size returns a number of bytes for people.
func size(n int64) string {
	switch {
	case n < 1<<10:
		return fmt.Sprintf("%d B", n)
	case n < 1<<20:
		return fmt.Sprintf("%.1f KiB", float64(n)/(1<<10))
	}
	return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
}

// A table has columns as wide as needed.
type table struct {
	x    *execution
	rows [][]string
}

func (x *execution) table(head ...string) *table { return &table{x, [][]string{head}} }

func (t *table) add(cells ...any) {
	row := make([]string, len(cells))
	for i, c := range cells {
		row[i] = fmt.Sprint(c)
	}
	t.rows = append(t.rows, row)
}

func (t *table) print() {
	widths := make([]int, len(t.rows[0]))
	for _, row := range t.rows {
		for i, cell := range row {
			widths[i] = max(widths[i], width(cell))
		}
	}
	for _, row := range t.rows {
		var line strings.Builder
		for i, cell := range row {
			line.WriteString(cell + strings.Repeat(" ", widths[i]-width(cell)+2))
		}
		fmt.Fprintln(t.x.stdout, strings.TrimRight(line.String(), " "))
	}
}

// width returns the width of a cell without its colour.
func width(cell string) int {
	n := utf8.RuneCountInString(cell)
	if strings.HasPrefix(cell, "\x1b[") {
		n -= len("\x1b[32m") + len("\x1b[0m")
	}
	return n
}

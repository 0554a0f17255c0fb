package main

import (
	"fmt"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
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

// A table has columns as wide as needed. Flush prints it.
type table struct{ *tabwriter.Writer }

func (x *execution) table(head ...any) table {
	t := table{tabwriter.NewWriter(x.stdout, 0, 0, 2, ' ', 0)}
	t.add(head...)
	return t
}

func (t table) add(cells ...any) {
	fmt.Fprintf(t, "%v"+strings.Repeat("\t%v", len(cells)-1)+"\n", cells...)
}

package main

import (
	"fmt"
	"io"
	"strings"
)

// summary is the README's table: times of one operation, divided by the time of a GET and
// msgpack.Unmarshal.
var summary = []struct{ what, scenario string }{
	{"a hit, 2 KB", "Hit/serial/2KB"},
	{"64 goroutines, each with its own key", "Hit/64 goroutines/64 keys, 2KB"},
	{"64 goroutines, one hot key", "Hit/64 goroutines/1 key, 2KB"},
	{"a hit in the client's own cache", "Hit/client-side caching/2KB"},
	{"a hit in memory: `Near`, `TinyLFU`", "Hit/in memory/2KB"},
}

var compared = []string{"singlefill", "go-redis/cache", "singleflight"}

func writeSummary(w io.Writer, all results) {
	fmt.Fprintf(w, "| time, × `GET` and decode by hand | %s |\n| --- |%s\n",
		strings.Join(compared, " | "), strings.Repeat(" ---: |", len(compared)))
	for _, s := range summary {
		fmt.Fprintf(w, "| %s |", s.what)
		for _, contender := range compared {
			ratio := "–"
			if v, ok := all.median(s.scenario+"/"+contender, "×floor"); ok {
				ratio = fmt.Sprintf("%.2f", v)
				if v < 0.1 {
					ratio = fmt.Sprintf("%.3f", v)
				}
			}
			fmt.Fprintf(w, " %s |", ratio)
		}
		fmt.Fprintln(w)
	}
}

// Command report writes the tables of docs/speed.md and of the README from the output of the
// benchmarks:
//
//	report docs README.md docs/speed.md results/*.txt
//
// In the documents it replaces the text between <!-- begin: X --> and <!-- end: X -->: by the
// tables of BenchmarkX; if X is targets, by the targets and whether they are met; if X is summary,
// by the most important ratios. It also replaces the plot in the directory that is the first
// argument.
package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

func main() {
	if len(os.Args) < 4 {
		fmt.Fprintln(os.Stderr, "usage: report plots document.md... results.txt...")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, "report:", err)
		os.Exit(1)
	}
}

func run(plots string, files []string) error {
	var documents []string
	var all results
	for _, name := range files {
		if filepath.Ext(name) == ".md" {
			documents = append(documents, name)
			continue
		}
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		err = all.read(f)
		_ = f.Close()
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	if plot := growth(all); plot != "" {
		name := filepath.Join(plots, "speed-growth.svg")
		if err := os.WriteFile(name, []byte(plot), 0o644); err != nil {
			return err
		}
	}
	for _, name := range documents {
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		if err := os.WriteFile(name, []byte(fill(string(text), all)), 0o644); err != nil {
			return err
		}
	}
	return nil
}

var section = regexp.MustCompile(`(?s)(<!-- begin: (\w+) -->\n).*?(<!-- end: (\w+) -->)`)

// fill replaces the sections that have results.
func fill(text string, all results) string {
	return section.ReplaceAllStringFunc(text, func(old string) string {
		m := section.FindStringSubmatch(old)
		var b strings.Builder
		switch m[2] {
		case "targets":
			writeTargets(&b, all)
		case "summary":
			writeSummary(&b, all)
			return m[1] + b.String() + m[3]
		default:
			writePart(&b, all, m[2])
		}
		if b.Len() == 0 {
			return old
		}
		return m[1] + "\n" + b.String() + "\n" + m[3]
	})
}

// writePart writes the tables of one benchmark function.
func writePart(w io.Writer, all results, part string) {
	part = strings.ToLower(part)
	rows := slices.DeleteFunc(slices.Clone(all.rows), func(r *row) bool { return strings.ToLower(r.part) != part })
	if len(rows) == 0 {
		return
	}
	fmt.Fprintf(w, "%s\n", all.settings[rows[0].part])
	for len(rows) > 0 {
		n := slices.IndexFunc(rows, func(r *row) bool { return r.table != rows[0].table })
		if n < 0 {
			n = len(rows)
		}
		writeTable(w, rows[:n])
		rows = rows[n:]
	}
}

func writeTable(w io.Writer, rows []*row) {
	units := slices.Clone(rows[0].units)
	slices.SortStableFunc(units, func(a, b string) int { return rank(a) - rank(b) })
	fmt.Fprintf(w, "\n| %s | |", rows[0].table)
	for _, u := range units {
		fmt.Fprintf(w, " %s |", title(u))
	}
	fmt.Fprintf(w, "\n| --- | --- |%s\n", strings.Repeat(" ---: |", len(units)))
	scenario := ""
	for _, r := range rows {
		shown := r.scenario
		if shown == scenario {
			shown = ""
		}
		scenario = r.scenario
		fmt.Fprintf(w, "| %s | %s |", shown, r.contender)
		for _, u := range units {
			fmt.Fprintf(w, " %s |", cell(u, r.values[u]))
		}
		fmt.Fprintln(w)
	}
}

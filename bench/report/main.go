// Command report writes the tables of docs/speed.md, docs/figures.md and the README from the output of the
// benchmarks:
//
//	report README.md docs/speed.md docs/figures.md results/*.txt
//
// In the documents it replaces the text between <!-- begin: X --> and <!-- end: X -->: by the
// tables of BenchmarkX; if X is targets, by the targets and whether they are met; if X is summary,
// by the most important ratios; if X is machines, by where all of it was measured. The results have more
// than the tables: every unit of every run.
package main

import (
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: report document.md... results.txt...")
		os.Exit(2)
	}
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "report:", err)
		os.Exit(1)
	}
}

func run(files []string) error {
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
		case "machines":
			writeMachines(&b, all)
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
	fmt.Fprintf(w, "%s\n", all.settings[rows[0].part].run())
	for _, t := range tables(rows) {
		t.write(w)
	}
}

// A table has a line for each contender, and for each scenario a column of each unit.
type table struct {
	name       string // empty if it joins several tables of the benchmark, which the scenarios name then
	units      []string
	contenders []string
	scenarios  []string
	rows       map[[2]string]*row // by scenario and contender
}

// tables joins successive tables of a benchmark that have the same units and contenders.
func tables(rows []*row) (all []*table) {
	for len(rows) > 0 {
		n := slices.IndexFunc(rows, func(r *row) bool { return r.table != rows[0].table })
		if n < 0 {
			n = len(rows)
		}
		next := newTable(rows[:n])
		rows = rows[n:]
		if len(next.units) > 0 && (len(all) == 0 || !all[len(all)-1].join(next)) {
			all = append(all, next)
		}
	}
	return all
}

func newTable(rows []*row) *table {
	t := &table{name: rows[0].table, units: rows[0].shown(), rows: make(map[[2]string]*row)}
	for _, r := range rows {
		if !slices.Contains(t.scenarios, r.scenario) {
			t.scenarios = append(t.scenarios, r.scenario)
		}
		if !slices.Contains(t.contenders, r.contender) {
			t.contenders = append(t.contenders, r.contender)
		}
		t.rows[[2]string{r.scenario, r.contender}] = r
	}
	return t
}

func (t *table) join(next *table) bool {
	if !slices.Equal(t.units, next.units) || !slices.Equal(t.contenders, next.contenders) {
		return false
	}
	t.nameScenarios()
	next.nameScenarios()
	t.scenarios = append(t.scenarios, next.scenarios...)
	maps.Copy(t.rows, next.rows)
	return true
}

// nameScenarios moves the name of the table into the names of its scenarios.
func (t *table) nameScenarios() {
	if t.name == "" {
		return
	}
	rows := make(map[[2]string]*row)
	for i, scenario := range t.scenarios {
		t.scenarios[i] = t.name + ", " + scenario
		for _, c := range t.contenders {
			rows[[2]string{t.scenarios[i], c}] = t.rows[[2]string{scenario, c}]
		}
	}
	t.name, t.rows = "", rows
}

func (t *table) write(w io.Writer) {
	corner := t.name
	if u := t.units[0]; len(t.units) == 1 && strings.HasPrefix(u, "×") {
		corner = strings.TrimPrefix(corner+", "+title(u), ", ")
	}
	fmt.Fprintf(w, "\n| %s |", corner)
	for _, scenario := range t.scenarios {
		for i, u := range t.units {
			switch {
			case i > 0:
				fmt.Fprintf(w, " %s |", title(u))
			case len(t.units) > 1:
				fmt.Fprintf(w, " %s: %s |", scenario, title(u))
			default:
				fmt.Fprintf(w, " %s |", scenario)
			}
		}
	}
	fmt.Fprintf(w, "\n|---|%s\n", strings.Repeat("---:|", len(t.scenarios)*len(t.units)))
	for _, contender := range t.contenders {
		fmt.Fprintf(w, "| %s |", contender)
		for _, scenario := range t.scenarios {
			for _, u := range t.units {
				fmt.Fprintf(w, " %s |", t.rows[[2]string{scenario, contender}].median(u))
			}
		}
		fmt.Fprintln(w)
	}
}

// writeMachines writes where the results are from: machines, or versions, in the order of their parts.
func writeMachines(w io.Writer, all results) {
	var machines []string
	for _, r := range all.rows {
		if m := all.settings[r.part].machine(); !slices.Contains(machines, m) {
			machines = append(machines, m)
		}
	}
	fmt.Fprintln(w, strings.Join(machines, "; "))
}

package main

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// The results that are kept have the rows of each target, and each table of which columns are chosen; and the
// tables of the pages are what the program writes from them.
func TestResults_AreShown(t *testing.T) {
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
	for _, page := range []string{"../../README.md", "../../docs/speed.md", "../../docs/figures.md"} {
		text, err := os.ReadFile(page)
		if err != nil || fill(string(text), all) != string(text) {
			t.Errorf("%s does not show the results, %v: run go run ./report", page, err)
		}
	}
}

package singlefill_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const faultsPage = "docs/faults.md"

// faultsNamed returns the tests that the page names, each with the file in which it says it is.
func faultsNamed(t *testing.T) map[string][]string {
	t.Helper()
	page, err := os.ReadFile(faultsPage)
	if err != nil {
		t.Fatal(err)
	}
	named := make(map[string][]string)
	for _, m := range regexp.MustCompile(`\[(Test\w+)\]\(([^)]+)\)`).FindAllStringSubmatch(string(page), -1) {
		named[m[1]] = append(named[m[1]], filepath.Join(filepath.Dir(faultsPage), m[2]))
	}
	if bare := regexp.MustCompile(`[^\[\w]Test\w+`).FindAllString(string(page), -1); len(bare) > 0 {
		t.Errorf("named without the file: %q", bare)
	}
	return named
}

// faultsIn returns the tests of a file.
func faultsIn(t *testing.T, file string) map[string]bool {
	t.Helper()
	source, err := os.ReadFile(file)
	if err != nil {
		t.Error(err)
	}
	tests := make(map[string]bool)
	begins := regexp.MustCompile(`(?m)^func (Test\w+)\(t \*testing\.T\)`)
	for _, m := range begins.FindAllStringSubmatch(string(source), -1) {
		tests[m[1]] = true
	}
	return tests
}

func TestEveryTestThatThePageOfFaultsNamesExists(t *testing.T) {
	t.Parallel()
	named := faultsNamed(t)
	if len(named) < 100 {
		t.Errorf("%d tests are named", len(named))
	}
	for test, files := range named {
		for _, file := range files {
			if !faultsIn(t, file)[test] {
				t.Errorf("%s: no %s", file, test)
			}
		}
	}
}

func TestThePageOfFaultsNamesEveryTestOfFaults(t *testing.T) {
	t.Parallel()
	named := faultsNamed(t)
	for _, pattern := range []string{"fault_test.go", "faults_*_test.go", "lock/fault_test.go",
		"lock/faults_*_test.go"} {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			t.Errorf("%s: %q, %v", pattern, files, err)
		}
		for _, file := range files {
			if filepath.Base(file) == "faults_doc_test.go" {
				continue // it is about the page
			}
			for test := range faultsIn(t, file) {
				if !slices.Contains(named[test], file) {
					t.Errorf("%s: %s is missing from the page", file, test)
				}
			}
		}
	}
}

func TestTheRowsOfThePageOfFaultsAreWhole(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile(faultsPage)
	if err != nil {
		t.Fatal(err)
	}
	rows := 0
	for line := range strings.Lines(string(page)) {
		if !strings.HasPrefix(line, "|") {
			continue
		}
		rows++
		if n := strings.Count(line, "|"); n != 6 {
			t.Errorf("%d columns: %s", n-1, line)
		}
	}
	if rows < 50 {
		t.Errorf("%d rows", rows)
	}
}

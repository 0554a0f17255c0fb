package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const root = "../.."

// The mutants themselves are tried by scripts/mutants, which takes minutes. This finds out what would keep it from
// trying: code that has moved on, and tests that have got another name.
func TestEveryMutantCanStillBeMade(t *testing.T) {
	var names []string
	for _, m := range mutants {
		if slices.Contains(names, m.name) {
			t.Errorf("%s: there are two", m.name)
		}
		names = append(names, m.name)
		text, err := os.ReadFile(filepath.Join(root, m.file))
		if err != nil {
			t.Errorf("%s: %v", m.name, err)
			continue
		}
		if mutated, err := m.apply(string(text)); err != nil || mutated == string(text) {
			t.Errorf("%s: %v", m.name, err)
		}
		if !hasTest(t, m) {
			t.Errorf("%s: there is no %s in %s", m.name, m.test, m.pkg)
		}
	}
}

func hasTest(t *testing.T, m mutant) bool {
	t.Helper()
	name, _, _ := strings.Cut(m.test, "/")
	declared := []byte("\nfunc " + name + "(t *testing.T)")
	files, err := filepath.Glob(filepath.Join(root, m.pkg, "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	return slices.ContainsFunc(files, func(file string) bool {
		text, err := os.ReadFile(file)
		return err == nil && bytes.Contains(text, declared)
	})
}

func TestOnlyAFailureOfTheNamedTestIsACatch(t *testing.T) {
	died := errors.New("exit status 2")
	for what, test := range map[string]struct {
		run    testRun
		hangs  bool
		caught bool
	}{
		"it fails":            {testRun{built: true, err: died, results: map[string]string{"TestX": "FAIL"}}, false, true},
		"it kills all":        {testRun{built: true, err: died, output: "panic: boom"}, false, true},
		"it hangs, as stated": {testRun{built: true, err: died, output: "panic: test timed out after 30s"}, true, true},
		"it hangs":            {testRun{built: true, err: died, output: "panic: test timed out after 30s"}, false, false},
		"it passes":           {testRun{built: true, results: map[string]string{"TestX": "PASS"}}, false, false},
		"another one fails":   {testRun{built: true, err: died, results: map[string]string{"TestX": "PASS", "TestY": "FAIL"}}, false, false},
		"it is skipped":       {testRun{built: true, results: map[string]string{"TestX": "SKIP"}}, false, false},
		"it is not there":     {testRun{built: true}, false, false},
		"it does not compile": {testRun{err: died}, true, false},
	} {
		if err := test.run.verdict(mutant{test: "TestX", hangs: test.hangs}); (err == nil) != test.caught {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestAMutantReplacesWhatIsThereOnce(t *testing.T) {
	m := mutant{old: "a", new: "b"}
	for text, want := range map[string]string{"xax": "xbx", "xx": "", "aa": ""} {
		if got, err := m.apply(text); got != want || (err == nil) != (want != "") {
			t.Errorf("%q has become %q, %v", text, got, err)
		}
	}
}

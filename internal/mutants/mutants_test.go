package main

import (
	"errors"
	"testing"
)

// verdict accepts only a failure of the named test, or the death of the whole process.
func TestVerdict(t *testing.T) {
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

// apply replaces text that occurs exactly once.
func TestApply(t *testing.T) {
	m := mutant{old: "a", new: "b"}
	for text, want := range map[string]string{"xax": "xbx", "xx": "", "aa": ""} {
		if got, err := m.apply(text); got != want || (err == nil) != (want != "") {
			t.Errorf("%q has become %q, %v", text, got, err)
		}
	}
}

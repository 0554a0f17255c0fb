package singlefill_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// What maintainers read must lead somewhere, as the README must.

func TestCONTRIBUTINGNamesEveryScript(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("CONTRIBUTING.md")
	if err != nil {
		t.Fatal(err)
	}
	scripts, err := filepath.Glob("scripts/*")
	if err != nil || len(scripts) == 0 {
		t.Fatalf("%d scripts found: %v", len(scripts), err)
	}
	for _, script := range append(scripts, ".ci/run") {
		if !strings.Contains(string(text), script) {
			t.Errorf("%s is not named", script)
		}
		if info, err := os.Stat(script); err != nil || info.Mode()&0o111 == 0 {
			t.Errorf("%s cannot be executed: %v", script, err)
		}
	}
	for _, script := range regexp.MustCompile(`scripts/\w+`).FindAllString(string(text), -1) {
		if _, err := os.Stat(script); err != nil {
			t.Error(err)
		}
	}
}

func TestPagesForMaintainersLeadSomewhere(t *testing.T) {
	t.Parallel()
	for _, page := range []string{"CONTRIBUTING.md", "SECURITY.md", "docs/design.md"} {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Error(err)
		}
		for _, m := range regexp.MustCompile(`\[([^\]]+)\]\(([^)#:\s]+)\)`).FindAllStringSubmatch(string(text), -1) {
			file := filepath.Join(filepath.Dir(page), m[2])
			if _, err := os.Stat(file); err != nil {
				t.Errorf("%s: %v", page, err)
			} else if strings.HasPrefix(m[1], "Test") && !faultsIn(t, file)[m[1]] {
				t.Errorf("%s: no %s in %s", page, m[1], file)
			}
		}
	}
}

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A line of a package or of its tests is reported for the system that cannot compile it, and for no other.
func TestCheck(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	for name, text := range map[string]string{
		"go.mod":        "module example.com/m\n\ngo 1.26\n",
		"m.go":          "package m\n\nvar n = separator()\n",
		"m_windows.go":  "package m\n\nfunc separator() byte { return '\\\\' }\n",
		"m_test.go":     "package m\n\nvar large = func() int { return 1 << 40 }\n",
		"other_test.go": "package m_test\n\nimport _ \"example.com/m\"\n\nvar s = wordSize\n",
		"s_386_test.go": "package m_test\n\nconst wordSize = 4\n",
	} {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	windows, linux := check("windows/amd64", []string{folder}), check("linux/386", []string{folder})
	if windows == nil || linux == nil {
		t.Fatalf("windows: %v; linux: %v; want errors", windows, linux)
	}
	for line, onWindows := range map[string]bool{"m.go:3:9": false, "m_test.go:3:33": false, "other_test.go:5:9": true} {
		if strings.Contains(windows.Error(), line) != onWindows || strings.Contains(linux.Error(), line) == onWindows {
			t.Errorf("%s: windows: %v; linux: %v", line, windows, linux)
		}
	}
}

package main

import (
	"io/fs"
	"os"
	"path"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/singlefill/singlefill/internal/redistest"
)

// No line of a page or with a comment is longer than 120 characters, a tab counted as four. Rows of tables, which
// cannot be broken, and pictures may be.
func TestLines_AreNotTooLong(t *testing.T) {
	t.Parallel()
	all := []string{".ci/run", ".github/golangci.yml"}
	for _, pattern := range []string{".github/workflows/*.yml", "scripts/*"} {
		names, err := fs.Glob(os.DirFS(root), pattern)
		redistest.Must(t, err)
		all = append(all, names...)
	}
	for _, ending := range []string{".md", ".go", ".lua"} {
		names, err := files(os.DirFS(root), ending)
		redistest.Must(t, err)
		all = append(all, names...)
	}
	for _, name := range all {
		for i, line := range strings.Split(read(t, name), "\n") {
			if utf8.RuneCountInString(strings.ReplaceAll(line, "\t", "    ")) > 120 && isProse(path.Ext(name), line) {
				t.Errorf("%s:%d: %s", name, i+1, line)
			}
		}
	}
}

// isProse reports whether a line of a file is of a page, or has a comment.
func isProse(ending, line string) bool {
	switch line = strings.TrimSpace(line); ending {
	case ".md":
		return !strings.HasPrefix(line, "|") && !strings.HasPrefix(line, "![") && !strings.HasPrefix(line, "[![")
	case ".go":
		return strings.HasPrefix(line, "//") && !strings.HasPrefix(line, "//go:") || strings.Contains(line, " // ")
	case ".lua":
		return strings.Contains(line, "-- ")
	}
	return strings.Contains(line, "# ")
}

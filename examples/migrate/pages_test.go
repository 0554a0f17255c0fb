package migrate

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

const pages = "../../docs/migrate"

var (
	link   = regexp.MustCompile(`\[([^]]+)\]\(([^)]+)\)`)
	quoted = regexp.MustCompile("(?s)```.*?```|`[^`]*`")
	// A block of Go follows a line that ends with a link to its file and a colon.
	block    = regexp.MustCompile("(?s)```go\n(.*?)```")
	linked   = regexp.MustCompile("(?s)\\[[^]]+\\]\\(([^)]+\\.go)\\):\n\n```go\n(.*?)```")
	testName = regexp.MustCompile(`^Test\w+$`)
)

// The code in the pages is code of the programs, and their links lead to what they name.
func TestPages(t *testing.T) {
	names, err := filepath.Glob(filepath.Join(pages, "*.md"))
	if err != nil || len(names) < 6 {
		t.Fatalf("there are %d pages, %v, want 6", len(names), err)
	}
	for _, name := range names {
		page := read(t, name)
		blocks := linked.FindAllStringSubmatch(page, -1)
		if n := len(block.FindAllString(page, -1)); n != len(blocks) {
			t.Errorf("%s has %d blocks of Go, of which %d follow a link to their file", name, n, len(blocks))
		}
		for _, b := range blocks {
			if !strings.Contains(read(t, filepath.Join(pages, b[1])), b[2]) {
				t.Errorf("%s: %s does not have the code\n%s", name, b[1], b[2])
			}
		}
		for _, l := range link.FindAllStringSubmatch(quoted.ReplaceAllString(page, "code"), -1) {
			text, target := l[1], l[2]
			file, _, _ := strings.Cut(target, "#")
			if file == "" || strings.Contains(target, "://") {
				continue
			}
			if _, err := os.Stat(filepath.Join(pages, file)); err != nil {
				t.Errorf("%s: [%s](%s) leads nowhere", name, text, target)
			} else if testName.MatchString(text) && !strings.Contains(read(t, filepath.Join(pages, file)), "func "+text+"(") {
				t.Errorf("%s: %s does not declare %s", name, target, text)
			}
		}
	}
}

func read(t *testing.T, name string) string {
	t.Helper()
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

package main

import (
	"context"
	"errors"
	"hash/fnv"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

// namesFile has the names that stay within v1, one a line: what kind, and the name. The tests of the module
// prometheus compare its lines of metrics.
const namesFile = "docs/names.txt"

// The names that dashboards, alerts and programs use are those of docs/names.txt. One that is missing there
// is new: add it. One that only that file has is gone: within v1 it must come back.
func TestNames_Stay(t *testing.T) {
	t.Parallel()
	got := make(map[string]bool)
	// add adds what a pattern finds in the files of a directory, but for tests.
	add := func(kind, pattern, files string) {
		names, err := filepath.Glob(filepath.Join(root, files))
		redistest.Must(t, err)
		found := false
		for _, name := range names {
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			text, err := os.ReadFile(name)
			redistest.Must(t, err)
			for _, m := range regexp.MustCompile(pattern).FindAllStringSubmatch(string(text), -1) {
				got[kind+" "+m[1]], found = true, true
			}
		}
		if !found {
			t.Errorf("nothing in %s is a name of the kind %s", files, kind)
		}
	}
	add("alert", `(?m)^ *- alert: (\w+)$`, "grafana/alerts.yml")
	add("otel", `"(singlefill\.[a-z_.]+)"`, "otel/*.go")
	add("log", `(?:message = |slog\.Level\w+, )"([^"]+)"`, "log.go")
	add("log attribute", `(?:slog\.(?:Any|Bool|Duration|Int|String)|logger\.With)\("(\w+)"`, "log.go")
	for _, file := range []string{"get", "locks", "ls", "tags", "top"} {
		add("json of "+file, `json:"(\w+)`, "cmd/singlefill/"+file+".go")
	}
	for _, op := range listed(t, "trace.go", "op is its purpose: ") {
		got["op "+op] = true
	}
	for _, op := range listed(t, "lock/trace.go", "op names what it was for: ") {
		got["op of lock "+op] = true
	}
	want := make(map[string]bool)
	for line := range strings.Lines(read(t, namesFile)) {
		line = strings.TrimSpace(line)
		if line != "" && !strings.HasPrefix(line, "#") && !strings.HasPrefix(line, "metric ") {
			want[line] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(got)) {
		if !want[name] {
			t.Errorf("%s does not have %q", namesFile, name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(want)) {
		if !got[name] {
			t.Errorf("%s has %q, which is gone", namesFile, name)
		}
	}
}

// listed returns the words of a list that a comment has behind some text, to the end of the sentence.
func listed(t *testing.T, file, intro string) []string {
	t.Helper()
	comment := regexp.MustCompile(`\s*//\s*`).ReplaceAllString(read(t, file), " ")
	_, list, found := strings.Cut(comment, intro)
	if !found {
		t.Fatalf("%s does not have %q", file, intro)
	}
	list, _, _ = strings.Cut(list, ".")
	list = regexp.MustCompile(`\([^)]*\)| or `).ReplaceAllString(list, ",")
	return regexp.MustCompile(`\w+`).FindAllString(list, -1)
}

// A cache with all options reads and writes no key that docs/compatibility.md does not name, and each has a
// TTL.
func TestKeys_Named(t *testing.T) {
	t.Parallel()
	page := read(t, "docs/compatibility.md")
	var documented []*regexp.Regexp
	for _, m := range regexp.MustCompile("(?m)^\\| `(users:[^`]*)`").FindAllStringSubmatch(page, -1) {
		pattern := regexp.QuoteMeta(m[1])
		pattern = strings.ReplaceAll(pattern, `\{users:0\}`, `\{users:[0-7]\}`)
		if strings.HasSuffix(pattern, ":loads") { // "and with a suffix"
			pattern += "(:[a-z]+)?"
		}
		documented = append(documented, regexp.MustCompile("^"+pattern+"$"))
	}
	seen := make([]bool, len(documented))
	mini, rdb := redistest.StartMini(t)
	look := func() {
		for _, key := range mini.Keys() {
			i := slices.IndexFunc(documented, func(p *regexp.Regexp) bool { return p.MatchString(key) })
			if i < 0 {
				t.Errorf("the page does not name the key %q", key)
				continue
			}
			seen[i] = true
			if mini.TTL(key) <= 0 {
				t.Errorf("%q has no TTL", key)
			}
		}
	}
	users, err := singlefill.New(rdb, "users", time.Hour, &singlefill.Options[string]{
		MaxFleetLoads: 1, Near: &singlefill.Near{}, Tags: func(string, string) []string {
			look() // also while DeleteTag reads the values
			return []string{"eu"}
		},
	})
	redistest.Must(t, err)
	defer users.Close()
	_, err = users.GetOrLoad(t.Context(), "42", func(context.Context, string) (string, error) {
		look()
		return "v", nil
	})
	redistest.Must(t, err)
	look()
	redistest.Must(t, users.Delete(t.Context(), "43"))
	look()
	redistest.Must(t, users.DeleteTag(t.Context(), "us"))
	for i, p := range documented {
		if !seen[i] && !strings.Contains(p.String(), "told") && !strings.Contains(p.String(), "check") {
			t.Errorf("no key matches %s", p)
		}
	}
}

// A program that deletes value and lock in one command keeps a load in flight from being stored.
func TestDelete_ByAnotherProgram(t *testing.T) {
	t.Parallel()
	_, rdb := redistest.StartMini(t)
	users, err := singlefill.New[string](rdb, "users", time.Hour, nil)
	redistest.Must(t, err)
	defer users.Close()
	_, err = users.GetOrLoad(t.Context(), "42", func(ctx context.Context, _ string) (string, error) {
		return "old", rdb.Del(ctx, "users:{42}", "users:{42}:lock").Err()
	})
	redistest.Must(t, err)
	if _, err := users.Get(t.Context(), "42"); !errors.Is(err, singlefill.ErrMiss) {
		t.Errorf("Get after the load: %v, want ErrMiss", err)
	}
}

// Records of the log of Near are as docs/compatibility.md says.
func TestLog_Records(t *testing.T) {
	t.Parallel()
	_, rdb := redistest.StartMini(t)
	users, err := singlefill.New(rdb, "users", time.Hour, &singlefill.Options[string]{Near: &singlefill.Near{}})
	redistest.Must(t, err)
	defer users.Close()
	h := fnv.New64a()
	_, _ = h.Write([]byte("users:{42}")) // it never fails
	for _, test := range []struct {
		do   func() error
		want string
	}{
		{func() error { return users.Delete(t.Context(), "42") }, string(h.Sum(nil))},
		{func() error { return users.Clear(t.Context()) }, "*"},
	} {
		redistest.Must(t, test.do())
		records, err := rdb.XRevRangeN(t.Context(), "users:log", "+", "-", 1).Result()
		redistest.Must(t, err)
		if len(records) != 1 || len(records[0].Values) != 1 {
			t.Fatalf("records: %v, want one with one field", records)
		}
		for _, value := range records[0].Values {
			if value != test.want {
				t.Errorf("the record is %q, want %q", value, test.want)
			}
		}
	}
}

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/singlefill/singlefill/internal/redistest"
)

func TestMain(m *testing.M) { redistest.Main(m) }

// tree returns a repository whose pages have nothing to correct, with some files replaced.
func tree(files map[string]string) fstest.MapFS {
	all := map[string]string{
		"README.md": "", "SECURITY.md": "", "scripts/docs": "",
		"CONTRIBUTING.md": "`scripts/docs` writes them.\n",
		"docs/design.md":  "See [TestOne](../one_test.go) and [the tests](../one_test.go).\n",
		faultsPage:        table("[TestOne](../one_test.go)"),
		"one_test.go":     declare("TestOne", "killed"),
	}
	maps.Copy(all, files)
	fsys := make(fstest.MapFS)
	for name, text := range all {
		fsys[name] = &fstest.MapFile{Data: []byte(text)}
	}
	return fsys
}

// table returns a table of faults with one row, whose id is killed.
func table(tests string) string {
	return "| Fault | Effect | Test | Since | Bound |\n| --- | --- | --- | --- | --- |\n" +
		fmt.Sprintf("| <a id=\"killed\"></a>A holder is killed | none | %s | always | LockTTL |\n", tests)
}

// declare returns a file that declares a test with these ids.
func declare(name string, ids ...string) string {
	var b strings.Builder
	fmt.Fprintln(&b, "package p")
	for _, id := range ids {
		fmt.Fprintf(&b, "//fault:%s\n", id)
	}
	fmt.Fprintf(&b, "func %s(t *testing.T) {\n}\n", name)
	return b.String()
}

// written runs the program and returns what it writes, by page.
func written(fsys fs.FS, check bool) (pages map[string]string, err error) {
	pages = make(map[string]string)
	err = run(fsys, check, func(name string, data []byte, _ fs.FileMode) error {
		pages[name] = string(data)
		return nil
	})
	return pages, err
}

// The column of tests is filled from the lines beside the tests, in the order of the files.
func TestRun_FillsColumn(t *testing.T) {
	pages, err := written(tree(map[string]string{
		faultsPage:    table("?"),
		"two_test.go": declare("TestTwo", "killed") + declare("TestOther"),
	}), false)
	want := table("[TestOne](../one_test.go)<br>[TestTwo](../two_test.go)")
	if err != nil || len(pages) != 1 || pages[faultsPage] != want {
		t.Errorf("wrote %q, %v, want %q", pages, err, want)
	}
}

// A link to a test leads to the file that declares it, or to one of them; other links stay.
func TestRun_CorrectsLink(t *testing.T) {
	pages, err := written(tree(map[string]string{
		"docs/design.md":    "See [TestMoved](../one_test.go), [TestOne](../one_test.go) and [this](design.md).\n",
		"lock/some_test.go": declare("TestMoved") + declare("TestOne"),
	}), false)
	want := "See [TestMoved](../lock/some_test.go), [TestOne](../one_test.go) and [this](design.md).\n"
	if err != nil || len(pages) != 1 || pages["docs/design.md"] != want {
		t.Errorf("wrote %q, %v, want %q", pages, err, want)
	}
}

// With -check nothing is written, and a page that would change is an error that names the command.
func TestRun_Check(t *testing.T) {
	if pages, err := written(tree(nil), true); err != nil || len(pages) > 0 {
		t.Errorf("wrote %q, %v, want nothing to correct", pages, err)
	}
	pages, err := written(tree(map[string]string{faultsPage: table("?")}), true)
	if err == nil || !strings.Contains(err.Error(), faultsPage) || !strings.Contains(err.Error(), "run scripts/docs") || len(pages) > 0 {
		t.Errorf("wrote %q, %v, want only an error that names the page and scripts/docs", pages, err)
	}
}

// What the program cannot correct is an error that names it.
func TestRun_Reports(t *testing.T) {
	for name, c := range map[string]struct {
		files map[string]string
		want  string
	}{
		"row without test":   {map[string]string{"one_test.go": declare("TestOne")}, "//fault:killed"},
		"id without row":     {map[string]string{"two_test.go": declare("TestTwo", "lost")}, "no row with the id lost"},
		"id of two rows":     {map[string]string{faultsPage: table("") + table("")}, "two rows have the id killed"},
		"row too short":      {map[string]string{faultsPage: "| <a id=\"killed\"></a>Killed | none |\n"}, "2 columns"},
		"fault test, no row": {map[string]string{faultTests + "two_test.go": declare("TestTwo")}, "TestTwo names no row"},
		"lost test":          {map[string]string{"README.md": "[TestGone](one_test.go)"}, "0 files declare TestGone"},
		"ambiguous test": {map[string]string{
			"README.md":   "[TestOne](three_test.go)",
			"two_test.go": declare("TestOne"),
		}, "2 files declare TestOne"},
		"broken link":    {map[string]string{"SECURITY.md": "[this](nowhere.md)"}, "[this](nowhere.md) leads nowhere"},
		"unnamed script": {map[string]string{"scripts/new": ""}, "does not name scripts/new"},
		"lost script":    {map[string]string{"CONTRIBUTING.md": "scripts/docs, scripts/gone"}, "scripts/gone, which does not exist"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := written(tree(c.files), false); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
	fsys := tree(nil)
	delete(fsys, "CONTRIBUTING.md")
	if _, err := written(fsys, false); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without a page: %v", err)
	}
}

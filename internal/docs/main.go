// Command docs keeps the pages of this repository consistent with its tests; see scripts/docs -h.
//
// A test that covers a row of docs/faults.md names the row's id in a line of its comment:
//
//	//fault:killed-holder
//	func TestGetOrLoad_KilledHolder(t *testing.T) {
//
// The column "Test" of that page is generated from these lines. In every page, a link whose text is
// the name of a test leads to the file that declares the test.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

const usage = `Usage: scripts/docs [-check]

Writes the column "Test" of docs/faults.md from the lines //fault:ID beside the tests, and corrects links to tests.
Then it reports what it cannot correct: a broken link, a test that does not exist, a row without a test, a test of
internal/tests/faults without a row.

  -check  write nothing; a page that would change is an error
`

const (
	faultsPage = "docs/faults.md"
	faultTests = "internal/tests/faults/" // every test in this tree belongs to a row
)

func main() {
	check := flag.Bool("check", false, "")
	flag.Usage = func() { fmt.Fprint(os.Stderr, usage) }
	flag.Parse()
	if flag.NArg() > 0 {
		flag.Usage()
		os.Exit(2)
	}
	if err := run(os.DirFS("."), *check); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(tree fs.FS, check bool) error {
	tests, err := findTests(tree)
	if err != nil {
		return err
	}
	pages, err := files(tree, ".md")
	if err != nil {
		return err
	}
	var errs []error
	for _, page := range pages {
		text, err := fs.ReadFile(tree, page)
		if err != nil {
			return err
		}
		mended := string(text)
		if page == faultsPage {
			var faults []error
			mended, faults = fillTable(mended, tests)
			errs = append(errs, faults...)
		}
		mended, links := mendLinks(tree, page, mended, tests)
		errs = append(errs, links...)
		switch {
		case mended == string(text):
		case check:
			errs = append(errs, fmt.Errorf("%s does not agree with the tests: run scripts/docs", page))
		default:
			errs = append(errs, os.WriteFile(page, []byte(mended), 0o644))
		}
	}
	return errors.Join(errs...)
}

// A test is a test function.
type test struct {
	name, file string
	faults     []string // the ids of its rows
}

var (
	directive   = regexp.MustCompile(`^//fault:(\S+)$`)
	declaration = regexp.MustCompile(`^func ((?:Test|Fuzz)\w+)\(\w+ \*testing\.[TF]\) \{`)
)

// files returns the files whose names have an ending, but for those in directories whose names begin with a
// dot.
func files(tree fs.FS, ending string) (names []string, err error) {
	err = fs.WalkDir(tree, ".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && strings.HasPrefix(d.Name(), ".") && path != ".":
			return fs.SkipDir
		case !d.IsDir() && strings.HasSuffix(path, ending):
			names = append(names, path)
		}
		return nil
	})
	return names, err
}

// findTests returns the tests of all modules, in the order of files and of lines.
func findTests(tree fs.FS) (tests []test, err error) {
	names, err := files(tree, "_test.go")
	if err != nil {
		return nil, err
	}
	for _, path := range names {
		text, err := fs.ReadFile(tree, path)
		if err != nil {
			return nil, err
		}
		var faults []string
		for line := range strings.Lines(string(text)) {
			line = strings.TrimRight(line, "\n")
			if m := directive.FindStringSubmatch(line); m != nil {
				faults = append(faults, m[1])
			} else if m := declaration.FindStringSubmatch(line); m != nil {
				tests = append(tests, test{name: m[1], file: path, faults: faults})
				faults = nil
			}
		}
	}
	return tests, nil
}

var rowID = regexp.MustCompile(`^\| <a id="([^"]+)"></a>`)

// fillTable writes the tests of each row into its third column, "Test".
func fillTable(page string, tests []test) (mended string, errs []error) {
	shownBy := make(map[string][]string)
	for _, t := range tests {
		for _, id := range t.faults {
			shownBy[id] = append(shownBy[id], fmt.Sprintf("[%s](../%s)", t.name, t.file))
		}
		if strings.HasPrefix(t.file, faultTests) && len(t.faults) == 0 {
			errs = append(errs, fmt.Errorf("%s: %s names no row of %s: add a line //fault:ID to its comment", t.file, t.name, faultsPage))
		}
	}
	var out strings.Builder
	rows := make(map[string]bool)
	for line := range strings.Lines(page) {
		if m := rowID.FindStringSubmatch(line); m != nil {
			id := m[1]
			cells := strings.Split(strings.TrimRight(line, "\n"), "|")
			switch {
			case rows[id]:
				errs = append(errs, fmt.Errorf("%s: two rows have the id %s", faultsPage, id))
			case len(cells) != 7:
				errs = append(errs, fmt.Errorf("%s: row %s has %d columns instead of 5", faultsPage, id, len(cells)-2))
			case len(shownBy[id]) == 0:
				errs = append(errs, fmt.Errorf("%s: no test has a line //fault:%s", faultsPage, id))
			default:
				cells[3] = " " + strings.Join(shownBy[id], "<br>") + " "
				line = strings.Join(cells, "|") + "\n"
			}
			rows[id] = true
		}
		out.WriteString(line)
	}
	for id, names := range shownBy {
		if !rows[id] {
			errs = append(errs, fmt.Errorf("%s has no row with the id %s, which %s names", faultsPage, id, names[0]))
		}
	}
	return out.String(), errs
}

// A link names a file, and so has a dot or a slash: Name[Type](argument) in a piece of code is none.
var link = regexp.MustCompile(`\[([^\]]+)\]\(([^)#:\s]*[./][^)#:\s]*)\)`)

// mendLinks makes each link to a test lead to the file that declares it.
func mendLinks(tree fs.FS, page, text string, tests []test) (mended string, errs []error) {
	dir := filepath.Dir(page)
	mended = link.ReplaceAllStringFunc(text, func(whole string) string {
		m := link.FindStringSubmatch(whole)
		name, file := m[1], filepath.ToSlash(filepath.Join(dir, m[2]))
		if !strings.HasPrefix(name, "Test") && !strings.HasPrefix(name, "Fuzz") {
			if _, err := fs.Stat(tree, file); err != nil {
				errs = append(errs, fmt.Errorf("%s: the link %s leads nowhere", page, whole))
			}
			return whole
		}
		var files []string
		for _, t := range tests {
			if t.name == name {
				files = append(files, t.file)
			}
		}
		switch {
		case slices.Contains(files, file):
			return whole
		case len(files) != 1:
			errs = append(errs, fmt.Errorf("%s: %d files declare %s: name one that exists, or its file", page, len(files), name))
			return whole
		}
		to, err := filepath.Rel(dir, files[0])
		errs = append(errs, err)
		return fmt.Sprintf("[%s](%s)", name, filepath.ToSlash(to))
	})
	return mended, errs
}

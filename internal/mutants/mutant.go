package main

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// A mutant is one bug.
type mutant struct {
	name  string
	file  string
	pkg   string // directory of the test
	test  string // the test, or subtest, that must fail
	hangs bool   // the test may fail by not ending
	bug   string // what is wrong, in a sentence
	old   string // must occur once in file
	new   string
}

//go:embed *.txt
var texts embed.FS

// parse reads the mutants of all files. They are separated by empty lines. The first line of each has the
// fields of mutant from name to test, and then "hangs" or nothing; the second one is the bug. Then come, as in
// a diff, lines of old and of new, which may begin or end within a line of the file. A comment begins with #.
func parse(texts fs.FS) (all []mutant, err error) {
	files, err := fs.Glob(texts, "*.txt")
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		text, err := fs.ReadFile(texts, file)
		if err != nil {
			return nil, err
		}
		for block := range strings.SplitSeq(strings.TrimSpace(string(text)), "\n\n") {
			if strings.HasPrefix(block, "#") {
				continue
			}
			head, rest, _ := strings.Cut(block, "\n")
			fields := strings.Fields(head)
			var m mutant
			switch {
			case len(fields) == 5 && fields[4] == "hangs":
				m.hangs = true
			case len(fields) != 4:
				return nil, fmt.Errorf("%s: %q is not: name file directory test, or these and hangs", file, head)
			}
			m.name, m.file, m.pkg, m.test = fields[0], fields[1], fields[2], fields[3]
			m.bug, rest, _ = strings.Cut(rest, "\n")
			var old, new []string
			for line := range strings.SplitSeq(rest, "\n") {
				if text, ok := strings.CutPrefix(line, "-"); ok {
					old = append(old, text)
				} else if text, ok := strings.CutPrefix(line, "+"); ok {
					new = append(new, text)
				} else {
					return nil, fmt.Errorf("%s: %s: %q begins with neither - nor +", file, m.name, line)
				}
			}
			m.old, m.new = strings.Join(old, "\n"), strings.Join(new, "\n")
			all = append(all, m)
		}
	}
	return all, nil
}

// Limits of one test, and of all tests of a package.
const (
	testLimit    = 30 * time.Second
	packageLimit = 5 * time.Minute
)

// copyTree copies a tree, without its history, to a new directory.
func copyTree(root string) (tree string, err error) {
	if tree, err = os.MkdirTemp("", "mutants"); err != nil {
		return "", err
	}
	return tree, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.Name() == ".git" && d.IsDir():
			return fs.SkipDir
		case d.IsDir():
			return os.MkdirAll(filepath.Join(tree, path), 0o755)
		case !d.Type().IsRegular():
			return nil
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(tree, path), data, 0o644)
	})
}

// checkTests runs the tests of all mutants without a mutant. A skipped test has not passed.
func checkTests(ctx context.Context, tree string, mutants []mutant) error {
	tests := make(map[string][]string)
	for _, m := range mutants {
		if !slices.Contains(tests[m.pkg], m.test) {
			tests[m.pkg] = append(tests[m.pkg], m.test)
		}
	}
	for pkg, names := range tests {
		r := runTests(ctx, tree, pkg, packageLimit, names...)
		for _, name := range names {
			if r.results[name] != "PASS" {
				return fmt.Errorf("%s of %s has to pass without a mutant:\n%s", name, pkg, r.output)
			}
		}
	}
	return nil
}

// try returns how long the mutant's test took to fail, or an error if it did not.
func try(ctx context.Context, tree string, m mutant) (took time.Duration, err error) {
	path := filepath.Join(tree, m.file)
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	mutated, err := m.apply(string(text))
	if err != nil {
		return 0, err
	}
	if err := os.WriteFile(path, []byte(mutated), 0o644); err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, os.WriteFile(path, text, 0o644)) }()
	r := runTests(ctx, tree, m.pkg, testLimit, m.test)
	return r.took, r.verdict(m)
}

// anchored returns an error if the mutant cannot be applied to the tree, or has no test.
func (m mutant) anchored(tree string) error {
	text, err := os.ReadFile(filepath.Join(tree, m.file))
	if err != nil {
		return err
	}
	if _, err := m.apply(string(text)); err != nil {
		return err
	}
	name, _, _ := strings.Cut(m.test, "/")
	files, err := filepath.Glob(filepath.Join(tree, m.pkg, "*_test.go"))
	if err != nil {
		return err
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if strings.Contains(string(text), "\nfunc "+name+"(t *testing.T)") {
			return nil
		}
	}
	return fmt.Errorf("there is no %s in %s", name, m.pkg)
}

// apply returns a file's text with the bug in it.
func (m mutant) apply(text string) (string, error) {
	if n := strings.Count(text, m.old); n != 1 {
		return "", fmt.Errorf("the text to be replaced is %d times in %s", n, m.file)
	}
	return strings.Replace(text, m.old, m.new, 1), nil
}

// A testRun is the result of running some tests of a package.
type testRun struct {
	built   bool
	err     error             // of the tests or of the compiler
	output  string            // of the tests or of the compiler
	results map[string]string // PASS, FAIL or SKIP of each test and subtest that has ended
	took    time.Duration
}

var ended = regexp.MustCompile(`--- (PASS|FAIL|SKIP): (\S+) \(`)

func runTests(ctx context.Context, tree, pkg string, limit time.Duration, tests ...string) (r testRun) {
	dir := filepath.Join(tree, pkg)
	binary := filepath.Join(tree, "mutant.test")
	// Without paths in it, the compiled code is the same in each copy of the tree, and is compiled
	// once.
	build := exec.CommandContext(ctx, "go", "test", "-c", "-trimpath", "-ldflags=-w", "-o", binary, ".")
	build.Dir = dir
	output, err := build.CombinedOutput()
	if err != nil {
		return testRun{err: err, output: string(output)}
	}
	patterns := make([]string, len(tests))
	for i, test := range tests {
		patterns[i] = "^" + strings.ReplaceAll(regexp.QuoteMeta(test), "/", "$/^") + "$"
	}
	begun := time.Now()
	cmd := exec.CommandContext(ctx, binary, "-test.v", "-test.timeout="+limit.String(), "-test.run="+strings.Join(patterns, "|"))
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "REDIS_REQUIRED=1")
	cmd.WaitDelay = time.Second // a server that outlives the test may keep its output open
	output, err = cmd.CombinedOutput()
	r = testRun{built: true, err: err, output: string(output), results: make(map[string]string), took: time.Since(begun)}
	for _, m := range ended.FindAllStringSubmatch(r.output, -1) {
		r.results[m[2]] = m[1]
	}
	return r
}

// verdict returns nil if the mutant's test failed as it should.
func (r testRun) verdict(m mutant) error {
	result := r.results[m.test]
	switch {
	case !r.built:
		return fmt.Errorf("does not compile: %s", strings.Join(strings.Fields(r.output), " "))
	case result == "FAIL":
		return nil
	case result != "":
		return errors.New("survived " + m.test)
	case r.err == nil:
		return errors.New("there is no " + m.test)
	case strings.Contains(r.output, "panic: test timed out") && !m.hangs:
		return errors.New("hangs " + m.test)
	}
	return nil // the mutant killed the whole process
}

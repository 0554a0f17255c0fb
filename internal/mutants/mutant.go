package main

import (
	"context"
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
	bug   string // what is wrong then, in a sentence
	file  string
	old   string // occurs once in file
	new   string
	pkg   string // of the test
	test  string // the one that must fail; or a subtest of it
	hangs bool   // the test may fail by not ending
}

// Limits of one test, and of all those of a package.
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

// checkTests runs the tests of all mutants on the tree as it is. A test that is skipped has not passed.
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

// try returns how long it took the mutant's test to fail, or what is wrong.
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

// anchored reports what keeps the mutant from being made in the tree.
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

// A testRun is what some tests of a package have said.
type testRun struct {
	built   bool
	err     error             // of the tests, or of the compiler
	output  string            // of the same
	results map[string]string // PASS, FAIL or SKIP of each test and subtest that has ended
	took    time.Duration
}

var ended = regexp.MustCompile(`--- (PASS|FAIL|SKIP): (\S+) \(`)

func runTests(ctx context.Context, tree, pkg string, limit time.Duration, tests ...string) (r testRun) {
	dir := filepath.Join(tree, pkg)
	binary := filepath.Join(tree, "mutant.test")
	// Without paths in it, what is compiled is the same in each copy of the tree, and need not be compiled again.
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
	cmd.WaitDelay = time.Second // a server that has outlived the test may hold its output
	output, err = cmd.CombinedOutput()
	r = testRun{built: true, err: err, output: string(output), results: make(map[string]string), took: time.Since(begun)}
	for _, m := range ended.FindAllStringSubmatch(r.output, -1) {
		r.results[m[2]] = m[1]
	}
	return r
}

// verdict returns nil if the mutant's test has failed as it should.
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
	return nil // the whole process has died of it
}

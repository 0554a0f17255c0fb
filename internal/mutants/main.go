// Command mutants breaks the library on purpose, in one place at a time, and checks that a test
// fails. Each mutant is a bug that locks and caches on Redis are known for. See scripts/mutants -h.
//
// It works in a copy of the tree. First the named tests have to pass there. Then, for each mutant,
// the text that it replaces has to occur once in its file, the result has to compile, and its test
// has to fail.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"strings"
	"time"
)

const usage = `Usage: scripts/mutants [PATTERN]

Breaks the library in a copy of this tree, in one place at a time, and runs the test that has to fail. Prints
each bug, and the test that has caught it. With PATTERN, a regular expression, it tries only the mutants whose
names match. Exits with 1 if a mutant survives, if the tests fail without mutants, or if an anchor is lost: the
text that a mutant replaces is not in its file, or its test does not exist. Lost anchors are reported first; the
other mutants are tried nevertheless.

  -anchors  only report lost anchors

All mutants take half an hour or more. The tests start the Redis servers that they need. The mutants are in
internal/mutants/*.txt.
`

func main() {
	anchors := flag.Bool("anchors", false, "")
	flag.Usage = func() { fmt.Fprint(os.Stderr, usage) }
	flag.Parse()
	pattern, err := regexp.Compile(flag.Arg(0))
	if err != nil || flag.NArg() > 1 {
		flag.Usage()
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err = run(ctx, pattern, *anchors)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, pattern *regexp.Regexp, anchorsOnly bool) error {
	mutants, err := parse(texts)
	if err != nil {
		return err
	}
	var chosen []mutant
	lost := 0
	for _, m := range mutants {
		if !pattern.MatchString(m.name) {
			continue
		}
		if err := m.anchored("."); err != nil {
			lost++
			fmt.Printf("anchor lost: %s: %v\n", m.name, err)
			continue
		}
		chosen = append(chosen, m)
	}
	if anchorsOnly {
		return lostAnchors(lost)
	}
	tree, err := copyTree(".")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tree)

	begun := time.Now()
	if err := checkTests(ctx, tree, chosen); err != nil {
		return err
	}
	fmt.Printf("The tests of %d mutants pass without them, in %v.\n\n", len(chosen), time.Since(begun).Round(time.Second))

	row := func(cells ...string) { fmt.Println("| " + strings.Join(cells, " | ") + " |") }
	row("mutant", "bug", "caught by", "in")
	row("---", "---", "---", "---")
	missed := 0
	for _, m := range chosen {
		took, err := try(ctx, tree, m)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			missed++
			row(m.name, m.bug, "**"+err.Error()+"**", "")
		default:
			row(m.name, m.bug, m.test, fmt.Sprintf("%.1f s", took.Seconds()))
		}
	}
	fmt.Printf("\n%d mutants, %d not caught, in %v.\n", len(chosen), missed, time.Since(begun).Round(time.Second))
	if missed > 0 {
		return fmt.Errorf("%d of %d were not caught", missed, len(chosen))
	}
	return lostAnchors(lost)
}

func lostAnchors(n int) error {
	if n == 0 {
		return nil
	}
	return fmt.Errorf("%d mutants have lost their anchors: mend them in internal/mutants", n)
}

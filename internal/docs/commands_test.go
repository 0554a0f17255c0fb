package main

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
)

// Two commands of README.md do all the set-up.
func TestREADME_Commands(t *testing.T) {
	t.Parallel()
	var commands []string
	for _, block := range blocks(readme(t), "sh") {
		commands = append(commands, strings.Split(strings.TrimSpace(block), "\n")...)
	}
	if want := []string{"go get github.com/singlefill/singlefill", "go run ./examples/quickstart", "scripts/test"}; !slices.Equal(commands, want) {
		t.Errorf("the commands are %q, not %q", commands, want)
	}
}

// ran are the commands that TestPages_Commands runs, with a part of what they print.
var ran = map[string]string{
	"go run ./examples/quickstart": "",
	"scripts/docs -check":          "",
	"scripts/modules -published":   "compress",
	"scripts/mutants -anchors":     "",
}

// shorter are commands that take long or change the tree, by how they begin, each with one that does the same in a
// shorter time. TestPages_Commands runs these with -all, in a clone of the tree.
var shorter = map[string]string{
	"go -C bench test":                     "go -C bench test -run - -bench JoinsWhileAway -benchtime 1x .",
	"go -C compress test":                  "go -C compress test -run - -bench Zstd -benchtime 1x",
	"go run ./examples/stampede":           "go run ./examples/stampede -processes 2 -goroutines 2 -load 10ms",
	"go run github.com/singlefill/":        "go run ./cmd/singlefill ls users",
	"go mod tidy":                          "go mod tidy -diff",
	"go vet":                               "go vet ./internal/wait",
	"singlefill ls -json":                  "go run ./cmd/singlefill ls -json users",
	"singlefill clear users2":              "go run ./cmd/singlefill clear -yes users2",
	"singlefill del":                       "go run ./cmd/singlefill del users 43",
	"singlefill version":                   "go run ./cmd/singlefill version",
	"scripts/apidiff":                      "scripts/apidiff",
	"scripts/bench":                        "scripts/bench -c 1 -t 1x near",
	"scripts/docs":                         "scripts/docs",
	"scripts/fuzz":                         "scripts/fuzz 1x",
	"scripts/lint":                         "scripts/lint",
	"scripts/mutants":                      "scripts/mutants fill-release-any",
	"scripts/servers":                      "scripts/servers valkey-8",
	"scripts/soak":                         "scripts/soak -n 1 -f 1",
	"scripts/release":                      "scripts/release -try",
	"PROMETHEUS=$(scripts/servers":         "scripts/servers prometheus",
	"REDIS_SERVER=$(scripts/servers":       "env REDIS_SERVER=redis-server scripts/servers valkey-8",
	"go test ":                             "go test -short ./internal/wait",
	"go -C prometheus test -run TestBoard": "go -C prometheus test -run TestBoard -draw board.svg",
}

// elsewhere are the beginnings of the other commands, of which only checkCommand is asked.
var elsewhere = map[string]string{
	"go -C histories test":      "scripts/test runs the tests",
	"go -C prometheus test":     "scripts/test runs the tests",
	"go -C examples/server run": "serves until it is killed; its tests start it",
	"go get":                    "downloads a release; scripts/release -try does it with this tree",
	"scripts/test":              "runs this test",
	".ci/run":                   "runs this test",
	"git reset":                 "takes back the commit of a release",
	"git tag":                   "takes back the tags of a release",
}

var runAll = flag.Bool("all", false, "run a command also for each one of the pages that takes long; it takes minutes")

// Each command in a page is run, or has a reason why not, and names what exists. The workflow nightly.yml also
// runs those that take long.
func TestPages_Commands(t *testing.T) {
	t.Parallel()
	found, reasons := make(map[string]bool), make(map[string]bool)
	for page, text := range pages(t) {
		for _, command := range commandsIn(text) {
			if found[command] {
				continue
			}
			found[command] = true
			if err := checkCommand(command); err != nil {
				t.Errorf("%s: %s: %v", page, command, err)
			}
		}
	}
	for command := range found {
		if _, ok := ran[command]; ok {
			continue
		}
		reason := ""
		for _, starts := range []map[string]string{shorter, elsewhere} {
			for start := range starts {
				if strings.HasPrefix(command+" ", start) && len(start) > len(reason) {
					reason = start
				}
			}
		}
		if reason == "" {
			t.Errorf("%s is not run, and has no reason why not", command)
		}
		reasons[reason] = true
	}
	for _, starts := range []map[string]string{shorter, elsewhere} {
		for start := range starts {
			if !reasons[start] {
				t.Errorf("no page has a command that begins with %s", start)
			}
		}
	}
	for command, want := range ran {
		if !found[command] {
			t.Errorf("no page has %s", command)
		}
		words := strings.Fields(command)
		cmd := exec.Command(words[0], words[1:]...)
		cmd.Dir = root
		if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), want) {
			t.Errorf("%s: %v\n%s", command, err, out)
		}
	}
	if *runAll {
		runShorter(t)
	}
}

// runShorter runs a command for each one of the pages that takes long.
func runShorter(t *testing.T) {
	t.Helper()
	clone := filepath.Join(t.TempDir(), "tree")
	if out, err := exec.Command("git", "clone", "-q", root, clone).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	s := redistest.Start(t)
	for _, key := range []string{"users:{42}", "users:{43}"} {
		redistest.Must(t, s.Admin().Set(t.Context(), key, "an entry of another program", time.Hour).Err())
	}
	for _, command := range slices.Sorted(maps.Values(shorter)) {
		t.Run(command, func(t *testing.T) {
			words := strings.Fields(command)
			cmd := exec.Command(words[0], words[1:]...)
			cmd.Dir, cmd.Env = clone, append(os.Environ(), "REDIS_URL=redis://"+s.Addr)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

// A wrong command is found, or TestPages_Commands would show nothing.
func TestPages_WrongCommand(t *testing.T) {
	t.Parallel()
	for _, command := range []string{
		"scripts/gone", "scripts/bench hits", "scripts/docs -verify", "singlefill gone", "REDIS_SERVER=x scripts/gone",
		"go run ./examples/gone", "go test ./gone/...", "go -C bench test -bench Nonsense .", "go test -run Nonsense .",
	} {
		if err := checkCommand(command); err == nil {
			t.Errorf("%s: no error", command)
		}
	}
}

// commandsIn returns the commands of the sh blocks of a page, and those within its text.
func commandsIn(text string) (commands []string) {
	for _, block := range blocks(text, "sh") {
		for line := range strings.Lines(block) {
			command, _, _ := strings.Cut(line, "#")
			commands = append(commands, strings.TrimSpace(command))
		}
	}
	text = regexp.MustCompile("(?ms)^ *```.*?^ *```$").ReplaceAllString(text, "")
	start := "(?:[A-Z]+=\\$\\(scripts/|scripts/|\\.ci/|go (?:get|install|run|test|vet|mod|-C)\\b|singlefill [a-z-]|git )"
	for _, m := range regexp.MustCompile("`("+start+"[^`]*)`").FindAllStringSubmatch(text, -1) {
		commands = append(commands, strings.Join(strings.Fields(m[1]), " "))
	}
	return commands
}

// checkCommand looks for what a command names: scripts and their arguments, packages, tests and benchmarks.
func checkCommand(command string) error {
	words := strings.Fields(strings.NewReplacer("=$(", " ", "=", " ", ")", " ").Replace(command))
	program := "" // the file with the usage
	for i, word := range words {
		var err error
		switch {
		case strings.HasPrefix(word, "scripts/"), word == ".ci/run":
			program = word
			_, err = exec.LookPath(filepath.Join(root, word))
		case word == "singlefill" && i == 0:
			program = "cmd/singlefill/doc.go"
		case program == "scripts/test", program == ".ci/run": // what they get is for go test
		case program != "":
			err = checkArgument(program, word)
		case (word == "-run" || word == "-bench") && i+1 < len(words):
			err = checkTestName(words[i+1])
		case strings.HasPrefix(word, "./"):
			err = goCommand("list", word).Run()
		}
		if err != nil {
			return fmt.Errorf("%s: %w", word, err)
		}
	}
	return nil
}

// checkArgument returns an error for an argument that neither the file names nor the program that the
// script of this name runs. Values and placeholders, with a digit or a capital, are the user's.
func checkArgument(file, argument string) error {
	text, err := os.ReadFile(filepath.Join(root, file))
	if err != nil {
		return err
	}
	if program, err := os.ReadFile(filepath.Join(root, "internal", filepath.Base(file), "main.go")); err == nil {
		text = append(text, program...)
	}
	own := regexp.MustCompile(`[0-9A-Z]`).MatchString(argument)
	if !own && !regexp.MustCompile(`(^|[^\w-])`+regexp.QuoteMeta(argument)+`\b`).Match(text) {
		return fmt.Errorf("%s does not name it", file)
	}
	return nil
}

// checkTestName returns an error if no test and no benchmark of any module matches; "-" is to match none.
func checkTestName(pattern string) error {
	names, err := files(os.DirFS(root), "_test.go")
	if err != nil || pattern == "-" {
		return err
	}
	pattern = strings.TrimPrefix(strings.TrimPrefix(pattern, "Test"), "Benchmark")
	declared := regexp.MustCompile(`(?m)^func (Test|Benchmark)\w*` + pattern)
	for _, name := range names {
		if text, err := os.ReadFile(filepath.Join(root, name)); err == nil && declared.Match(text) {
			return nil
		}
	}
	return fmt.Errorf("nothing matches %s", pattern)
}

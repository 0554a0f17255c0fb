package main

import (
	"cmp"
	"flag"
	"fmt"
	"io"
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
	"go -C bench test":                     "go -C bench test -run - -bench Eviction -benchtime 1x .",
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

// elsewhere are the beginnings of the other commands. Of each of them checkCommand checks that the script and its part,
// the package, or a test of that name exist.
var elsewhere = map[string]string{
	"go -C histories test":      "scripts/test runs the tests",
	"go -C prometheus test":     "scripts/test runs the tests",
	"go -C examples/server run": "serves until it is killed; its tests start it",
	"go get":                    "downloads a release; scripts/release -try does it with this tree",
	"scripts/test":              "runs this test",
	".ci/run":                   "runs this test",
	"scripts/scale":             "a quarter of an hour; TestScale runs the smallest fleet",
	"git reset":                 "takes back the commit of a release",
	"git tag":                   "takes back the tags of a release",
}

var runAll = flag.Bool("all", false, "run a command also for each one of the pages that takes long; it takes minutes")

// Each command in a page is run, or has a reason why not, and can be run as it is printed. The workflow nightly.yml
// also runs those that take long.
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
	for start := range shorter {
		if !reasons[start] {
			t.Errorf("no page has a command that begins with %s", start)
		}
	}
	for start := range elsewhere {
		if !reasons[start] {
			t.Errorf("no page has a command that begins with %s", start)
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
		"scripts/gone", "scripts/bench hits", "scripts/docs -verify",
		"go run ./lock", "go run ./examples/gone", "go test ./gone/...", "go -C bench test -bench Gone .", "go test -run Gone .",
		"go install ./cmd/gone", "singlefill gone", "REDIS_SERVER=x scripts/gone", "make",
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

func checkCommand(command string) error {
	if m := regexp.MustCompile(`^[A-Z_]+=\$\(([^)]*)\)(.*)$`).FindStringSubmatch(command); m != nil {
		if err := checkCommand(m[1]); err != nil || m[2] == "" {
			return err
		}
		command = m[2]
	}
	words := strings.Fields(command)
	for len(words) > 0 && strings.Contains(words[0], "=") { // of the environment
		words = words[1:]
	}
	switch {
	case len(words) == 0:
		return fmt.Errorf("no command")
	case words[0] == "git" && len(words) > 1 && slices.Contains([]string{"reset", "tag"}, words[1]):
		return nil
	case slices.Equal(words, []string{"go", "vet"}), slices.Equal(words, []string{"go", "mod", "tidy"}):
		return nil
	case strings.HasPrefix(words[0], "scripts/"), words[0] == ".ci/run":
		return checkScript(words[0], words[1:])
	case words[0] == "go" && len(words) > 2:
		return checkGo(words[1:])
	case words[0] == "singlefill" && len(words) > 1:
		return checkUsage("cmd/singlefill/doc.go", words[1:])
	}
	return fmt.Errorf("no script, go command or singlefill")
}

// checkScript looks for the arguments in the text of the script, which has its usage. What scripts/test
// and .ci/run get is for go test.
func checkScript(script string, args []string) error {
	info, err := os.Stat(filepath.Join(root, script))
	if err != nil {
		return err
	}
	if info.Mode()&0o111 == 0 {
		return fmt.Errorf("it cannot be executed")
	}
	if out, err := exec.Command("bash", "-n", filepath.Join(root, script)).CombinedOutput(); err != nil {
		return fmt.Errorf("%v: %s", err, out)
	}
	if slices.Contains([]string{"scripts/test", ".ci/run"}, script) {
		return nil
	}
	return checkUsage(script, args)
}

// checkUsage returns an error for an argument that neither the file names nor the program that the
// script of this name runs. Values and placeholders, with a digit or a capital, are the user's.
func checkUsage(file string, args []string) error {
	text, err := os.ReadFile(filepath.Join(root, file))
	if err != nil {
		return err
	}
	if program, err := os.ReadFile(filepath.Join(root, "internal", filepath.Base(file), "main.go")); err == nil {
		text = append(text, program...)
	}
	for _, arg := range args {
		if regexp.MustCompile(`[0-9A-Z]`).MatchString(arg) {
			continue
		}
		if !regexp.MustCompile(`(^|[^\w-])` + regexp.QuoteMeta(arg) + `\b`).Match(text) {
			return fmt.Errorf("%s does not name %s", file, arg)
		}
	}
	return nil
}

// checkGo checks the packages of go run, go install and go test, and that -run and -bench match a function.
func checkGo(args []string) error {
	flags := flag.NewFlagSet("go", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	dir := flags.String("C", ".", "")
	if err := flags.Parse(args); err != nil {
		return err
	}
	verb := flags.Arg(0)
	run, bench := flags.String("run", "", ""), flags.String("bench", "", "")
	for _, name := range []string{"benchtime", "count", "draw"} {
		flags.String(name, "", "")
	}
	flags.Bool("v", false, "")
	flags.Bool("short", false, "")
	if err := flags.Parse(flags.Args()[1:]); err != nil {
		return err
	}
	packages := flags.Args()
	if i := slices.Index(packages, "-all"); verb == "test" && i > 0 { // it is for the test
		packages = packages[:i]
	}
	if len(packages) == 0 {
		packages = []string{"."}
	}
	if verb == "run" { // the rest is for the program
		packages = packages[:1]
	}
	for i, p := range packages {
		if local, isLocal := strings.CutPrefix(p, "github.com/singlefill/singlefill"); isLocal {
			local, _, _ = strings.Cut(local, "@")
			packages[i] = "." + local
		}
	}
	list := goCommand(append([]string{"-C", *dir, "list", "-f", "{{.Name}}\t{{.Dir}}"}, packages...)...)
	out, err := list.Output()
	if err != nil || len(out) == 0 {
		return fmt.Errorf("go list %v: %v", packages, err)
	}
	declared := ""
	for line := range strings.Lines(string(out)) {
		name, dir, _ := strings.Cut(strings.TrimSpace(line), "\t")
		if slices.Contains([]string{"run", "install"}, verb) && name != "main" {
			return fmt.Errorf("package %s is no program", name)
		}
		tests, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
		if err != nil {
			return err
		}
		for _, file := range tests {
			text, err := os.ReadFile(file)
			if err != nil {
				return err
			}
			declared += string(text)
		}
	}
	for kind, pattern := range map[string]string{"Test": cmp.Or(*run, "-"), "Benchmark": cmp.Or(*bench, "-")} {
		if pattern != "-" && !regexp.MustCompile(`(?m)^func `+kind+`\w*`+strings.TrimPrefix(pattern, kind)).MatchString(declared) {
			return fmt.Errorf("no %s matches %s", kind, pattern)
		}
	}
	return nil
}

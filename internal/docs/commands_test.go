package main

import (
	"cmp"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
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

// notRun are the beginnings of commands that cannot be run here. Of each of them checkCommand checks that the
// script and its part, the package, a test or benchmark of that name, or the subcommand exist.
var notRun = map[string]string{
	"go test":                        "scripts/test runs the tests",
	"go -C bench test":               "minutes; the smoke test of bench runs each benchmark once",
	"go -C histories test":           "scripts/test runs the tests",
	"go -C compress test":            "minutes",
	"go -C prometheus test":          "scripts/test runs the tests",
	"go -C examples/server run":      "serves until it is killed; its tests start it",
	"go run ./examples/stampede":     "starts a fleet on all cores",
	"go run github.com/singlefill/":  "downloads a release; the tests of cmd/singlefill run the command",
	"go get":                         "downloads a release; scripts/release -try does it with this tree",
	"go vet":                         "part of .ci/run",
	"go mod tidy":                    "part of .ci/run",
	"singlefill":                     "the tests of cmd/singlefill run the command",
	"scripts/test":                   "runs this test",
	".ci/run":                        "runs this test",
	"scripts/docs":                   "writes pages",
	"scripts/bench":                  "half an hour; the smoke test of bench runs each benchmark once",
	"scripts/scale":                  "a quarter of an hour; TestScale runs the smallest fleet",
	"scripts/soak":                   "hours",
	"scripts/fuzz":                   "minutes",
	"scripts/mutants":                "half an hour",
	"scripts/lint":                   "downloads golangci-lint",
	"scripts/servers":                "downloads servers",
	"scripts/apidiff":                "compares with a tag, which a copy without history lacks",
	"scripts/release":                "commits and tags; -try is part of .ci/run",
	"git reset":                      "takes a commit back",
	"git tag":                        "changes tags",
	"PROMETHEUS=$(scripts/servers":   "downloads servers",
	"REDIS_SERVER=$(scripts/servers": "downloads servers",
}

// Each command in a page is run, or has a reason why not, and can be run as it is printed.
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
		for start := range notRun {
			if strings.HasPrefix(command, start) && len(start) > len(reason) {
				reason = start
			}
		}
		if reason == "" {
			t.Errorf("%s is not run, and has no reason why not", command)
		}
		reasons[reason] = true
	}
	for start := range notRun {
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

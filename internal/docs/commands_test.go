package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Each command in a page names scripts, arguments, packages, tests and benchmarks that exist.
func TestPages_Commands(t *testing.T) {
	t.Parallel()
	checked := make(map[string]bool)
	for page, text := range pages(t) {
		for _, command := range commandsIn(text) {
			if checked[command] {
				continue
			}
			checked[command] = true
			if err := checkCommand(command); err != nil {
				t.Errorf("%s: %s: %v", page, command, err)
			}
		}
	}
	if len(checked) < 10 {
		t.Errorf("%d commands found", len(checked))
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
	program, module := "", "." // the file with the usage; what go -C names
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
		case word == "-C" && i+1 < len(words):
			module = words[i+1]
		case strings.HasPrefix(word, "./"):
			err = goCommand("-C", module, "list", word).Run()
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

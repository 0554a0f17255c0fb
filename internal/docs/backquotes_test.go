package main

import (
	"go/scanner"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/singlefill/singlefill/internal/redistest"
)

// foreign are names of other programs and libraries.
var foreign = regexp.MustCompile(`^(AutoPipeliner\.Submit|WaitContext|noeviction|retract|semaphore\.Weighted)$`)

// Each name in backquotes, in pages and in comments, is a name of the code.
func TestNames_InBackquotes(t *testing.T) {
	t.Parallel()
	known := make(map[string]bool)
	texts := make(map[string]string) // that people read
	for page, text := range pages(t) {
		if !strings.HasPrefix(page, "docs/migrate/") { // has names of other libraries
			texts[page] = regexp.MustCompile("(?ms)^ *```.*?^ *```$").ReplaceAllString(text, "")
		}
	}
	word := regexp.MustCompile(`\w+`)
	for _, ending := range []string{".lua", ".yml", ".json", ".mod", ".txt"} {
		names, err := files(os.DirFS(root), ending)
		redistest.Must(t, err)
		for _, name := range names {
			for _, w := range word.FindAllString(read(t, name), -1) {
				known[w] = true
			}
		}
	}
	names, err := files(os.DirFS(root), ".go")
	redistest.Must(t, err)
	for _, name := range names {
		var s scanner.Scanner
		src := []byte(read(t, name))
		s.Init(token.NewFileSet().AddFile(name, -1, len(src)), src, nil, scanner.ScanComments)
		for _, tok, text := s.Scan(); tok != token.EOF; _, tok, text = s.Scan() {
			switch tok {
			case token.COMMENT:
				texts[name] += text + "\n"
			case token.IDENT, token.STRING:
				for _, w := range word.FindAllString(text, -1) {
					known[w] = true
				}
			}
		}
		known[strings.TrimSuffix(filepath.Base(name), ".go")] = true
	}
	quoted := regexp.MustCompile("`([A-Za-z]\\w*(?:\\.\\w+)*)`")
	command := regexp.MustCompile(`^[A-Z_]+$`) // of Redis
	found := 0
	for name, text := range texts {
		for _, m := range quoted.FindAllStringSubmatch(text, -1) {
			if command.MatchString(m[1]) || foreign.MatchString(m[1]) {
				continue
			}
			found++
			for _, part := range strings.Split(m[1], ".") {
				if !known[part] {
					t.Errorf("%s: nothing is called %s", name, m[1])
					break
				}
			}
		}
	}
	if found < 300 {
		t.Errorf("%d names found", found)
	}
}

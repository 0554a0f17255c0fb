package locktest

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/singlefill/singlefill/internal/redistest"
)

// Scripts returns the scripts of package lock. Tests run in the directory of their package, so they
// are found above it.
func Scripts() fs.FS {
	for dir := "."; ; dir = filepath.Join(dir, "..") {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return os.DirFS(filepath.Join(dir, "lock", "lua"))
		}
		if path, err := filepath.Abs(dir); err != nil || path == filepath.Dir(path) {
			panic("there is no go.mod above this directory")
		}
	}
}

// Script returns the text of the script by which the kind does act.
func (k Kind) Script(t testing.TB, act string) string {
	t.Helper()
	kind := k.Name
	if kind == "fair" && (act == "renew" || act == "release") {
		kind = "mutex"
	}
	text, err := fs.ReadFile(Scripts(), kind+"_"+act+".lua")
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// Command matches the commands of one act. The server knows the script from then on, so that the
// first matching command does not fail.
func (k Kind) Command(t testing.TB, s *redistest.Server, act string) func(cmd []string) bool {
	t.Helper()
	text := k.Script(t, act)
	sha, err := s.Admin().ScriptLoad(t.Context(), text).Result()
	if err != nil {
		t.Fatal(err)
	}
	return func(cmd []string) bool {
		return len(cmd) > 1 && (strings.EqualFold(cmd[0], "evalsha") && cmd[1] == sha ||
			strings.EqualFold(cmd[0], "eval") && cmd[1] == text)
	}
}

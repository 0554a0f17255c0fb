package cachetest

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/wake"
)

// Scripts returns the folder of the fill lock's scripts. A test runs in the folder of its package,
// at some depth below the module's.
func Scripts(t testing.TB) fs.FS {
	t.Helper()
	dir, err := os.Getwd()
	redistest.Must(t, err)
	for ; ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return os.DirFS(filepath.Join(dir, "internal", "filllock", "lua"))
		}
		if dir == filepath.Dir(dir) {
			t.Fatal("go.mod is in no folder above the test's")
		}
	}
}

// Script matches the commands that run a script of the fill lock, which is named like its file.
func Script(t testing.TB, name string) func(cmd []string) bool {
	t.Helper()
	text, err := fs.ReadFile(Scripts(t), name+".lua")
	redistest.Must(t, err)
	text = append([]byte(wake.Lua), text...)
	hash := redis.NewScript(string(text)).Hash()
	return func(cmd []string) bool {
		return len(cmd) > 1 && (strings.EqualFold(cmd[0], "evalsha") && cmd[1] == hash ||
			strings.EqualFold(cmd[0], "eval") && cmd[1] == string(text))
	}
}

// LoadScripts makes the server know the scripts, so that each act on the fill lock is one command.
func LoadScripts(t testing.TB, s *redistest.Server) {
	t.Helper()
	scripts := Scripts(t)
	files, err := fs.Glob(scripts, "*.lua")
	if err != nil || len(files) == 0 {
		t.Fatalf("scripts %q, %v", files, err)
	}
	for _, file := range files {
		text, err := fs.ReadFile(scripts, file)
		if err == nil {
			err = s.Admin().ScriptLoad(t.Context(), wake.Lua+string(text)).Err()
		}
		redistest.Must(t, err)
	}
}

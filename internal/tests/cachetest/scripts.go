package cachetest

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/wake"
)

// Scripts returns the folder of the fill lock's scripts.
func Scripts() fs.FS { return os.DirFS(filepath.Join(redistest.Root(), "internal", "filllock", "lua")) }

// Script matches the commands that run a script of the fill lock, which is named like its file.
func Script(t testing.TB, name string) func(cmd []string) bool {
	t.Helper()
	text, err := fs.ReadFile(Scripts(), name+".lua")
	redistest.Must(t, err)
	return redistest.Runs(wake.Lua + string(text))
}

// LoadScripts makes the server know the scripts, so that each act on the fill lock is one command.
func LoadScripts(t testing.TB, s *redistest.Server) {
	t.Helper()
	scripts := Scripts()
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

package locktest

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"testing/fstest"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/wake"
)

// Scripts returns the scripts of package lock, without the beginning that package wake gives to all
// scripts. Tests run in the directory of their package, so they are found above it.
func Scripts() fs.FS {
	files := os.DirFS(filepath.Join(redistest.Root(), "lock", "lua"))
	names, _ := fs.Glob(files, "*_*.lua") // the pattern is correct
	scripts := make(fstest.MapFS)
	for _, name := range names {
		scripts[name] = &fstest.MapFile{Data: []byte(read(files, "waiting.lua") + read(files, "fence.lua") + read(files, "ended.lua") + read(files, name))}
	}
	return scripts
}

// Shared returns the beginning of all scripts: what they need to wake waiters, and can do without.
func Shared() string {
	return wake.Lua + read(os.DirFS(filepath.Join(redistest.Root(), "lock", "lua")), "waiting.lua")
}

// Text returns the text of the script that is named like its file.
func Text(file string) string { return wake.Lua + read(Scripts(), file) }

func read(files fs.FS, name string) string {
	text, err := fs.ReadFile(files, name)
	if err != nil {
		panic(err)
	}
	return string(text)
}

// Script returns the text of the script by which the kind does act.
func (k Kind) Script(t testing.TB, act string) string {
	t.Helper()
	kind := k.Name
	if kind == "fair" && act == "renew" {
		kind = "mutex"
	}
	return Text(kind + "_" + act + ".lua")
}

// Command matches the commands of one act. The server knows the script from then on, so that the
// first matching command does not fail.
func (k Kind) Command(t testing.TB, s *redistest.Server, act string) func(cmd []string) bool {
	t.Helper()
	text := k.Script(t, act)
	redistest.Must(t, s.Admin().ScriptLoad(t.Context(), text).Err())
	return redistest.Runs(text)
}

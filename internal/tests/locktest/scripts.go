package locktest

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/wake"
)

// folder has the scripts of package lock. Tests run in the directory of their package, so it is found above
// it.
func folder() string { return filepath.Join(redistest.Root(), "lock", "lua") }

// Scripts returns the texts of the scripts of package lock, by the names of their files.
func Scripts() map[string]string {
	names, _ := filepath.Glob(filepath.Join(folder(), "*_*.lua")) // the pattern is correct
	scripts := make(map[string]string)
	for _, name := range names {
		name = filepath.Base(name)
		scripts[name] = Shared() + read("fence.lua") + read("ended.lua") + read(name)
	}
	return scripts
}

// Shared returns the beginning of all scripts: what they need to wake waiters, and can do without.
func Shared() string { return wake.Lua + read("waiting.lua") }

func read(name string) string {
	text, err := os.ReadFile(filepath.Join(folder(), name))
	if err != nil {
		panic(err)
	}
	return string(text)
}

// Script returns the text of the script by which the kind does act.
func (k Kind) Script(act string) string {
	kind := k.Name
	if kind == "fair" && act == "renew" {
		kind = "mutex"
	}
	return Scripts()[kind+"_"+act+".lua"]
}

// Command matches the commands of one act. The server knows the script from then on, so that the
// first matching command does not fail.
func (k Kind) Command(t testing.TB, s *redistest.Server, act string) func(cmd []string) bool {
	t.Helper()
	text := k.Script(act)
	redistest.Must(t, s.Admin().ScriptLoad(t.Context(), text).Err())
	return redistest.Runs(text)
}

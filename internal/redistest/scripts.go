package redistest

import (
	"os"
	"path/filepath"
	"strings"

	"github.com/redis/go-redis/v9"
)

// Root returns the folder of the module. A test runs in the folder of its package, below it.
func Root() string {
	for dir := "."; ; dir = filepath.Join(dir, "..") {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
		if path, err := filepath.Abs(dir); err != nil || path == filepath.Dir(path) {
			panic("redistest: go.mod is in no folder above the test's")
		}
	}
}

// Runs matches the commands that run a script.
func Runs(script string) func(cmd []string) bool {
	hash := redis.NewScript(script).Hash()
	return func(cmd []string) bool {
		return len(cmd) > 1 && (strings.EqualFold(cmd[0], "evalsha") && cmd[1] == hash ||
			strings.EqualFold(cmd[0], "eval") && cmd[1] == script)
	}
}

package redistest

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"
)

// leakLimit is how long goroutines may take to end after the last test: closing
// a client unblocks its readers, but does not wait for them.
const leakLimit = 3 * time.Second

// Main is the TestMain of every package that uses redistest:
//
//	func TestMain(m *testing.M) { redistest.Main(m) }
//
// It runs the tests, or a role if this process is a child, stops the shared
// servers, and fails the run if goroutines were left behind, or connections and
// keys without a TTL on those servers.
func Main(m *testing.M) {
	if role, child := os.LookupEnv(childEnv); child {
		runChild(role)
	}
	code := m.Run()
	if leaks := stopShared(); len(leaks) > 0 {
		fmt.Fprintln(os.Stderr, strings.Join(leaks, "\n"))
		code = 1
	}
	if code == 0 {
		if leaked := awaitNoLeak(); leaked != "" {
			fmt.Fprintf(os.Stderr, "redistest: goroutines left behind:\n\n%s\n", leaked)
			code = 1
		}
	}
	os.Exit(code)
}

func awaitNoLeak() (leaked string) {
	poll(leakLimit, func() bool {
		leaked = strays()
		return leaked == ""
	})
	return leaked
}

// strays returns the stacks of the goroutines, other than the caller's, that run
// our code or that of our dependencies, or were started by it.
func strays() string {
	buf := make([]byte, 1<<20)
	for {
		n := runtime.Stack(buf, true)
		if n < len(buf) {
			buf = buf[:n]
			break
		}
		buf = make([]byte, 2*len(buf))
	}
	var found []string
	for i, stack := range strings.Split(string(buf), "\n\n") {
		if i > 0 && isOurs(stack) { // the first stack is this goroutine's
			found = append(found, stack)
		}
	}
	return strings.Join(found, "\n\n")
}

func isOurs(stack string) bool {
	for _, path := range []string{
		"github.com/singlefill/",
		"github.com/redis/go-redis/",
		"github.com/alicebob/miniredis/",
		"golang.org/x/sync/",
	} {
		if strings.Contains(stack, path) {
			return true
		}
	}
	return false
}

package redistest

import (
	"flag"
	"fmt"
	"os"
	"runtime"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// leakLimit is how long goroutines may take to end after the last test, and connections after theirs. Closing a client
// unblocks its readers but does not wait for them.
const leakLimit = 3 * time.Second

// Main is the TestMain of every package that uses redistest:
//
//	func TestMain(m *testing.M) { redistest.Main(m) }
//
// It runs the tests, or a role if this process is a child, and stops the shared servers. It fails
// the run if goroutines were left behind, or connections or keys without a TTL on those servers.
// Since most tests mostly wait, it runs twice as many in parallel as there are processors, unless
// -parallel is set.
func Main(m *testing.M) {
	runIfChild()
	runMore()
	os.Exit(run(m))
}

// Ring is the TestMain of a package whose tests take minutes and need real servers. With -short, or
// without a server, it runs none of them; if REDIS_REQUIRED=1, a missing server is an error.
// Otherwise it is like [Main].
func Ring(m *testing.M) {
	runIfChild()
	flag.Parse()
	if testing.Short() {
		fmt.Println("redistest: these tests do not run with -short")
		os.Exit(0)
	}
	if _, err := findProgram(); err != nil && !required() {
		fmt.Println("redistest: these tests need a server:", err)
		os.Exit(0)
	}
	os.Exit(run(m))
}

// Quick reports whether a test is to run on a sample: with -short, and where there is
// no server, so that a first go test ./... takes no longer than a minute.
func Quick() bool {
	if testing.Short() {
		return true
	}
	_, err := findProgram()
	return err != nil && !required()
}

func runIfChild() {
	if role, child := os.LookupEnv(childEnv); child {
		runChild(role)
	}
}

// runMore runs two tests per processor in parallel, unless -parallel is set.
func runMore() {
	flag.Parse()
	set := false
	flag.Visit(func(f *flag.Flag) { set = set || f.Name == "test.parallel" })
	if !set {
		if err := flag.Set("test.parallel", strconv.Itoa(2*runtime.GOMAXPROCS(0))); err != nil {
			panic(err) // the flag has existed since Go 1.0
		}
	}
}

func run(m *testing.M) (code int) {
	code = m.Run()
	if leaks := stopShared(); len(leaks) > 0 {
		fmt.Fprintln(os.Stderr, strings.Join(leaks, "\n"))
		code = 1
	}
	if code == 0 {
		var leaked string
		if !poll(leakLimit, func() bool { leaked = strays(); return leaked == "" }) {
			fmt.Fprintf(os.Stderr, "redistest: goroutines left behind:\n\n%s\n", leaked)
			code = 1
		}
	}
	return code
}

// strays returns the stacks of the goroutines, except the caller's, that run or were started by
// code of this module or of its dependencies.
func strays() string {
	var all strings.Builder
	_ = pprof.Lookup("goroutine").WriteTo(&all, 2) // a Builder takes everything
	var found []string
	for i, stack := range strings.Split(all.String(), "\n\n") {
		if i > 0 && isOurs(stack) { // the first stack is this goroutine's
			found = append(found, stack)
		}
	}
	return strings.Join(found, "\n\n")
}

func isOurs(stack string) bool {
	return slices.ContainsFunc([]string{
		"github.com/singlefill/",
		"github.com/redis/go-redis/",
		"github.com/alicebob/miniredis/",
		"golang.org/x/sync/",
	}, func(path string) bool { return strings.Contains(stack, path) })
}

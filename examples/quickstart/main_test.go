package main

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
)

// asProgram is set for a test binary that runs as the program.
const asProgram = "QUICKSTART_TEST_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		loadTime = 100 * time.Millisecond
		main()
		return
	}
	redistest.Main(m)
}

// With singlefill each report is made once. By hand it is made by many at once, and each call costs a command.
func TestQuickstart(t *testing.T) {
	t.Parallel()
	self, err := os.Executable()
	redistest.Must(t, err)
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), asProgram+"=1")
	out, err := cmd.CombinedOutput()
	redistest.Must(t, err)
	const calls, keys = 4 * 50 * 2 * 3, 3
	byHand, filled := parse(t, string(out), "GET, load, SET"), parse(t, string(out), "singlefill")
	if byHand.calls != calls || byHand.loads <= keys || byHand.commands != calls+byHand.loads {
		t.Errorf("by hand: %+v", byHand)
	}
	if filled.calls != calls || filled.loads != keys || filled.commands < 3*keys || filled.commands >= byHand.commands {
		t.Errorf("with singlefill: %+v", filled)
	}
	if t.Failed() || !strings.HasSuffix(string(out), "All answers were right.\n") {
		t.Errorf("it says\n%s", out)
	}
}

type row struct{ calls, loads, commands int }

func parse(t *testing.T, out, way string) (r row) {
	t.Helper()
	_, numbers, _ := strings.Cut(out, "\n"+way)
	if _, err := fmt.Sscan(numbers, &r.calls, &r.loads, &r.commands); err != nil {
		t.Fatalf("line of %q: %v\n%s", way, err, out)
	}
	return r
}

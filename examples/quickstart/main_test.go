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

// Quickstart runs with its embedded Redis.
func TestQuickstart_EmbeddedRedis(t *testing.T) {
	t.Parallel()
	checkRun(t, "")
}

// Each run of quickstart on a real Redis starts with a cold cache.
func TestQuickstart_RealRedis(t *testing.T) {
	t.Parallel()
	url := "redis://" + redistest.Start(t).Addr
	checkRun(t, url)
	checkRun(t, url)
}

// checkRun runs the program and checks the numbers that it prints.
func checkRun(t *testing.T, url string) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), "REDIS_URL="+url, asProgram+"=1")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if want := "without Redis:\n300 calls, 3 loads.\n"; !strings.Contains(string(out), want) {
		t.Errorf("it does not say %q", want)
	}
	byHand, filled := parse(t, string(out), "GET, load, SET"), parse(t, string(out), "singlefill")
	const calls, keys = 4 * 50 * 2 * 3, 3
	if byHand.calls != calls || filled.calls != calls {
		t.Errorf("not %d calls each way", calls)
	}
	if filled.loads != keys {
		t.Errorf("singlefill loaded %d times, not once for each of %d keys", filled.loads, keys)
	}
	if byHand.loads <= keys {
		t.Errorf("without singlefill there were %d loads: no stampede to prevent", byHand.loads)
	}
	if n := byHand.calls + byHand.loads; byHand.commands != n {
		t.Errorf("without singlefill %d commands were counted, not a GET for each call and a SET for each load: %d", byHand.commands, n)
	}
	if filled.commands < 3*keys || filled.commands >= byHand.commands {
		t.Errorf("singlefill sent %d commands", filled.commands)
	}
	for _, r := range []row{byHand, filled} {
		if r.loads+r.waits+r.hits != r.calls || r.waits < 0 {
			t.Errorf("%+v does not add up", r)
		}
	}
	if !strings.HasSuffix(string(out), "All answers were right.\n") {
		t.Error("it does not say that all answers were right")
	}
	if t.Failed() {
		t.Logf("\n%s", out)
	}
}

type row struct{ calls, loads, waits, hits, commands int }

func parse(t *testing.T, out, way string) (r row) {
	t.Helper()
	_, numbers, found := strings.Cut(out, "\n"+way)
	if !found {
		t.Fatalf("no line for %q in\n%s", way, out)
	}
	if _, err := fmt.Sscan(numbers, &r.calls, &r.loads, &r.waits, &r.hits, &r.commands); err != nil {
		t.Fatalf("line of %q: %v\n%s", way, err, out)
	}
	return r
}

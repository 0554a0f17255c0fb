package main

import (
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
)

// The role "supervisor" runs the command in a process that can be killed.
func init() {
	redistest.Role("supervisor", func(p *redistest.Child) { p.Say("ended %v", supervise(p.Args)) })
}

// startTestFleet starts the planned processes on free ports, and checks that they end with the
// test.
func startTestFleet(t *testing.T, redisURL string) (*fleet, int) {
	t.Helper()
	first, err := freePorts(0)
	if err != nil {
		t.Fatal(err)
	}
	f, err := startFleet(plan(first, redisURL), leastAway)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		before := f.state()
		f.close()
		for _, s := range before {
			if s.PID != 0 && exists(s.PID) {
				t.Errorf("process %s is left", s.Name)
			}
		}
	})
	return f, first
}

func exists(pid int) bool {
	p, err := os.FindProcess(pid)
	return err == nil && !errors.Is(p.Signal(syscall.Signal(0)), os.ErrProcessDone)
}

func stateOf(f *fleet, name string) childState {
	for _, s := range f.state() {
		if s.Name == name {
			return s
		}
	}
	return childState{}
}

func isOpen(addr string) bool {
	conn, err := net.Dial("tcp", addr)
	if err == nil {
		conn.Close()
	}
	return err == nil
}

func TestFleet_KilledProcess(t *testing.T) {
	t.Parallel()
	f, first := startTestFleet(t, "")
	for _, name := range []string{redisName, fmt.Sprint(first)} {
		before := stateOf(f, name).PID
		if !exists(before) {
			t.Fatalf("process %s does not run: %+v", name, f.state())
		}
		if err := f.kill(name); err != nil {
			t.Fatal(err)
		}
		if exists(before) {
			t.Errorf("process %s runs on", name)
		}
		redistest.Await(t, "it is back", func() bool {
			now := stateOf(f, name).PID
			return now != 0 && now != before
		})
	}
	addr := local(first)
	if resp, _ := get(t, "http://"+addr+"/tiles/0/0/0"); resp.StatusCode != http.StatusOK || resp.Header.Get("Tile-Process") != fmt.Sprint(first) {
		t.Errorf("after its return: %s, %v", resp.Status, resp.Header)
	}
	if err := f.kill("none"); err != errUnknown {
		t.Errorf("a process that does not exist: %v", err)
	}
}

func TestFleet_ForeignRedis(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	f, first := startTestFleet(t, "redis://"+redis.Addr)
	if err := f.kill(redisName); err != errUnknown {
		t.Errorf("%v", err)
	}
	get(t, fmt.Sprintf("http://%s/tiles/0/0/0", local(first)))
	if n, err := redis.Admin().Exists(t.Context(), "tiles:{0/0/0}").Result(); n != 1 || err != nil {
		t.Errorf("the tile is not in that Redis: %d, %v", n, err)
	}
}

func TestFleet_CannotStart(t *testing.T) {
	t.Parallel()
	var first int
	var taken net.Listener
	for taken == nil { // another program may take the port first
		var err error
		if first, err = freePorts(0); err != nil {
			t.Fatal(err)
		}
		taken, _ = net.Listen("tcp", local(first+1))
	}
	defer taken.Close()
	if err := checkFree(first); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("ports %d to %d are needed", first, first+ports-1)) {
		t.Errorf("%v", err)
	}
	if f, err := startFleet(plan(first, ""), time.Hour); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("process %d ended", first+1)) {
		t.Errorf("%v, %v", f, err)
	}
	for _, port := range []int{first, first + 2, first + processes + 1} {
		if isOpen(local(port)) {
			t.Errorf("port %d is still served", port)
		}
	}
}

func TestSupervise_Flags(t *testing.T) {
	t.Parallel()
	for _, port := range []int{-1, 65532, 100000} {
		if _, err := freePorts(port); err == nil || !strings.Contains(err.Error(), "0 to 65531 is allowed") {
			t.Errorf("%d: %v", port, err)
		}
	}
	if err := supervise([]string{"-away=9ms"}); err == nil || !strings.Contains(err.Error(), "at least 10ms is allowed") {
		t.Errorf("%v", err)
	}
}

// -h says what the program does, and then names all flags.
func TestHelp(t *testing.T) {
	t.Parallel()
	_, _, usage, err := parseFlags([]string{"-h"})
	if err != flag.ErrHelp {
		t.Errorf("%v", err)
	}
	purpose, flags, _ := strings.Cut(usage, "\n  -")
	for _, want := range []string{"map of the Mandelbrot set", "3 processes", "share one Redis", "kill a process or Redis", "REDIS_URL"} {
		if !strings.Contains(purpose, want) {
			t.Errorf("no %q before the flags in\n%s", want, usage)
		}
	}
	for _, want := range []string{"away time", "(default 6s)", "-port port", "(default 8080)"} {
		if !strings.Contains(flags, want) {
			t.Errorf("no %q among the flags in\n%s", want, usage)
		}
	}
}

// startSupervisor starts the command, and returns its first port.
func startSupervisor(t *testing.T) (p *redistest.Process, first int) {
	t.Helper()
	p = redistest.Spawn(t, "supervisor", "-port=0")
	if _, err := fmt.Sscanf(p.Expect("The map is on http://127.0.0.1:"), "%d", &first); err != nil {
		t.Fatal(err)
	}
	first -= processes
	if err := allOpen(first); err != nil {
		t.Fatal(err)
	}
	return p, first
}

func allOpen(first int) error {
	for port := first; port < first+ports; port++ {
		if !isOpen(local(port)) {
			return fmt.Errorf("no process serves port %d", port)
		}
	}
	return nil
}

func awaitAllClosed(t *testing.T, first int) {
	t.Helper()
	redistest.Await(t, "no process is left", func() bool {
		for port := first; port < first+ports; port++ {
			if isOpen(local(port)) {
				return false
			}
		}
		return true
	})
}

func TestSupervise_Killed(t *testing.T) {
	t.Parallel()
	p, first := startSupervisor(t)
	p.Kill()
	awaitAllClosed(t, first)
}

func TestSupervise_SIGTERM(t *testing.T) {
	t.Parallel()
	first, err := freePorts(0)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "tiles")
	if out, err := exec.Command("go", "build", "-o", path, ".").CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	program := exec.Command(path, fmt.Sprint("-port=", first))
	program.Stderr = os.Stderr
	if err := program.Start(); err != nil {
		t.Fatal(err)
	}
	redistest.Await(t, "all ports are served", func() bool { return allOpen(first) == nil })
	if err := program.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := program.Wait(); err != nil {
		t.Errorf("exit: %v", err)
	}
	for port := first; port < first+ports; port++ {
		if isOpen(local(port)) {
			t.Errorf("port %d is still served", port)
		}
	}
}

func TestPage(t *testing.T) {
	t.Parallel()
	f, first := startTestFleet(t, "")
	page := httptest.NewUnstartedServer(nil)
	port := page.Listener.Addr().(*net.TCPAddr).Port
	page.Config.Handler = newPage(f, port)
	page.Start()
	t.Cleanup(page.Close)
	t.Cleanup(page.CloseClientConnections)
	if resp, body := get(t, page.URL); resp.StatusCode != http.StatusOK || !strings.Contains(body, `src="app.js"`) {
		t.Errorf("%s\n%s", resp.Status, body)
	}

	states := listen(t, page.URL+"/fleet", "")
	name := fmt.Sprint(first + 1)
	var pid int
	next(states, "all run", func(all []childState) bool {
		if i := slices.IndexFunc(all, func(s childState) bool { return s.Name == name }); i >= 0 {
			pid = all[i].PID
		}
		return len(all) == 1+processes && pid != 0
	})
	for what, header := range map[string][]string{
		"another site":         {"Sec-Fetch-Site", "cross-site"},
		"another port":         {"Sec-Fetch-Site", "same-site"},
		"another origin":       {"Origin", "http://evil.example"},
		"another name of here": {"Host", fmt.Sprint("evil.example:", port)},
	} {
		if resp, _ := do(t, http.MethodPost, page.URL+"/kill/"+name, header...); resp.StatusCode != http.StatusForbidden {
			t.Errorf("%s may kill: %s", what, resp.Status)
		}
	}
	if resp, _ := get(t, page.URL+"/kill/"+name); resp.StatusCode != http.StatusNotFound && resp.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("GET may kill: %s", resp.Status)
	}
	if !exists(pid) {
		t.Fatal("a request that may not kill has killed it")
	}
	if resp, body := do(t, http.MethodPost, page.URL+"/kill/none", "Sec-Fetch-Site", "same-origin"); resp.StatusCode != http.StatusNotFound {
		t.Errorf("%s %s", resp.Status, body)
	}
	if resp, body := do(t, http.MethodPost, page.URL+"/kill/"+name, "Sec-Fetch-Site", "same-origin", "Origin", page.URL); resp.StatusCode != http.StatusNoContent {
		t.Errorf("%s %s", resp.Status, body)
	}
	if exists(pid) {
		t.Error("it runs on")
	}
	next(states, "it is back", func(all []childState) bool {
		return slices.ContainsFunc(all, func(s childState) bool { return s.Name == name && s.PID != 0 && s.PID != pid })
	})
}

func TestPage_ProcessThatIsDown(t *testing.T) {
	t.Parallel()
	first, err := freePorts(0)
	if err != nil {
		t.Fatal(err)
	}
	f, err := startFleet(plan(first, ""), time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	defer f.close()
	before := stateOf(f, redisName)
	if err := f.kill(redisName); err != nil {
		t.Fatal(err)
	}
	if err := f.kill(redisName); err != errDown {
		t.Errorf("%v", err)
	}
	if s := stateOf(f, redisName); s.PID != 0 || s.Since <= before.Since || before.Since == 0 || time.Until(time.UnixMilli(s.Returns)) < time.Minute {
		t.Errorf("%+v", s)
	}
}

package main

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

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
	redistest.Must(t, err)
	f, err := startFleet(plan(first, redisURL), leastAway)
	redistest.Must(t, err)
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

func isOpen(addr string) bool {
	conn, err := net.Dial("tcp", addr)
	if err == nil {
		conn.Close()
	}
	return err == nil
}

// When the command is killed, its processes end.
func TestSupervise_Killed(t *testing.T) {
	t.Parallel()
	p := redistest.Spawn(t, "supervisor", "-port=0")
	var page int
	if _, err := fmt.Sscanf(p.Expect("The map is on http://127.0.0.1:"), "%d", &page); err != nil {
		t.Fatal(err)
	}
	open := func() (ports []int) {
		for port := page - processes; port <= page+1; port++ {
			if isOpen(local(port)) {
				ports = append(ports, port)
			}
		}
		return ports
	}
	if n := len(open()); n != ports {
		t.Fatalf("%d ports are served, want %d", n, ports)
	}
	p.Kill()
	redistest.Await(t, "no process is left", func() bool { return len(open()) == 0 })
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

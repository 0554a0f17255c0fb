package browser

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// A fleet is a running command, and the reports of its processes.
type fleet struct {
	url   string
	ports []int

	mu        sync.Mutex
	loads     []load        // protected by mu: the reports of all processes, each once
	refreshes int           // protected by mu: refreshes, which are not in loads
	stats     map[int]stats // protected by mu: the latest ones, by port
}

type load struct {
	port     int
	Tile     string
	Unlocked bool
}

type stats struct{ Hits, Loads, Loading, Waits int64 }

// startFleet builds and starts the command. It ends with the test.
func startFleet(t *testing.T, flags ...string) *fleet {
	t.Helper()
	program := filepath.Join(t.TempDir(), "tiles")
	build := exec.Command("go", "build", "-o", program, ".")
	build.Dir = ".."
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	cmd := exec.Command(program, append([]string{"-port=0"}, flags...)...)
	cmd.Env = append(os.Environ(), "REDIS_URL=") // only an embedded Redis can be killed
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Signal(syscall.SIGTERM)
		if err := cmd.Wait(); err != nil {
			t.Errorf("the command ended with %v", err)
		}
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	var port int
	if _, scanErr := fmt.Sscanf(line, "The map is on http://127.0.0.1:%d", &port); scanErr != nil {
		t.Fatalf("the command said %q, %v", line, err)
	}
	f := &fleet{url: fmt.Sprintf("http://127.0.0.1:%d", port), ports: []int{port - 3, port - 2, port - 1}, stats: make(map[int]stats)}
	var listening sync.WaitGroup
	t.Cleanup(listening.Wait) // the context of the test has ended by then
	for _, port := range f.ports {
		listening.Go(func() { f.listen(t, port) })
	}
	return f
}

// listen records the reports of the process on a port, and of its successors, until the test ends.
func (f *fleet) listen(t *testing.T, port int) {
	id := ""
	for t.Context().Err() == nil {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, fmt.Sprintf("http://127.0.0.1:%d/events", port), nil)
		if err != nil {
			t.Error(err)
			return
		}
		req.Header.Set("Last-Event-ID", id)
		resp, err := http.DefaultClient.Do(req)
		if err != nil { // the process has been killed
			select {
			case <-time.After(50 * time.Millisecond):
			case <-t.Context().Done():
			}
			continue
		}
		for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
			if after, ok := strings.CutPrefix(lines.Text(), "id: "); ok {
				id = after
			}
			if data, ok := strings.CutPrefix(lines.Text(), "data: "); ok {
				f.note(t, port, data)
			}
		}
		resp.Body.Close()
	}
}

func (f *fleet) note(t *testing.T, port int, data string) {
	var message struct {
		load
		Kind    string
		Refresh bool
		Error   string
		Stats   stats
	}
	if err := json.Unmarshal([]byte(data), &message); err != nil {
		t.Errorf("%d reports %s: %v", port, data, err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	switch message.Kind {
	case "stats":
		f.stats[port] = message.Stats
	case "load":
		if message.Error != "" {
			t.Errorf("%d failed to compute %s: %s", port, message.Tile, message.Error)
		}
		if message.Refresh { // a tile may expire while a slow machine runs this test
			f.refreshes++
			return
		}
		message.port = port
		f.loads = append(f.loads, message.load)
	}
}

// computed returns the loads so far, from index first on.
func (f *fleet) computed(first int) []load {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]load(nil), f.loads[first:]...)
}

// sum returns the sum of the stats of all processes.
func (f *fleet) sum() (sum stats) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, s := range f.stats {
		sum = stats{sum.Hits + s.Hits, sum.Loads + s.Loads, sum.Loading + s.Loading, sum.Waits + s.Waits}
	}
	return sum
}

// reported returns the number of loads and refreshes so far.
func (f *fleet) reported() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.loads) + f.refreshes
}

// settled reports whether no load runs, and all loads have been reported.
func (f *fleet) settled() bool {
	return f.sum().Loading == 0 && f.sum().Loads == int64(f.reported())
}

package main

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
)

func TestMain(m *testing.M) {
	if _, isWorker := os.LookupEnv(workerEnv); isWorker {
		main()
		return
	}
	redistest.Main(m)
}

// The value lives longer than the run, even on a slow machine, so the key is cold once.
func TestMeasure_ColdKey(t *testing.T) {
	t.Parallel()
	p := plan{
		Processes: 3, Goroutines: 8,
		Load: 100 * time.Millisecond, TTL: time.Minute, Expiring: 200 * time.Millisecond,
	}
	url := "redis://" + redistest.Start(t).Addr
	for i, want := range []int{p.Processes, 1, 1} {
		r, err := measure(t.Context(), task{Plan: p, Contender: i, Namespace: contenders[i].color, URL: url})
		redistest.Must(t, err)
		if c := r[cold]; len(c.Calls) != p.Processes*p.Goroutines || len(c.Loads) != want || c.Commands == 0 {
			t.Errorf("%s: %d calls, %d loads, %d commands; want %d loads",
				contenders[i].name, len(c.Calls), len(c.Loads), c.Commands, want)
		}
		if e := r[expiring]; len(e.Loads) > 0 {
			t.Errorf("%s: %d loads of a value that lives long", contenders[i].name, len(e.Loads))
		}
	}
}

// A run prints a line for each contender in each phase, and draws a well-formed picture.
func TestRun(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	svg := filepath.Join(t.TempDir(), "x.svg")
	p := plan{Processes: 2, Goroutines: 4, Load: 10 * time.Millisecond}.timed()
	redistest.Must(t, run(t.Context(), p, "", svg, &out))
	picture, err := os.ReadFile(svg)
	redistest.Must(t, err)
	for _, c := range contenders {
		if strings.Count(out.String(), c.name) != 2 || !bytes.Contains(picture, []byte(`class="bar `+c.color)) {
			t.Errorf("%s is missing in the picture or in\n%s", c.name, &out)
		}
	}
	for d := xml.NewDecoder(bytes.NewReader(picture)); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("not well-formed: %v", err)
		}
	}
}

// A server that does not answer ends the run, and its processes, with an error.
func TestRun_NoServer(t *testing.T) {
	t.Parallel()
	for _, url := range []string{"redis://127.0.0.1:1", "nonsense"} {
		p := plan{Processes: 2, Goroutines: 1, Load: time.Millisecond}.timed()
		if err := run(t.Context(), p, url, filepath.Join(t.TempDir(), "x.svg"), io.Discard); err == nil {
			t.Errorf("%s: no error", url)
		}
	}
}

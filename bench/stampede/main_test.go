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

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
	if os.Getenv(workerEnv) != "" {
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
	redistest.Must(t, run(plan{2, 4, 10 * time.Millisecond}, svg, &out))
	picture, err := os.ReadFile(svg)
	redistest.Must(t, err)
	for _, c := range contenders {
		if strings.Count(out.String(), c.name) != 2 || !bytes.Contains(picture, []byte(`class="bar `+c.color)) {
			t.Errorf("%s is missing in the picture or in\n%s", c.name, &out)
		}
	}
	d := xml.NewDecoder(bytes.NewReader(picture))
	for err == nil {
		_, err = d.Token()
	}
	if !errors.Is(err, io.EOF) {
		t.Errorf("the picture is not well-formed: %v", err)
	}
}

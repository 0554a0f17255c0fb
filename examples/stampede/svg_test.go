package main

import (
	"encoding/xml"
	"errors"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// known returns a run whose picture is known.
func known() (plan, []recording) {
	p := plan{Processes: 2, Goroutines: 10, Keys: 1, Load: 100 * ms, command: "go run <this> & that"}.timed()
	began := time.Unix(1_700_000_000, 0)
	var runs []recording
	for i, loads := range []int{20, 2, 1} {
		r := recording{Contender: contenders[i].name, Load: p.Load, Ended: began.Add(2 * time.Second)}
		r.Began = [phases]time.Time{began, began.Add(200 * ms)}
		for phase := range phases {
			for n := range 1000 {
				took := 200 * time.Microsecond
				if n < 50*loads {
					took = 100 * ms
				}
				r.call(phase, took, nil)
			}
			r.Commands[phase] = 1000 * (phase + i + 1)
			for n := range loads {
				at := time.Duration(phase) * time.Second
				r.Loads = append(r.Loads, load{Process: n % 2, Goroutine: n / 2, Key: "key 1", Phase: phase, Began: at, Ended: at + 100*ms})
			}
		}
		runs = append(runs, r)
	}
	return p, runs
}

// An element is an XML element of a picture.
type element struct {
	name, class, text string
	attr              map[string]string
}

// elementsOf fails the test unless the picture is well-formed.
func elementsOf(t *testing.T, picture []byte) (found []element) {
	t.Helper()
	d := xml.NewDecoder(strings.NewReader(string(picture)))
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return found
		}
		if err != nil {
			t.Fatalf("not well-formed: %v", err)
		}
		switch token := token.(type) {
		case xml.StartElement:
			e := element{name: token.Name.Local, attr: make(map[string]string)}
			for _, a := range token.Attr {
				e.attr[a.Name.Local] = a.Value
			}
			e.class = e.attr["class"]
			found = append(found, e)
		case xml.CharData:
			if len(found) > 0 {
				found[len(found)-1].text += strings.TrimSpace(string(token))
			}
		}
	}
}

func texts(elements []element) (texts []string) {
	for _, e := range elements {
		if e.name == "text" {
			texts = append(texts, e.text)
		}
	}
	return texts
}

func TestDrawing_Content(t *testing.T) {
	t.Parallel()
	p, runs := known()
	elements := elementsOf(t, drawing(p, "some Redis", runs))
	got := texts(elements)
	for _, want := range []string{
		"One stampede, three ways: 2 processes of 10 goroutines, 1 key",
		"A load takes 100 ms, a value lives 1.5 s. First all goroutines ask at once, then each about every 100 ms.",
		"Loads over time", "cold", "expiring", "0 s", "1 s",
		"no protection", "singleflight alone", "singlefill",
		"40 loads", "4 loads", "2 loads", "2,000 calls waited", "200 calls waited", "100 calls waited",
		"20", "2", "1", // the loads of a refill
		"Latency, expiring", "percentile of the calls", "100 µs", "1 ms", "10 ms", "100 ms", "50", "90", "99", "99.9",
		"Redis commands per call", "1.00", "2.00", "3.00", "4.00",
		"Made by go run <this> & that",
	} {
		if !slices.Contains(got, want) {
			t.Errorf("no text %q", want)
		}
	}
	for _, c := range contenders {
		lines := 0
		for _, e := range elements {
			if e.name == "path" && e.class == "line "+c.class {
				lines++
			}
		}
		if lines != 2 {
			t.Errorf("%s: %d lines, not one for its latency and one in the legend", c.name, lines)
		}
	}
	if t.Failed() {
		t.Logf("%q", got)
	}
}

func TestDrawing_Edges(t *testing.T) {
	t.Parallel()
	p, runs := known()
	for _, e := range elementsOf(t, drawing(p, "some Redis", runs)) {
		if e.name != "text" {
			continue
		}
		x, errX := strconv.ParseFloat(e.attr["x"], 64)
		y, errY := strconv.ParseFloat(e.attr["y"], 64)
		if errX != nil || errY != nil {
			t.Fatalf("%q is at %q, %q", e.text, e.attr["x"], e.attr["y"])
		}
		wide := 7.2 * float64(len([]rune(e.text))) // wider than most letters
		switch e.attr["text-anchor"] {
		case "middle":
			x -= wide / 2
		case "end":
			x -= wide
		}
		if e.class != "title" && (x < 0 || x+wide > width) || y < 12 || y > height-4 {
			t.Errorf("%q is at %v, %v", e.text, x, y)
		}
	}
}

func TestDrawing_Empty(t *testing.T) {
	t.Parallel()
	p, runs := known()
	for i := range runs {
		runs[i].report = report{}
	}
	picture := drawing(p, "some Redis", runs)
	elementsOf(t, picture)
	for _, wrong := range []string{"NaN", "Inf"} {
		if strings.Contains(string(picture), wrong) {
			t.Errorf("it has %s", wrong)
		}
	}
}

func TestBarsOf(t *testing.T) {
	t.Parallel()
	loads := []load{{Process: 1, Began: 5, Ended: 8}, {Began: 4, Ended: 6}, {Began: 0, Ended: 3}, {Began: 2, Ended: 4}, {Began: 7, Ended: 9}}
	got := barsOf(loads, func(l load) float64 { return float64(l.Process) })
	if want := []bar{{0, 0, 6}, {0, 7, 9}, {1, 5, 8}}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

func TestLabelsOf(t *testing.T) {
	t.Parallel()
	got := labelsOf([]refill{{began: 0, ended: 20, loads: 5}, {began: 20, ended: 30, loads: 2}, {began: 90, ended: 110, loads: 1},
		{began: 120, ended: 130, loads: 400}, {began: 155, ended: 165, loads: 300}, {began: 195, ended: 205, loads: 1}, {began: 220, ended: 230, loads: 1}},
		func(d time.Duration) float64 { return float64(d) })
	if want := []label{{10, 7}, {100, 401}, {160, 300}, {200, 1}, {225, 1}}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

func TestSteps(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		most  float64
		about int
		step  string
		n     int
	}{{5.8, 8, "1", 7}, {2.3, 5, "0.5", 6}, {1, 5, "0.2", 6}, {0.1, 5, "0.02", 6}, {70, 8, "10", 8}, {1.3, 8, "0.2", 8}} {
		got := steps(c.most, c.about)
		if len(got) != c.n || strconv.FormatFloat(got[1], 'g', 6, 64) != c.step || got[0] != 0 || got[len(got)-1] < c.most {
			t.Errorf("to %v: %v; want %d of %s", c.most, got, c.n, c.step)
		}
	}
}

// The README shows the picture in docs, which was made with the default flags.
func TestDrawing_PictureInDocs(t *testing.T) {
	t.Parallel()
	picture, err := os.ReadFile("../../docs/stampede.svg")
	if err != nil {
		t.Fatal(err)
	}
	got := texts(elementsOf(t, picture))
	p, runs := known()
	own := texts(elementsOf(t, drawing(p, "some Redis", runs)))
	for _, text := range slices.Concat(own, got) {
		if strings.ContainsAny(text, "0123456789<") || strings.HasPrefix(text, "Made by ") { // measured figures, and the machine
			continue
		}
		if slices.Contains(own, text) != slices.Contains(got, text) {
			t.Errorf("%q is in one of the two: make it again", text)
		}
	}
	for _, want := range []string{"One stampede, three ways: 8 processes of 50 goroutines, 1 key", "Made by go run ./examples/stampede"} {
		if !slices.Contains(got, want) {
			t.Errorf("it has no %q", want)
		}
	}
}

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestPage_Numbers(t *testing.T) {
	t.Parallel()
	for got, want := range map[string]string{
		thousands(0): "0", thousands(999): "999", thousands(1000): "1,000", thousands(1234567): "1,234,567",
		rounded(8): "8", rounded(7.96): "8", rounded(351.666): "351.7",
		short(0): "0.0 µs", short(1234): "1.2 µs", short(99 * time.Microsecond): "99 µs", short(999999): "1.0 ms",
		short(9960 * time.Microsecond): "10 ms", short(101 * ms): "101 ms", short(999600 * time.Microsecond): "1.0 s", short(12 * time.Second): "12 s",
		tidy(100 * ms): "100 ms", tidy(1500 * ms): "1.5 s", tidy(time.Second): "1 s",
		count(1, "key", "keys"): "1 key", count(1000, "key", "keys"): "1,000 keys",
		times(1): "once", times(1.04): "1.04 times", times(0): "0 times", times(7.66): "7.7 times",
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestPage_Table(t *testing.T) {
	t.Parallel()
	_, runs := known()
	text := written(t, func(p *page) { p.writeTable(runs) })
	var lines []string
	for line := range strings.Lines(text) {
		lines = append(lines, strings.Join(strings.Fields(line), " "))
	}
	text = strings.Join(lines, "\n")
	for _, want := range []string{
		"no protection 1,000 20 20 20 100 ms 100 ms 100 ms 1,000 1.00 0",
		"no protection 1,000 20 20 20 100 ms 100 ms 100 ms 2,000 2.00 0",
		"singleflight alone 1,000 2 2 2 200 µs 100 ms 100 ms 2,000 2.00 0",
		"singlefill 1,000 1 1 1 200 µs 100 ms 100 ms 3,000 3.00 0",
		"A cold key was loaded 20 times with no protection, 2 times with singleflight alone, once with singlefill.",
		"the number of calls that took half a load or longer was 1,000 with no protection, 100 with singleflight alone, 50 with singlefill.",
		"All 6,000 answers were right.",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no line %q", want)
		}
	}
	runs[1].Errors[expiring], runs[1].FirstError = 3, "connection refused"
	text = written(t, func(p *page) { p.writeTable(runs) })
	for _, want := range []string{"Of 6,000 calls 3 failed.", "The first error with singleflight alone: connection refused"} {
		if !strings.Contains(text, want) {
			t.Errorf("no line %q", want)
		}
	}
	if t.Failed() {
		t.Logf("\n%s", text)
	}
}

// written returns what write writes to a page. The page is not a terminal unless write makes it
// one.
func written(t *testing.T, write func(p *page)) string {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	write(newPage(f))
	text, err := os.ReadFile(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestProgress_Terminal(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ terminal, colours bool }{{false, false}, {true, false}, {true, true}} {
		text := written(t, func(p *page) {
			p.terminal, p.colours = c.terminal, c.colours
			s := p.progress(2, plan{Load: ms, Expiring: ms})
			s.begin(cold, time.Now())
			s.drawn = time.Time{}
			s.update(1, message{Calls: 700, Loads: 1})
			s.drawn = time.Time{}
			s.update(2, message{Calls: 800, Loads: 0})
			s.end()
		})
		last := text[strings.LastIndexByte(strings.TrimSuffix(text, "\n"), '\r')+1:]
		if !strings.Contains(last, "1,500 calls") || !strings.Contains(last, "1 loads") || !strings.HasSuffix(last, "s\n") {
			t.Errorf("%+v: what stays is %q", c, last)
		}
		if got := strings.Contains(text, "\r"); got != c.terminal {
			t.Errorf("%+v: %q", c, text)
		}
		if got := strings.Contains(text, "█"); got != c.terminal {
			t.Errorf("%+v: a bar: %v", c, got)
		}
		if got := strings.Contains(text, "\x1b[36m"); got != c.colours {
			t.Errorf("%+v: colours: %v", c, got)
		}
		for part := range strings.SplitSeq(strings.TrimSuffix(text, "\n"), "\r") {
			for _, code := range []string{"\x1b[K", "\x1b[0m", "\x1b[36m"} {
				part = strings.ReplaceAll(part, code, "")
			}
			if n := len([]rune(part)); n > 79 {
				t.Errorf("%+v: a line of %d characters: %q", c, n, part)
			}
		}
	}
}

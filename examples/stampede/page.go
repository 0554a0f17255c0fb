package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// A page shows the run. On a terminal it uses colours and a line that changes, elsewhere neither.
type page struct {
	out      *os.File
	terminal bool // the line can change
	colours  bool
}

func newPage(out *os.File) *page {
	info, err := out.Stat()
	terminal := err == nil && info.Mode()&os.ModeCharDevice != 0 && os.Getenv("TERM") != "dumb"
	return &page{out, terminal, terminal && os.Getenv("NO_COLOR") == ""}
}

func (p *page) in(color, text string) string {
	if !p.colours {
		return text
	}
	return "\x1b[" + color + "m" + text + "\x1b[0m"
}

const bold = "1"

func thousands(n int) string {
	text := strconv.Itoa(n)
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}

// rounded returns v with one decimal, or none if that is 0.
func rounded(v float64) string {
	return strings.TrimSuffix(strconv.FormatFloat(v, 'f', 1, 64), ".0")
}

// short returns d with two or three digits.
func short(d time.Duration) string {
	v, unit := float64(d)/1e3, "µs"
	switch {
	case d >= time.Second-time.Millisecond/2:
		v, unit = d.Seconds(), "s"
	case d >= time.Millisecond-time.Microsecond/2:
		v, unit = float64(d)/1e6, "ms"
	}
	decimals := 0
	if v < 9.95 {
		decimals = 1
	}
	return fmt.Sprintf("%.*f %s", decimals, v, unit)
}

// tidy returns short(d) without a decimal that is 0.
func tidy(d time.Duration) string { return strings.Replace(short(d), ".0 ", " ", 1) }

package main

import (
	"bytes"
	"fmt"
	"html"
	"runtime"
	"strings"
	"time"
)

// style has the colours of the other pictures in docs, on light and on dark pages.
const style = `<style>
text { font: 12px system-ui, sans-serif; fill: #1f2328 }
.title { font-size: 17px; font-weight: 600 } .name { font-size: 13px; font-weight: 600; fill: currentColor }
.muted { fill: #59636e } .paper { fill: #ffffff } .strip { fill: #f6f8fa } .bar { fill: currentColor }
.c0 { color: #0969da } .c1 { color: #bc4c00 } .c3 { color: #8250df } @media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .muted { fill: #9198a1 } .paper { fill: #0d1117 } .strip { fill: #151b23 }
.c0 { color: #58a6ff } .c1 { color: #f0883e } .c3 { color: #bc8cff } }
</style>
`

// Sizes of the picture, in pixels. It is as wide as GitHub shows it.
const (
	width, margin = 830, 18
	left, top     = 230, 82 // of the first strip
	strip, gap    = 104, 14
)

// drawing returns the picture of a run: a strip for each contender, with a bar for each load.
func drawing(p plan, results []result) []byte {
	end := (p.pause() + p.expiring() + 2*p.Load).Seconds()
	x := func(at time.Duration) float64 { return left + at.Seconds()/end*(width-margin-left) }
	height := top + len(results)*(strip+gap) + 54

	var b bytes.Buffer
	text := func(x, y int, class, format string, args ...any) {
		fmt.Fprintf(&b, "<text x=\"%d\" y=\"%d\" class=\"%s\">%s</text>\n", x, y, class, html.EscapeString(fmt.Sprintf(format, args...)))
	}
	rect := func(class string, x, y, width, height float64) {
		fmt.Fprintf(&b, "<rect class=\"%s\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\"/>\n", class, x, y, width, height)
	}
	fmt.Fprintf(&b, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%[1]d\" height=\"%[2]d\" role=\"img\">\n", width, height)
	fmt.Fprintf(&b, "<title>One stampede, three ways</title>\n%s", style)
	rect("paper", 0, 0, width, float64(height))
	text(margin, 30, "title", "One stampede, three ways")
	text(margin, 50, "muted", "%d processes of %d goroutines. A load takes %v, a value lives %v. First all ask at once, then again and again.",
		p.Processes, p.Goroutines, p.Load, p.ttl())
	text(left, top-8, "muted", "each bar is a load, in the row of its process")
	for i, r := range results {
		y, row := top+i*(strip+gap), float64(strip)/float64(p.Processes)
		rect("strip", left, float64(y), width-margin-left, strip)
		text(margin, y+14, "name "+contenders[i].color, "%s", contenders[i].name)
		for phase := range r {
			for line, said := range strings.SplitN(r[phase].said(phase), ", ", 2) {
				text(margin, y+33+36*phase+15*line, []string{"", "muted"}[line], "%s", said)
			}
			for _, l := range r[phase].Loads {
				rect("bar "+contenders[i].color, x(l.Began), float64(y)+row*(float64(l.Process)+0.1), x(l.Ended)-x(l.Began), 0.8*row)
			}
		}
	}
	text(left, height-44, "muted", "0 s to %.1f s", end)
	text(margin, height-14, "muted", "Made by go -C bench run ./stampede, %s on %s/%s, %d CPUs",
		runtime.Version(), runtime.GOOS, runtime.GOARCH, runtime.NumCPU())
	b.WriteString("</svg>\n")
	return b.Bytes()
}

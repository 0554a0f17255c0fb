package main

import (
	"bytes"
	"fmt"
	"html"
	"runtime"
	"time"
)

// style has the colours of the other pictures in docs, on light and on dark pages.
const style = `<style>
text { font: 12px system-ui, sans-serif; fill: #1f2328 }
.title { font-size: 17px; font-weight: 600 }
.name { font-size: 13px; font-weight: 600; fill: currentColor }
.muted { fill: #59636e }
.paper { fill: #ffffff }
.strip { fill: #f6f8fa }
.bar { fill: currentColor }
.c0 { color: #0969da } .c1 { color: #bc4c00 } .c3 { color: #8250df }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.muted { fill: #9198a1 }
.paper { fill: #0d1117 }
.strip { fill: #151b23 }
.c0 { color: #58a6ff } .c1 { color: #f0883e } .c3 { color: #bc8cff }
}
</style>
`

// Sizes of the picture, in pixels. It is as wide as GitHub shows it.
const (
	width, margin = 830, 18
	left, top     = 230, 82 // of the first strip
	strip, gap    = 104, 14
)

// drawing returns the picture of a run: a strip for each contender, with a bar for each load.
func drawing(p plan, where string, results []result) []byte {
	end := time.Duration(1)
	for _, r := range results {
		for _, phase := range r {
			for _, l := range phase.Loads {
				end = max(end, l.Ended)
			}
		}
	}
	x := func(at time.Duration) float64 { return left + float64(at)/float64(end)*(width-margin-left) }
	height := top + len(results)*(strip+gap) + 54

	var b bytes.Buffer
	text := func(x float64, y int, class, format string, args ...any) {
		fmt.Fprintf(&b, `<text x="%.1f" y="%d" class="%s">%s</text>`+"\n",
			x, y, class, html.EscapeString(fmt.Sprintf(format, args...)))
	}
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img">`+"\n",
		width, height, width, height)
	fmt.Fprintf(&b, "<title>One stampede, three ways</title>\n%s", style)
	fmt.Fprintf(&b, `<rect class="paper" width="%d" height="%d"/>`+"\n", width, height)
	text(margin, 30, "title", "One stampede, three ways")
	text(margin, 50, "muted", "%s. First all ask at once, then again and again.", p)
	text(left, top-8, "muted", "each bar is a load, in the row of its process")
	for i, r := range results {
		y := top + i*(strip+gap)
		row := float64(strip) / float64(p.Processes)
		fmt.Fprintf(&b, `<rect class="strip" x="%d" y="%d" width="%d" height="%d"/>`+"\n", left, y, width-margin-left, strip)
		text(margin, y+14, "name "+contenders[i].color, "%s", contenders[i].name)
		for phase, name := range []string{"cold", "expiring"} {
			text(margin, y+33+36*phase, "", "%s: loads %d, p99 %v",
				name, len(r[phase].Loads), r[phase].percentile(99).Round(100*time.Microsecond))
			text(margin, y+48+36*phase, "muted", "%.2f Redis commands per call", r[phase].perCall())
			for _, l := range r[phase].Loads {
				fmt.Fprintf(&b, `<rect class="bar %s" x="%.1f" y="%.1f" width="%.1f" height="%.1f"/>`+"\n", contenders[i].color,
					x(l.Began), float64(y)+row*(float64(l.Process)+0.1), max(x(l.Ended)-x(l.Began), 1), 0.8*row)
			}
		}
	}
	text(left, height-44, "muted", "0 s")
	fmt.Fprintf(&b, `<text x="%d" y="%d" class="muted" text-anchor="end">%.1f s</text>`+"\n",
		width-margin, height-44, end.Seconds())
	text(margin, height-14, "muted", "Made by go -C bench run ./stampede with %s, %s on %s/%s, %d CPUs",
		where, runtime.Version(), runtime.GOOS, runtime.GOARCH, runtime.NumCPU())
	b.WriteString("</svg>\n")
	return b.Bytes()
}

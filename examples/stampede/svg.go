package main

import (
	"bytes"
	"fmt"
	"html"
	"math"
	"runtime"
	"strings"
)

// style has the colours of the other pictures in docs, on light and on dark pages.
const style = `<style>
text { font: 12px system-ui, sans-serif; fill: #1f2328 }
.title { font-size: 17px; font-weight: 600 }
.head { font-size: 13px; font-weight: 600 }
.name { font-size: 13px; font-weight: 600; fill: currentColor }
.number { font-weight: 600; fill: currentColor }
.small { font-size: 11px }
.muted { fill: #59636e }
.paper { fill: #ffffff }
.strip { fill: #f6f8fa }
.grid { stroke: #d8dee4 }
.phase { stroke: #59636e; stroke-dasharray: 2 3 }
.line { fill: none; stroke: currentColor; stroke-width: 2; stroke-linejoin: round }
.line.c3 { stroke-dasharray: 7 4 }
.bar { fill: currentColor }
.c0 { color: #0969da } .c1 { color: #bc4c00 } .c3 { color: #8250df }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.muted { fill: #9198a1 }
.paper { fill: #0d1117 }
.strip { fill: #151b23 }
.grid { stroke: #30363d }
.phase { stroke: #9198a1 }
.c0 { color: #58a6ff } .c1 { color: #f0883e } .c3 { color: #bc8cff }
}
</style>
`

// The picture is as wide as GitHub shows it.
const (
	width, height = 830, 758
	margin        = 18.0
	right         = width - margin
)

// drawing returns the picture of a run: loads over time, latencies, Redis commands.
func drawing(p plan, kind string, runs []recording) []byte {
	title := fmt.Sprintf("One stampede, three ways: %s of %s, %s",
		count(p.Processes, "process", "processes"), count(p.Goroutines, "goroutine", "goroutines"), count(p.Keys, "key", "keys"))
	where := fmt.Sprintf("%s, %s on %s/%s, %s", kind, runtime.Version(), runtime.GOOS, runtime.GOARCH, count(runtime.NumCPU(), "CPU", "CPUs"))
	d := new(svg)
	fmt.Fprintf(d, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img">`+"\n", width, height, width, height)
	fmt.Fprintf(d, "<title>%s</title>\n<desc>Made by %s with %s. %s</desc>\n%s", html.EscapeString(title), html.EscapeString(p.command), html.EscapeString(where),
		html.EscapeString(strings.Join(statements(runs), " ")), style)
	fmt.Fprintf(d, `<rect class="paper" width="%d" height="%d"/>`+"\n", width, height)
	d.text(margin, 30, "title", "", title)
	d.text(margin, 50, "muted", "", fmt.Sprintf("A load takes %s, a value lives %s. First all goroutines ask at once, then each about every %s.",
		tidy(p.Load), tidy(p.TTL), tidy(p.Pause)))

	d.loads(frame{160, 122, right, 200}, p, runs)
	d.latencies(frame{70, 500, 440, 640}, runs)
	d.commands(frame{510, 500, right, 640}, runs)
	d.legend(702, runs)
	d.text(margin, height-30, "muted", "", "Made by "+p.command)
	d.text(margin, height-13, "muted", "", "with "+where)
	d.WriteString("</svg>\n")
	return d.Bytes()
}

// An svg is a picture that is being drawn.
type svg struct{ bytes.Buffer }

// text writes a line of text with its anchor at x. The default anchor is start.
func (d *svg) text(x, y float64, class, anchor, s string) {
	if anchor != "" {
		anchor = fmt.Sprintf(` text-anchor="%s"`, anchor)
	}
	fmt.Fprintf(d, `<text x="%s" y="%s" class="%s"%s>%s</text>`+"\n", px(x), px(y), class, anchor, html.EscapeString(s))
}

func (d *svg) path(class, path string) {
	fmt.Fprintf(d, `<path class="%s" d="%s"/>`+"\n", class, path)
}

// px formats a length to a tenth of a pixel.
func px(v float64) string { return rounded(math.Round(v*10) / 10) }

// A frame is the part of the picture between the axes of a panel.
type frame struct{ left, top, right, bottom float64 }

func (f frame) width() float64  { return f.right - f.left }
func (f frame) height() float64 { return f.bottom - f.top }

// x and y return the coordinate of a share of the width and of the height.
func (f frame) x(share float64) float64 { return f.left + share*f.width() }
func (f frame) y(share float64) float64 { return f.bottom - share*f.height() }

// steps returns round numbers from zero to at least most. The parameter about limits the number of
// steps.
func steps(most float64, about int) (ticks []float64) {
	step := math.Pow(10, math.Ceil(math.Log10(most/float64(about))))
	for _, finer := range []float64{5, 2} {
		if step/finer*float64(about) >= most {
			step /= finer
			break
		}
	}
	for i := 0; ; i++ {
		ticks = append(ticks, float64(i)*step)
		if float64(i)*step >= most {
			return ticks
		}
	}
}

// legend names the contender of each line and each bar.
func (d *svg) legend(y float64, runs []recording) {
	x := margin
	for i, r := range runs {
		d.path("line "+contenders[i].class, fmt.Sprintf("M%s %sh28", px(x), px(y-4)))
		d.path("bar "+contenders[i].class, fmt.Sprintf("M%s %sh10v10h-10z", px(x+34), px(y-9)))
		d.text(x+50, y, "", "", r.Contender)
		x += 70 + 6.5*float64(len(r.Contender))
	}
}

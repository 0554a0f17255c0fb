// Package chart draws the charts of docs as SVG. It is used by scripts/bench.
package chart

import (
	"bytes"
	"fmt"
	"html"
	"math"
)

// A Chart is lines over two axes, which are logarithmic unless Linear is set. The outermost ticks
// are its frame.
type Chart struct {
	Title, X, Y    string
	XTicks, YTicks []float64
	Series         []Series
	Linear         bool
}

// A Series is one line.
type Series struct {
	Name   string
	Points [][2]float64
	Color  int // 0 to 3; -1: a limit
	Dashed bool
}

// Fit sets the ticks of a linear chart: round numbers from zero to the largest value of its series.
func (c *Chart) Fit() {
	var most [2]float64
	for _, s := range c.Series {
		for _, p := range s.Points {
			most[0], most[1] = max(most[0], p[0]), max(most[1], p[1])
		}
	}
	for i, ticks := range []*[]float64{&c.XTicks, &c.YTicks} {
		step := math.Pow(10, math.Floor(math.Log10(most[i])))
		for _, finer := range []float64{2, 2.5} {
			if most[i]/step < 4 {
				step /= finer
			}
		}
		for v := 0.0; ; v += step {
			*ticks = append(*ticks, v)
			if v >= most[i] {
				break
			}
		}
	}
}

// Pages are light or dark, and prefers-color-scheme says which.
const style = `<style>
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.title { font-size: 16px; font-weight: 600 }
.paper { fill: #ffffff }
.grid { stroke: #d8dee4 }
.line { fill: none; stroke-width: 2; stroke-linejoin: round }
.dashed { stroke-dasharray: 7 4 }
.limit { stroke: #1f2328; stroke-dasharray: 1 3 }
.c0 { stroke: #0969da } .c1 { stroke: #bc4c00 } .c2 { stroke: #1a7f37 } .c3 { stroke: #8250df }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.paper { fill: #0d1117 }
.grid { stroke: #30363d }
.limit { stroke: #e6edf3 }
.c0 { stroke: #58a6ff } .c1 { stroke: #f0883e } .c2 { stroke: #3fb950 } .c3 { stroke: #bc8cff }
}
</style>
`

const (
	width, height            = 820, 420
	left, right, top, bottom = 80.0, 620.0, 50.0, 360.0
)

// SVG draws the chart.
func (c Chart) SVG() []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img" aria-label="%s">`+"\n%s",
		width, height, width, height, html.EscapeString(c.Title), style)
	fmt.Fprintf(&b, `<rect class="paper" width="%d" height="%d"/>`+"\n", width, height)
	text := func(x, y float64, attr, s string) {
		fmt.Fprintf(&b, `<text x="%.1f" y="%.1f" %s>%s</text>`+"\n", x, y, attr, html.EscapeString(s))
	}
	text(left, 28, `class="title"`, c.Title)
	text((left+right)/2, bottom+42, `text-anchor="middle"`, c.X)
	text(0, 0, fmt.Sprintf(`text-anchor="middle" transform="translate(20 %.1f) rotate(-90)"`, (top+bottom)/2), c.Y)
	for _, v := range c.XTicks {
		x := c.at(v, c.XTicks, left, right)
		fmt.Fprintf(&b, `<path class="grid" d="M%.1f %.1fV%.1f"/>`+"\n", x, top, bottom)
		text(x, bottom+20, `text-anchor="middle"`, Thousands(int(v)))
	}
	for _, v := range c.YTicks {
		y := c.at(v, c.YTicks, bottom, top)
		fmt.Fprintf(&b, `<path class="grid" d="M%.1f %.1fH%.1f"/>`+"\n", left, y, right)
		text(left-8, y+4, `text-anchor="end"`, Thousands(int(v)))
	}
	for i, s := range c.Series {
		class := fmt.Sprintf("line c%d", s.Color)
		if s.Color < 0 {
			class = "line limit"
		} else if s.Dashed {
			class += " dashed"
		}
		fmt.Fprintf(&b, `<path class="%s" d="`, class)
		for j, p := range s.Points {
			fmt.Fprintf(&b, "%c%.1f %.1f", "ML"[min(j, 1)], c.at(p[0], c.XTicks, left, right), c.at(p[1], c.YTicks, bottom, top))
		}
		b.WriteString("\"/>\n")
		y := top + 10 + 24*float64(i)
		fmt.Fprintf(&b, `<path class="%s" d="M%.1f %.1fh32"/>`+"\n", class, right+20, y)
		text(right+60, y+4, "", s.Name)
	}
	b.WriteString("</svg>\n")
	return b.Bytes()
}

// at maps a value to its coordinate on the axis with these ticks, which reaches from from to to.
func (c Chart) at(v float64, ticks []float64, from, to float64) float64 {
	scale := math.Log
	if c.Linear {
		scale = func(v float64) float64 { return v }
	}
	low, high := scale(ticks[0]), scale(ticks[len(ticks)-1])
	part := (scale(max(v, ticks[0])) - low) / (high - low)
	return from + min(part, 1)*(to-from)
}

// Thousands writes a number with a comma for each three digits.
func Thousands(n int) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

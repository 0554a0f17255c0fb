package main

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/singlefill/singlefill/bench"
)

// Sizes of the plot, in pixels.
const (
	panelWidth, panelHeight = 230, 150
	left, top, gap          = 46, 34, 26
)

// style has colours that also differ in brightness, for light and dark pages.
const style = `text{font:11px system-ui,sans-serif;fill:#24292f}.axis{stroke:#8c959f;fill:none}
.floor{stroke:#8c959f;fill:none;stroke-width:2;stroke-dasharray:4 3}
.singlefill{stroke:#0969da;fill:none;stroke-width:2}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.singlefill{stroke:#58a6ff}}`

// growth plots the time of one operation over the number of goroutines, keys and processes. It
// returns "" if they were not measured.
func growth(all results) string {
	var panels []string
	for _, r := range all.rows {
		if r.part == "Growth" && !strings.Contains(strings.Join(panels, "\n"), r.table) {
			panels = append(panels, r.table)
		}
	}
	if len(panels) == 0 {
		return ""
	}
	var b strings.Builder
	width, height := len(panels)*(panelWidth+left+gap), top+panelHeight+40
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" role="img">`, width, height)
	fmt.Fprintf(&b, "<title>Time of one hit over the number of %s</title>\n", strings.Join(panels, ", "))
	fmt.Fprintf(&b, "<style>%s</style>\n", style)
	for i, table := range panels {
		fmt.Fprintf(&b, `<g transform="translate(%d %d)">`+"\n", left+i*(panelWidth+left+gap), top)
		writePanel(&b, all, table)
		fmt.Fprint(&b, "</g>\n")
	}
	fmt.Fprint(&b, "</svg>\n")
	return b.String()
}

type point struct{ x, y float64 }

func writePanel(b *strings.Builder, all results, table string) {
	lines := make(map[string][]point)
	most := point{10, 1}
	for _, r := range all.rows {
		if r.part != "Growth" || r.table != table {
			continue
		}
		n, err := strconv.ParseFloat(r.scenario, 64)
		if err != nil {
			continue
		}
		p := point{n, bench.Median(r.values["ns/op"]) / 1e3}
		lines[r.contender] = append(lines[r.contender], p)
		most = point{max(most.x, p.x), max(most.y, p.y)}
	}
	step := math.Pow(10, math.Floor(math.Log10(most.y)))
	if most.y/step < 3 {
		step /= 2
	}
	highest := math.Ceil(most.y/step) * step
	place := func(p point) (x, y float64) {
		return math.Log(p.x) / math.Log(most.x) * panelWidth, panelHeight * (1 - p.y/highest)
	}

	fmt.Fprintf(b, `<path class="axis" d="M0 0V%dH%d"/>`+"\n", panelHeight, panelWidth)
	for y := 0.0; y <= highest; y += step {
		_, at := place(point{1, y})
		fmt.Fprintf(b, `<text x="-6" y="%.0f" text-anchor="end">%g</text>`+"\n", at+4, y)
	}
	for _, p := range lines["floor"] {
		x, _ := place(p)
		fmt.Fprintf(b, `<text x="%.0f" y="%d" text-anchor="middle">%s</text>`+"\n", x, panelHeight+16, thousands(p.x))
	}
	fmt.Fprintf(b, `<text x="0" y="-14">µs per hit</text><text x="%d" y="%d" text-anchor="middle">%s</text>`+"\n",
		panelWidth/2, panelHeight+32, table)
	for i, name := range []string{"floor", "singlefill"} {
		var d strings.Builder
		for j, p := range lines[name] {
			x, y := place(p)
			fmt.Fprintf(&d, "%c%.1f %.1f", "ML"[min(j, 1)], x, y)
		}
		fmt.Fprintf(b, `<path class="%s" d="%s"/>`+"\n", name, d.String())
		key := 80 + i*75
		fmt.Fprintf(b, `<path class="%s" d="M%d -18h18"/><text x="%d" y="-14">%s</text>`+"\n", name, key, key+22, name)
	}
}

func thousands(v float64) string {
	if v >= 1000 {
		return strconv.FormatFloat(v/1000, 'f', -1, 64) + "k"
	}
	return strconv.FormatFloat(v, 'f', -1, 64)
}

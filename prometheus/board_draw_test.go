package prometheus_test

import (
	"bytes"
	"fmt"
	"html"
	"maps"
	"math"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Sizes of a picture of the dashboard, in pixels.
const (
	column = 40 // of the grid, which has 24
	row    = 26
	margin = 12 // around a plot
)

var colours = []string{"#3b7dd8", "#d8843b", "#3fa35b", "#b04fc0", "#c9404a", "#7a7f87", "#a08a1c", "#23a5a5"}

// picture draws what the dashboard shows from one time to another.
func (s *server) picture(board []panel, from, to time.Time) ([]byte, error) {
	var b bytes.Buffer
	bottom := 0
	for _, p := range board {
		bottom = max(bottom, p.GridPos.Y+p.GridPos.H)
	}
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="10">`+"\n", 24*column, bottom*row)
	fmt.Fprintf(&b, `<rect width="100%%" height="100%%" fill="#f4f5f5"/>`+"\n")
	for _, p := range board {
		if err := s.drawPanel(&b, p, from, to); err != nil {
			return nil, err
		}
	}
	b.WriteString("</svg>\n")
	return b.Bytes(), nil
}

func (s *server) drawPanel(b *bytes.Buffer, p panel, from, to time.Time) error {
	series := make(map[string][]point)
	for _, target := range p.Targets {
		found, err := s.ask("/api/v1/query_range", url.Values{
			"query": {filled.Replace(target.Expr)}, "start": {stamp(from)}, "end": {stamp(to)}, "step": {"0.5"},
		}, target.LegendFormat)
		if err != nil {
			return err
		}
		for name, points := range found {
			if !strings.HasSuffix(name, "/s") || p.FieldConfig.Defaults.Unit == "ops" { // otherwise it has another axis
				series[name] = points
			}
		}
	}
	top := 0.
	for _, points := range series {
		for _, p := range points {
			if !math.IsNaN(p.v) && !math.IsInf(p.v, 0) {
				top = max(top, p.v)
			}
		}
	}
	if top == 0 || p.FieldConfig.Defaults.Unit == "percentunit" {
		top = 1
	}
	x, y, w, h := p.GridPos.X*column, p.GridPos.Y*row, p.GridPos.W*column, p.GridPos.H*row
	fmt.Fprintf(b, `<g transform="translate(%d %d)"><rect x="2" y="2" width="%d" height="%d" fill="#fff" stroke="#dcdde0"/>`+"\n", x, y, w-4, h-4)
	fmt.Fprintf(b, `<text x="8" y="16" font-size="11" font-weight="bold">%s</text>`+"\n", html.EscapeString(p.Title))
	fmt.Fprintf(b, `<text x="6" y="32" fill="#777">%s</text>`+"\n", quantity(top, p.FieldConfig.Defaults.Unit))
	plotW, plotH := float64(w-2*margin), float64(h-38-2*margin-16)
	fmt.Fprintf(b, `<path d="M%d 38v%gh%g" fill="none" stroke="#bbb"/>`+"\n", margin, plotH, plotW)
	legendX, legendY := 8, h-24
	for i, name := range slices.Sorted(maps.Keys(series)) {
		colour := colours[i%len(colours)]
		var path strings.Builder
		pen := "M"
		for _, p := range series[name] {
			if math.IsNaN(p.v) || math.IsInf(p.v, 0) {
				pen = "M"
				continue
			}
			fmt.Fprintf(&path, "%s%.1f %.1f", pen, margin+plotW*float64(p.at.Sub(from))/float64(to.Sub(from)), 38+plotH*(1-p.v/top))
			pen = "L"
		}
		fmt.Fprintf(b, `<path d="%s" fill="none" stroke="%s"/>`+"\n", path.String(), colour)
		width := 12 + 5*len(name)
		if legendX > 8 && legendX+width > w {
			legendX, legendY = 8, legendY+12
		}
		if legendY > h-8 {
			continue
		}
		fmt.Fprintf(b, `<text x="%d" y="%d" fill="%s">%s</text>`+"\n", legendX, legendY, colour, html.EscapeString(name))
		legendX += width
	}
	b.WriteString("</g>\n")
	return nil
}

func stamp(t time.Time) string { return strconv.FormatFloat(float64(t.UnixMilli())/1000, 'f', 3, 64) }

func quantity(v float64, unit string) string {
	switch {
	case unit == "percentunit":
		return fmt.Sprintf("%.0f %%", 100*v)
	case unit == "s" && v < 1:
		return fmt.Sprintf("%.3g ms", 1000*v)
	case unit == "s":
		return fmt.Sprintf("%.3g s", v)
	case unit == "ops":
		return fmt.Sprintf("%.0f/s", v)
	}
	return fmt.Sprint(math.Round(v))
}

package main

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
)

// loads draws a strip for each contender, the first one in f, with a bar for each load.
func (d *svg) loads(f frame, p plan, runs []recording) {
	const apart = 26
	d.text(margin, 80, "head", "", "Loads over time")
	d.text(f.left, 80, "muted", "", "each bar is a load, in the row of the goroutine that asked; the numbers count the loads below")
	var length time.Duration // of the longest run
	for _, r := range runs {
		length = max(length, r.Ended.Sub(r.Began[cold]))
	}
	before := length / 30 // to the left of zero
	at := func(t time.Duration) float64 {
		return f.x(float64(min(t, length)+before) / float64(length+before))
	}
	last := f.bottom + float64(len(runs)-1)*(f.height()+apart)
	border := at(runs[0].Began[expiring].Sub(runs[0].Began[cold]))
	d.text(border-6, f.top-22, "muted", "end", phaseNames[cold])
	d.text(border+6, f.top-22, "muted", "", phaseNames[expiring])
	d.path("phase", fmt.Sprintf("M%s %sV%s", px(border), px(f.top-32), px(f.top)))
	for i, r := range runs {
		s := f
		s.top, s.bottom = f.top+float64(i)*(f.height()+apart), f.bottom+float64(i)*(f.height()+apart)
		d.strip(s, p, r, contenders[i].class, at)
	}
	ticks := steps(length.Seconds(), 8)
	for _, v := range ticks {
		if v <= length.Seconds() {
			x := at(time.Duration(v * float64(time.Second)))
			d.path("grid", fmt.Sprintf("M%s %sv5", px(x), px(last)))
			d.text(x, last+18, "", "middle", fmt.Sprintf("%.6g s", v))
		}
	}
	d.text(f.left, last+35, "muted", "", "singlefill refreshes a value shortly before it expires, in the background")
	d.text(f.right, last+35, "muted", "end", "time since all callers asked")
}

// strip draws the loads of one contender.
func (d *svg) strip(f frame, p plan, r recording, class string, at func(time.Duration) float64) {
	fmt.Fprintf(d, `<rect class="strip" x="%s" y="%s" width="%s" height="%s"/>`+"\n", px(f.left), px(f.top), px(f.width()), px(f.height()))
	rows := p.Processes * p.Goroutines
	if p.Processes <= 16 {
		for i := 1; i < p.Processes; i++ {
			d.path("grid", fmt.Sprintf("M%s %sH%s", px(f.left), px(f.y(1-float64(i)/float64(p.Processes))), px(f.right)))
		}
	}
	d.path("phase", fmt.Sprintf("M%s %sV%s", px(at(r.Began[expiring].Sub(r.Began[cold]))), px(f.top), px(f.bottom)))
	waited := r.summary(cold).waited + r.summary(expiring).waited
	middle := (f.top + f.bottom) / 2
	d.text(margin, middle-14, "name "+class, "", r.Contender)
	d.text(margin, middle+5, "", "", count(len(r.Loads), "load", "loads"))
	d.text(margin, middle+22, "", "", count(waited, "call", "calls")+" waited")

	thick := max(3, f.height()/float64(rows))
	var bars strings.Builder
	for _, b := range barsOf(r.Loads, func(l load) float64 {
		row := float64(l.Process*p.Goroutines+l.Goroutine) + 0.5
		return math.Round(min(max(f.y(1-row/float64(rows)), f.top+thick/2), f.bottom-thick/2)*2) / 2
	}) {
		fmt.Fprintf(&bars, "M%s %sH%sv%sH%sz", px(at(b.from)), px(b.y-thick/2), px(max(at(b.to), at(b.from)+1)), px(thick), px(at(b.from)))
	}
	d.path("bar "+class, bars.String())

	for _, l := range labelsOf(refillsOf(r.Loads), at) {
		d.text(l.x, f.top-5, "number "+class, "middle", thousands(l.loads))
	}
}

// A bar stands for loads in one row of pixels that follow each other without a gap.
type bar struct {
	y        float64
	from, to time.Duration
}

func barsOf(loads []load, row func(load) float64) (bars []bar) {
	for _, l := range loads {
		bars = append(bars, bar{row(l), l.Began, l.Ended})
	}
	slices.SortFunc(bars, func(a, b bar) int {
		return cmp.Or(cmp.Compare(a.y, b.y), cmp.Compare(a.from, b.from))
	})
	joined := bars[:0]
	for _, b := range bars {
		if n := len(joined); n > 0 && joined[n-1].y == b.y && b.from <= joined[n-1].to {
			joined[n-1].to = max(joined[n-1].to, b.to)
			continue
		}
		joined = append(joined, b)
	}
	return joined
}

// A label counts the loads of one refill, or of several refills that are too close for separate
// labels.
type label struct {
	x     float64
	loads int
}

func labelsOf(refills []refill, at func(time.Duration) float64) (labels []label) {
	for _, f := range refills {
		x := at((f.began + f.ended) / 2)
		if n := len(labels); n > 0 {
			last := &labels[n-1]
			if letters := len(thousands(last.loads) + thousands(f.loads)); x-last.x < 12+4*float64(letters) {
				last.loads += f.loads
				continue
			}
		}
		labels = append(labels, label{x, f.loads})
	}
	return labels
}

// latencies draws how long the slower half of the calls of the expiring phase took, by percentiles.
// Each further "9" of a percentile has the same width. There is no such panel for the cold phase:
// its calls all take as long as one load, with each contender.
func (d *svg) latencies(f frame, runs []recording) {
	low, high := math.Inf(1), math.Inf(-1)
	for _, r := range runs {
		s := r.summary(expiring)
		low, high = min(low, logOf(s.p50)), max(high, logOf(s.max))
	}
	low, high = math.Floor(low), max(math.Ceil(high), math.Floor(low)+1)
	ticks := []float64{50, 90, 99, 99.9}
	nines := func(percentile float64) float64 { return 2 - math.Log10(100-percentile) }
	first, last := nines(ticks[0]), nines(ticks[len(ticks)-1])
	x := func(nines float64) float64 { return f.x((nines - first) / (last - first)) }
	y := func(log float64) float64 { return f.y((log - low) / (high - low)) }

	d.text(f.left-52, f.top-16, "head", "", "Latency, expiring")
	for log := low; log <= high; log++ {
		d.path("grid", fmt.Sprintf("M%s %sH%s", px(f.left), px(y(log)), px(f.right)))
		d.text(f.left-8, y(log)+4, "", "end", tidy(time.Duration(math.Round(math.Pow(10, log)))))
	}
	for _, percentile := range ticks {
		at := x(nines(percentile))
		d.path("grid", fmt.Sprintf("M%s %sV%s", px(at), px(f.top), px(f.bottom)))
		d.text(at, f.bottom+17, "", "middle", fmt.Sprint(percentile))
	}
	d.text(f.x(0.5), f.bottom+34, "muted", "middle", "percentile of the calls")
	for i, r := range runs {
		took := slices.Sorted(slices.Values(r.Calls[expiring]))
		var line strings.Builder
		for n := first; n < min(last, math.Log10(float64(len(took))))+0.01; n += (last - first) / 90 {
			fmt.Fprintf(&line, "%c%s %s", "ML"[min(line.Len(), 1)], px(x(n)), px(y(logOf(quantile(took, 1-math.Pow(10, -n))))))
		}
		d.path("line "+contenders[i].class, line.String())
	}
}

func logOf(d time.Duration) float64 { return math.Log10(float64(max(d, 1))) }

// commands draws how many commands each contender sent per call.
func (d *svg) commands(f frame, runs []recording) {
	most := 0.0
	for _, r := range runs {
		for phase := range phases {
			most = max(most, r.summary(phase).perCall())
		}
	}
	ticks := steps(max(1.15*most, 0.1), 5) // with room for a number above the bar
	highest := ticks[len(ticks)-1]
	d.text(f.left-34, f.top-16, "head", "", "Redis commands per call")
	for _, v := range ticks {
		d.path("grid", fmt.Sprintf("M%s %sH%s", px(f.left), px(f.y(v/highest)), px(f.right)))
		d.text(f.left-8, f.y(v/highest)+4, "", "end", fmt.Sprintf("%.6g", v))
	}
	const wide, pitch = 32, 44
	for phase := range phases {
		middle := f.x((float64(phase) + 0.5) / phases)
		d.text(middle, f.bottom+17, "", "middle", phaseNames[phase])
		for i, r := range runs {
			v := r.summary(phase).perCall()
			x := middle + (float64(i)-float64(len(runs)-1)/2)*pitch
			d.path("bar "+contenders[i].class, fmt.Sprintf("M%s %sh%dV%sh-%dz", px(x-wide/2), px(f.bottom), wide, px(f.y(v/highest)), wide))
			d.text(x, f.y(v/highest)-4, "small number "+contenders[i].class, "middle", fmt.Sprintf("%.2f", v))
		}
	}
}

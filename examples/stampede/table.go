package main

import (
	"fmt"
	"strconv"
	"strings"
)

// writeTable writes the table of the contenders, and the statements about it.
func (p *page) writeTable(runs []recording) {
	fmt.Fprint(p.out, "\n"+
		"                               loads              latency          Redis commands\n"+
		"                    calls    all   each   most     p50     p99     max      all  per call  errors\n")
	for phase := range phases {
		fmt.Fprintln(p.out, p.in(bold, phaseNames[phase]))
		for i, r := range runs {
			s := r.summary(phase)
			fmt.Fprintf(p.out, "%s %6s %6s %6s %6s %7s %7s %7s %8s %9.2f %7s\n", p.in(contenders[i].color, fmt.Sprintf("%-18s", r.Contender)),
				thousands(s.calls), thousands(s.loads), each(s.perRefill()), thousands(s.most),
				short(s.p50), short(s.p99), short(s.max), thousands(s.commands), s.perCall(), thousands(s.errors))
		}
	}
	fmt.Fprint(p.out, "\n"+
		"each: loads per refill. A refill is a stretch of time in which a key is being loaded.\n"+
		"most: the most loads of one key at the same time.\n\n")
	for _, line := range statements(runs) {
		fmt.Fprintln(p.out, line)
	}
}

// statements returns what was measured, in words.
func statements(runs []recording) (lines []string) {
	say := func(intro string, phase int, what func(summary) string) {
		var parts []string
		for _, r := range runs {
			parts = append(parts, what(r.summary(phase))+" with "+r.Contender)
		}
		lines = append(lines, intro+" "+strings.Join(parts, ", ")+".")
	}
	loads := func(s summary) string { return times(s.perRefill()) }
	say("A cold key was loaded", cold, loads)
	say("Each time a value had to be renewed, its key was loaded", expiring, loads)
	say("While values expired, the number of calls that took half a load or longer was", expiring, func(s summary) string { return thousands(s.waited) })
	answers, errors := 0, 0
	for _, r := range runs {
		for phase := range phases {
			answers += len(r.Calls[phase])
			errors += r.Errors[phase]
		}
		if r.FirstError != "" {
			lines = append(lines, "The first error with "+r.Contender+": "+r.FirstError)
		}
	}
	if errors == 0 {
		return append(lines, fmt.Sprintf("All %s answers were right.", thousands(answers)))
	}
	return append(lines, fmt.Sprintf("Of %s calls %s failed.", thousands(answers), thousands(errors)))
}

func times(v float64) string {
	if v == 1 {
		return "once"
	}
	return each(v) + " times"
}

// each returns v rounded, but never to one.
func each(v float64) string {
	if text := rounded(v); v == 1 || text != "1" {
		return text
	}
	return strconv.FormatFloat(v, 'f', 2, 64)
}

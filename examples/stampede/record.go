package main

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// A report is what one process did.
type report struct {
	Calls      [phases][]time.Duration // how long each took
	Commands   [phases]int             // sent to Redis
	Errors     [phases]int
	FirstError string
	Loads      []load
}

// A load is one call of the source. Its times count from the beginning of the cold phase.
type load struct {
	Process, Goroutine int // that called it
	Key                string
	Phase              int
	Began, Ended       time.Duration
}

func (r *report) call(phase int, took time.Duration, err error) {
	r.Calls[phase] = append(r.Calls[phase], took)
	if err == nil {
		return
	}
	r.Errors[phase]++
	r.FirstError = cmp.Or(r.FirstError, err.Error())
}

// A recording is what all processes of one contender did.
type recording struct {
	report
	Contender string
	Load      time.Duration // how long one load should take
	Began     [phases]time.Time
	Ended     time.Time
}

func (r *recording) add(process int, of report) {
	for phase := range phases {
		r.Calls[phase] = append(r.Calls[phase], of.Calls[phase]...)
		r.Commands[phase] += of.Commands[phase]
		r.Errors[phase] += of.Errors[phase]
	}
	r.FirstError = cmp.Or(r.FirstError, of.FirstError)
	for _, l := range of.Loads {
		l.Process = process
		r.Loads = append(r.Loads, l)
	}
}

// A summary has the numbers of one phase of a recording.
type summary struct {
	calls, errors, commands int
	waited                  int // calls that took at least half as long as a load
	loads, refills          int
	most                    int // most loads of one key at the same time
	p50, p99, max           time.Duration
}

func (r *recording) summary(phase int) summary {
	s := summary{calls: len(r.Calls[phase]), errors: r.Errors[phase], commands: r.Commands[phase]}
	for _, f := range refillsOf(r.Loads) {
		if f.phase == phase {
			s.refills++
			s.loads += f.loads
			s.most = max(s.most, f.most)
		}
	}
	for _, took := range r.Calls[phase] {
		if took >= r.Load/2 {
			s.waited++
		}
	}
	took := slices.Sorted(slices.Values(r.Calls[phase]))
	s.p50, s.p99, s.max = quantile(took, 0.5), quantile(took, 0.99), quantile(took, 1)
	return s
}

func (s summary) perRefill() float64 { return ratio(s.loads, s.refills) }
func (s summary) perCall() float64   { return ratio(s.commands, s.calls) }

func ratio(a, b int) float64 {
	if b == 0 {
		return 0
	}
	return float64(a) / float64(b)
}

// quantile returns the value that a share q of sorted does not exceed.
func quantile(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	rank := int(math.Ceil(q * float64(len(sorted))))
	return sorted[min(max(rank, 1), len(sorted))-1]
}

// A refill is a stretch of time in which a key is being loaded.
type refill struct {
	phase        int // in which it began
	began, ended time.Duration
	loads        int
	most         int // most loads at the same time
}

// refillsOf returns the refills of all keys, in the order in which they began.
func refillsOf(loads []load) (found []refill) {
	byKey := make(map[string][]load)
	for _, l := range loads {
		byKey[l.Key] = append(byKey[l.Key], l)
	}
	for _, loads := range byKey {
		slices.SortFunc(loads, func(a, b load) int { return cmp.Compare(a.Began, b.Began) })
		var f refill
		var running []load
		for _, l := range loads {
			running = slices.DeleteFunc(running, func(r load) bool { return r.Ended <= l.Began })
			if len(running) == 0 {
				if f.loads > 0 {
					found = append(found, f)
				}
				f = refill{phase: l.Phase, began: l.Began}
			}
			running = append(running, l)
			f.loads++
			f.most = max(f.most, len(running))
			f.ended = max(f.ended, l.Ended)
		}
		found = append(found, f)
	}
	slices.SortFunc(found, func(a, b refill) int { return cmp.Compare(a.began, b.began) })
	return found
}

package main

import (
	"fmt"
	"strings"
	"sync"
	"time"
)

// A progress is the line of one contender. On a terminal it changes while the contender runs.
type progress struct {
	page      *page
	contender int
	length    time.Duration // of both phases

	mu     sync.Mutex
	latest map[int]message // protected by mu: the latest message of each process
	phase  string          // protected by mu
	begun  time.Time       // protected by mu; zero before the first phase
	drawn  time.Time       // protected by mu
}

func (p *page) progress(contender int, plan plan) *progress {
	s := &progress{page: p, contender: contender, length: plan.Load + plan.Expiring, latest: make(map[int]message)}
	s.phase = "starting"
	s.draw()
	return s
}

func (s *progress) begin(phase int, at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.phase = phaseNames[phase]
	if s.begun.IsZero() {
		s.begun = at
	}
	s.draw()
}

// update takes a message of a process. It redraws the line only as often as one can read it.
func (s *progress) update(process int, m message) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.latest[process] = m
	if time.Since(s.drawn) >= 100*time.Millisecond {
		s.draw()
	}
}

func (s *progress) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.page.terminal {
		fmt.Fprint(s.page.out, "\r\x1b[K")
	}
	fmt.Fprintln(s.page.out, s.line())
}

func (s *progress) draw() {
	s.drawn = time.Now()
	if s.page.terminal {
		fmt.Fprintf(s.page.out, "\r\x1b[K%s  %s %s", s.line(), s.bar(), s.phase)
	}
}

func (s *progress) line() string {
	calls, loads := 0, 0
	for _, m := range s.latest {
		calls += m.Calls
		loads += m.Loads
	}
	c := contenders[s.contender]
	return fmt.Sprintf("%s %7s calls %6s loads %5.1f s", s.page.in(c.color, fmt.Sprintf("%-18s", c.name)),
		thousands(calls), thousands(loads), s.elapsed().Seconds())
}

// bar shows the progress of the whole run. Each contender is an equal part of it.
func (s *progress) bar() string {
	const width = 14
	done := (float64(s.contender) + min(1, s.elapsed().Seconds()/s.length.Seconds())) / float64(len(contenders))
	full := int(done * width)
	return s.page.in(contenders[s.contender].color, strings.Repeat("█", full)) + strings.Repeat("░", width-full)
}

func (s *progress) elapsed() time.Duration {
	if s.begun.IsZero() {
		return 0
	}
	return max(0, time.Since(s.begun))
}

package schedule

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// An item waits for the scheduler.
type item struct {
	process string
	kind    kind
	what    string
	until   time.Time   // held up until then
	gone    func() bool // no caller waits for the reply any more
	sever   func()      // breaks the connection
	goes    chan bool   // true: it continues; false: it never will
}

type kind int

const (
	point kind = iota
	request
	late // a request that is still in transit though its caller has given up
	reply
)

func (i *item) String() string {
	return i.process + [...]string{" ", " asks: ", " asked, late: ", " is told: "}[i.kind] + i.what
}

// An option is something that the scheduler can do next.
type option struct {
	what  string
	fault bool
	do    func()
	pass  func() // instead of do, before a step of time
}

// options returns what can happen now, regular options first, in an order that is the same when the
// schedule is repeated. busy reports whether anything can still happen.
func (w *World) options() (options []option, busy bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.forget()
	slices.SortStableFunc(w.waiting, func(a, b *item) int {
		return cmp.Or(strings.Compare(a.process, b.process), int(a.kind-b.kind), strings.Compare(a.what, b.what))
	})
	var ready []*item
	pressing, patient := false, false
	for _, i := range w.waiting {
		if now := time.Now(); !now.Before(i.until) && !now.Before(w.cut[i.process]) {
			ready = append(ready, i)
			options = append(options, option{what: i.String(), do: func() { w.goOn(i) }})
			pressing = pressing || i.kind == request || i.kind == reply
			patient = patient || i.kind == point
		}
	}
	switch {
	case pressing || w.actors == 0:
	case !patient:
		options = append(options, option{what: "time passes", pass: func() {}})
	case w.pauses > 0:
		options = append(options, option{what: "time passes", pass: func() { w.pauses-- }})
	}
	if w.faults > 0 {
		options = append(options, w.faultsOf(ready)...)
		options = append(options, w.cancellations()...)
	}
	return options, w.actors > 0 || len(w.waiting) > 0
}

// forget drops replies that no caller waits for, and marks requests of such callers as late.
func (w *World) forget() {
	w.waiting = slices.DeleteFunc(w.waiting, func(i *item) bool {
		switch {
		case i.gone == nil || !i.gone():
			return false
		case i.kind == reply:
			i.goes <- false
			return true
		}
		i.kind = late
		return false
	})
}

// goOn lets an item continue.
func (w *World) goOn(i *item) {
	at := slices.Index(w.waiting, i)
	w.waiting = slices.Delete(w.waiting, at, at+1)
	if i.kind == point || i.kind == reply { // a request that arrives shows its process nothing yet
		w.saw(i.process, i.String())
	}
	i.goes <- true
}

// faultsOf returns the faults that can happen to items.
func (w *World) faultsOf(items []*item) (options []option) {
	seen := make(map[string]bool) // processes
	for _, i := range items {
		if i.kind == late || w.plan.OnlyPoints && i.kind != point ||
			len(w.plan.Hit) > 0 && !slices.Contains(w.plan.Hit, i.process) {
			continue
		}
		if w.plan.Break && i.kind == request {
			options = append(options, w.fault(i.String()+": the connection breaks", func() {
				w.saw(i.process, "a connection breaks: "+i.what)
				i.sever()
			}))
		}
		for _, d := range w.plan.Hold {
			options = append(options, w.fault(fmt.Sprintf("%v: held up for %v", i, d), func() {
				i.until = time.Now().Add(d)
			}))
		}
		if seen[i.process] {
			continue
		}
		seen[i.process] = true
		for _, d := range w.plan.Cut {
			options = append(options, w.fault(fmt.Sprintf("%s: cut off for %v", i.process, d), func() {
				w.cut[i.process] = time.Now().Add(d)
			}))
		}
	}
	return options
}

func (w *World) cancellations() (options []option) {
	for _, name := range slices.Sorted(maps.Keys(w.cancels)) {
		c := w.cancels[name]
		options = append(options, w.fault(name+" is cancelled", func() {
			delete(w.cancels, name)
			w.saw(c.process, name+" is cancelled")
			c.cancel()
		}))
	}
	return options
}

func (w *World) fault(what string, do func()) option {
	return option{what: what, fault: true, do: func() { w.faults--; do() }}
}

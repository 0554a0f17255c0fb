package singlefilltest

import (
	"fmt"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
)

// What belongs to a bubble of testing/synctest cannot be used outside of it, nor the reverse. The runtime
// ends the process then, or the bubble never comes to rest, and neither says what to change.

var inBubble = regexp.MustCompile(`^goroutine \d+ \[[^\]]*(synctest bubble \d+)\]`)

// bubble returns the name of the bubble of this goroutine, or "" outside of bubbles: the first line of a
// goroutine's stack has it.
func bubble() string { return bubbleOf(string(stack(make([]byte, 200), false))) }

func bubbleOf(goroutine string) string {
	if found := inBubble.FindStringSubmatch(goroutine); found != nil {
		return found[1]
	}
	return ""
}

func stack(buf []byte, all bool) []byte { return buf[:runtime.Stack(buf, all)] }

// misplaced says what is wrong if what was made in one bubble is used in another.
func misplaced(what, made, used string) error {
	place := func(name string) string {
		if name == "" {
			return "outside of a bubble of testing/synctest"
		}
		return "in " + name
	}
	return fmt.Errorf("singlefilltest: %s was called %s, and is used %s: call it in the bubble in which the test uses it",
		what, place(made), place(used))
}

// checkClosed reports a cache that still runs when its bubble ends: with Near it runs until Close, and
// synctest ends the test by a panic that speaks of a deadlock.
func checkClosed(t testing.TB) {
	mine := bubble()
	if mine == "" {
		return
	}
	for _, s := range servers.Range {
		if s.(*fakeServer).bubble == mine {
			return // a cache of another Redis may be closed later
		}
	}
	synctest.Wait()
	for _, goroutine := range strings.Split(string(stack(make([]byte, 1<<20), true)), "\n\n") {
		if bubbleOf(goroutine) == mine && strings.Contains(goroutine, "singlefill.(*engine)") {
			t.Errorf("singlefilltest: the bubble ends, and a cache is not closed: call its Close before, with defer:\n\n%s", goroutine)
			return
		}
	}
}

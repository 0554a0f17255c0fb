package singlefilltest

import (
	"fmt"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"
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

// checkClosed reports what still runs when its bubble ends, since synctest ends the test by a panic that
// speaks of a deadlock: time stops in the bubble. A cache with Near runs until Close. A lock finishes in the
// background what a call could not, and its client is closed, so it ends if time passes.
func checkClosed(t testing.TB) {
	mine := bubble()
	if mine == "" {
		return
	}
	for _, s := range servers.Range {
		if s.(*fakeServer).bubble == mine {
			return // a cache or lock of another Redis may be used until then
		}
	}
	if cache := runs(mine, "internal/near.", "internal/read.", "internal/fill.", "internal/revoke."); cache != "" {
		t.Errorf("singlefilltest: the bubble ends, and a cache is not closed: call its Close before, with defer:\n\n%s", cache)
		return
	}
	for pause := time.Millisecond; pause < 24*time.Hour && runs(mine, "singlefill/lock.", "singlefill/internal/client.") != ""; pause *= 2 {
		time.Sleep(pause)
	}
	if lock := runs(mine, "singlefill/lock."); lock != "" {
		t.Errorf("singlefilltest: the bubble ends, and a call of a lock has not returned: wait for it before:\n\n%s", lock)
	}
}

// runs returns the stack of a goroutine of the bubble that runs code with one of the names, or "".
func runs(bubble string, names ...string) string {
	synctest.Wait()
	for _, goroutine := range strings.Split(string(stack(make([]byte, 1<<20), true)), "\n\n") {
		for _, name := range names {
			if bubbleOf(goroutine) == bubble && strings.Contains(goroutine, name) {
				return goroutine
			}
		}
	}
	return ""
}

package singlefilltest

import (
	"regexp"
	"runtime"
	"strings"
	"testing/synctest"
	"time"
)

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

// settle lets time pass at the end of a bubble, in which synctest stops it, until nothing of a cache or lock runs:
// they finish in the background what a call could not. Their client is closed, so they end if time passes.
func settle() {
	for pause := time.Millisecond; pause < 24*time.Hour && busy(); pause *= 2 {
		time.Sleep(pause)
	}
}

// busy reports whether a goroutine of this bubble runs code of a cache or lock, when all of them wait.
func busy() bool {
	mine := bubble()
	synctest.Wait()
	for goroutine := range strings.SplitSeq(string(stack(make([]byte, 1<<20), true)), "\n\n") {
		if bubbleOf(goroutine) == mine && background.MatchString(goroutine) {
			return true
		}
	}
	return false
}

var background = regexp.MustCompile(`singlefill/(lock|internal/(client|near|read|fill|revoke))\.`)

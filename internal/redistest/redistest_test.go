package redistest

import (
	"fmt"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
)

func TestMain(m *testing.M) { Main(m) }

// record replaces a test that is expected to end early.
type record struct {
	testing.TB
	verb, text string
}

func (r *record) Helper()                           {}
func (r *record) Fatalf(format string, args ...any) { r.end("fatal", format, args) }
func (r *record) Skipf(format string, args ...any)  { r.end("skip", format, args) }

func (r *record) end(verb, format string, args []any) {
	r.verb, r.text = verb, fmt.Sprintf(format, args...)
	runtime.Goexit()
}

// run runs f in a goroutine, which Fatalf or Skipf of r may end.
func (r *record) run(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	<-done
}

// Await fails the test after its limit.
func TestAwait_Limit(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // without 15 real seconds
		r := &record{TB: t}
		r.run(func() { Await(r, "pigs fly", func() bool { return false }) })
		if r.verb != "fatal" || !strings.Contains(r.text, "pigs fly") {
			t.Errorf("%s %q", r.verb, r.text)
		}
	})
}

// strays finds a goroutine that is left behind.
func TestStrays_Leak(t *testing.T) {
	t.Parallel()
	end := make(chan struct{})
	go leak(end)
	Await(t, "the leak is seen", func() bool { return strings.Contains(strays(), "redistest.leak") })
	close(end)
	Await(t, "the leak is gone", func() bool { return !strings.Contains(strays(), "redistest.leak") })
}

func leak(end chan struct{}) { <-end }

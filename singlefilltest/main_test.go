package singlefilltest_test

import (
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/singlefill/singlefill/internal/redistest"
)

func TestMain(m *testing.M) { redistest.Main(m) }

// both runs test in a bubble of testing/synctest, and in real time.
func both(t *testing.T, test func(t *testing.T)) {
	t.Parallel()
	t.Run("bubble", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, test)
	})
	t.Run("real time", func(t *testing.T) {
		t.Parallel()
		test(t)
	})
}

// inBubble runs a test in a bubble of testing/synctest, in parallel with others.
func inBubble(t *testing.T, run func(t *testing.T)) {
	t.Parallel()
	synctest.Test(t, run)
}

// A fakeTB records what is reported to it.
type fakeTB struct {
	testing.TB
	mu       sync.Mutex
	errors   []string // protected by mu
	cleanups []func() // protected by mu
}

func (f *fakeTB) Helper() {}

func (f *fakeTB) Errorf(format string, args ...any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.errors = append(f.errors, fmt.Sprintf(format, args...))
}

func (f *fakeTB) Fatalf(format string, args ...any) {
	f.Errorf("fatal: "+format, args...)
	runtime.Goexit()
}

func (f *fakeTB) Cleanup(cleanup func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.cleanups = append(f.cleanups, cleanup)
}

// wantReport checks that test reports once, with a text. It runs the cleanups of test.
func wantReport(t *testing.T, text string, test func(t testing.TB)) {
	t.Helper()
	f := new(fakeTB)
	done := make(chan struct{})
	go func() {
		defer close(done)
		test(f)
	}()
	<-done
	for i := len(f.cleanups) - 1; i >= 0; i-- {
		f.cleanups[i]()
	}
	if got := f.errors; len(got) != 1 || !strings.Contains(got[0], text) {
		t.Errorf("reported %q, want %q", got, text)
	}
}

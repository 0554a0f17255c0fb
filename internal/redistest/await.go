package redistest

import (
	"context"
	"sync"
	"testing"
	"time"
)

// awaitLimit bounds every wait for a condition. It is generous, because it only decides how long a
// failing test takes.
const awaitLimit = 15 * time.Second

// Await waits until cond holds, and fails the test after 15 s. what describes the condition. It
// must be called from the test's goroutine.
func Await(t testing.TB, what string, cond func() bool) {
	t.Helper()
	if !poll(awaitLimit, cond) {
		t.Fatalf("not within %v: %s", awaitLimit, what)
	}
}

// poll calls cond until it holds or limit has passed: at first every millisecond, later every 20
// ms, so that long waits do not load the machine.
func poll(limit time.Duration, cond func() bool) bool {
	const longest = 20 * time.Millisecond
	deadline := time.Now().Add(limit)
	for pause := time.Millisecond; ; pause = min(pause*3/2, longest) {
		if cond() {
			return true
		}
		if time.Now().After(deadline) {
			return false
		}
		time.Sleep(pause)
	}
}

// OnDone returns a context whose Done calls called when it is called for the first time. GetOrLoad does
// so only when it waits for a read or load that it shares with other calls for the key, and Acquire at the
// latest between two commands.
func OnDone(ctx context.Context, called func()) context.Context {
	return &doneContext{ctx, sync.OnceFunc(called)}
}

type doneContext struct {
	context.Context
	called func()
}

func (c *doneContext) Done() <-chan struct{} {
	c.called()
	return c.Context.Done()
}

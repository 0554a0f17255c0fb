package locktest

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/singlefill/singlefill/lock"
)

// Events record the calls of a Trace.
type Events struct {
	mu   sync.Mutex
	list []Event // protected by mu
}

// An Event is one call of a Trace.
type Event struct {
	What string // acquired, released, lost, renewed, expired, waited, or the op of a RedisError
	At   time.Time
	lock.LeaseInfo
}

// Trace returns a Trace that records its calls.
func (e *Events) Trace() *lock.Trace {
	on := func(what string) func(context.Context, lock.LeaseInfo) {
		return func(_ context.Context, info lock.LeaseInfo) { e.add(what, info) }
	}
	return &lock.Trace{
		Acquired: on("acquired"), Released: on("released"), Lost: on("lost"), Renewed: on("renewed"),
		Expired: on("expired"), Waited: on("waited"),
		RedisError: func(_ context.Context, op string, err error) { e.add(op, lock.LeaseInfo{Err: err}) },
	}
}

func (e *Events) add(what string, info lock.LeaseInfo) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.list = append(e.list, Event{what, time.Now(), info})
}

// All returns the events so far.
func (e *Events) All() []Event {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.list)
}

// Of returns the events with one of the names.
func (e *Events) Of(what ...string) []Event {
	return slices.DeleteFunc(e.All(), func(e Event) bool { return !slices.Contains(what, e.What) })
}

// Count returns how many events have the name.
func (e *Events) Count(what string) int { return len(e.Of(what)) }

// Errors returns the errors of the commands that failed, by op.
func (e *Events) Errors() map[string][]error {
	failed := make(map[string][]error)
	for _, e := range e.Of("acquire", "renew", "release", "abandon") {
		failed[e.What] = append(failed[e.What], e.Err)
	}
	return failed
}

// WantTransitions checks the names of the events of leases in order, except renewals.
func (e *Events) WantTransitions(t testing.TB, want string) {
	t.Helper()
	var names []string
	for _, event := range e.Of("acquired", "released", "lost") {
		names = append(names, event.What)
	}
	if told := strings.Join(names, " "); told != want {
		t.Errorf("told %q, want %q:%s", told, want, e)
	}
}

// Reset forgets the events so far.
func (e *Events) Reset() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.list = nil
}

// String has a line for each event.
func (e *Events) String() string {
	var b strings.Builder
	for _, event := range e.All() {
		fmt.Fprintf(&b, "\n%s %+v", event.What, event.LeaseInfo)
	}
	return b.String()
}

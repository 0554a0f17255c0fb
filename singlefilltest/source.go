package singlefilltest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/singlefill/singlefill"
)

// A Source stands for what a cache loads from, such as a database. It counts loads, and can be made
// to fail, to hang, or to be slow. Its methods [Source.Load] and [Source.LoadMany] are a
// [singlefill.Loader] and a [singlefill.ManyLoader]. A Source is safe for concurrent use.
type Source[T any] struct {
	load  singlefill.Loader[T]
	begun time.Time

	mu      sync.Mutex
	calls   []*call       // protected by mu: in the order in which they began
	hold    *hold         // protected by mu: nil: calls are not held
	changed chan struct{} // protected by mu: closed when another call is held
	err     error         // protected by mu: see Fail
	slow    time.Duration // protected by mu: see Slow
}

// A hold is the time between Hold and Release.
type hold struct {
	calls int // that wait for release; Source.mu protects it
	over  chan struct{}
}

// A call is a call of Load or LoadMany. Source.mu protects it.
type call struct {
	keys     []string
	begun    time.Time
	over     bool
	took     time.Duration
	panicked bool
	err      error
}

// NewSource returns a Source that gets its values from load, which is called as often as a cache
// loads, by several goroutines at once. load returns [singlefill.ErrNotFound], bare or wrapped, for
// a key that has no value. At the end of the test the source releases what it holds. NewSource ends
// the test by t.Fatalf if load is nil.
func NewSource[T any](t testing.TB, load singlefill.Loader[T]) *Source[T] {
	t.Helper()
	if load == nil {
		t.Fatalf("singlefilltest: NewSource: load is nil: a Loader is needed")
	}
	s := &Source[T]{load: load, begun: time.Now(), changed: make(chan struct{})}
	t.Cleanup(s.Release)
	return s
}

// Load is a [singlefill.Loader]: it returns what the function given to NewSource returns for key.
// ctx ends the wait of a call that is held or slow.
func (s *Source[T]) Load(ctx context.Context, key string) (T, error) {
	return run(ctx, s, []string{key}, func() (T, error) { return s.one(ctx, key) })
}

// LoadMany is a [singlefill.ManyLoader]. It asks the function given to NewSource for one key after
// the other. It leaves out keys for which that returns ErrNotFound, and returns any other error.
func (s *Source[T]) LoadMany(ctx context.Context, keys []string) (map[string]T, error) {
	return run(ctx, s, keys, func() (map[string]T, error) {
		found := make(map[string]T, len(keys))
		for _, key := range keys {
			v, err := s.one(ctx, key)
			switch {
			case err == nil:
				found[key] = v
			case !errors.Is(err, singlefill.ErrNotFound) || ofOtherKeys(err):
				return nil, err
			}
		}
		return found, nil
	})
}

// ofOtherKeys reports whether the errors in err are of other keys: see [singlefill.ManyError].
func ofOtherKeys(err error) bool {
	_, is := errors.AsType[*singlefill.ManyError](err)
	return is
}

// run makes one call of s, which ends as load does.
func run[T, R any](ctx context.Context, s *Source[T], keys []string, load func() (R, error)) (r R, err error) {
	c, h, slow := s.begin(keys)
	panicked := true
	defer func() { s.end(c, panicked, err) }()
	if err = s.waitFor(ctx, h); err == nil {
		err = pause(ctx, slow)
	}
	if err == nil {
		r, err = load()
	}
	panicked = false
	return r, err
}

func (s *Source[T]) begin(keys []string) (c *call, h *hold, slow time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c = &call{keys: slices.Clone(keys), begun: time.Now()}
	s.calls = append(s.calls, c)
	if s.hold != nil {
		s.hold.calls++
		close(s.changed)
		s.changed = make(chan struct{})
	}
	return c, s.hold, s.slow
}

// waitFor waits until h is over.
func (s *Source[T]) waitFor(ctx context.Context, h *hold) error {
	if h == nil {
		return nil
	}
	select {
	case <-h.over:
		return nil
	case <-ctx.Done():
		s.mu.Lock()
		defer s.mu.Unlock()
		h.calls--
		return ctx.Err()
	}
}

func pause(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// one returns the outcome for one key.
func (s *Source[T]) one(ctx context.Context, key string) (T, error) {
	s.mu.Lock()
	err := s.err
	s.mu.Unlock()
	if err != nil {
		var zero T
		return zero, err
	}
	return s.load(ctx, key)
}

func (s *Source[T]) end(c *call, panicked bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c.over, c.took, c.panicked, c.err = true, time.Since(c.begun), panicked, err
}

// Fail makes calls end with err, in place of a call of the function given to NewSource; nil ends
// that. A call that is held or slow takes the err that holds at its end.
func (s *Source[T]) Fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = err
}

// Slow makes each call that begins from now on take d longer. Zero, the default, or a negative d ends
// that.
func (s *Source[T]) Slow(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.slow = d
}

// Hold makes each call that begins from now on wait for [Source.Release], or for the end of its
// context: a cache ends that after LoadTimeout, 30 s by default. In a bubble of [testing/synctest]
// use Hold inside it.
func (s *Source[T]) Hold() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.hold == nil {
		s.hold = &hold{over: make(chan struct{})}
	}
}

// Release lets the calls go on that are held, and ends Hold. Without Hold it does nothing.
func (s *Source[T]) Release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.hold != nil {
		close(s.hold.over)
		s.hold = nil
	}
}

// awaitLimit is generous: it only decides how long a failing test takes.
const awaitLimit = 10 * time.Second

// AwaitHeld waits until n calls or more are held. It ends the test by t.Fatalf after 10 s, and at
// once if the source does not hold calls. A bubble of [testing/synctest] does not need it:
// synctest.Wait returns when all that can be held is held, and the other callers wait, too.
func (s *Source[T]) AwaitHeld(t testing.TB, n int) {
	t.Helper()
	limit := time.After(awaitLimit)
	for {
		held, changed := s.awaited(t)
		if held >= n {
			return
		}
		select {
		case <-changed:
		case <-limit:
			t.Fatalf("singlefilltest: %d calls are held after %v, want %d:%s", held, awaitLimit, n, s.report(""))
		}
	}
}

// awaited returns how many calls are held, and a channel that is closed when another one is.
func (s *Source[T]) awaited(t testing.TB) (held int, changed <-chan struct{}) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.hold == nil {
		t.Fatalf("singlefilltest: AwaitHeld: the source holds no calls: call Hold before they begin")
	}
	return s.hold.calls, s.changed
}

// Calls returns how many calls of Load and LoadMany have begun: how many queries a source gets.
func (s *Source[T]) Calls() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.calls)
}

// Loads returns how many calls of Load and LoadMany have begun that asked for key.
func (s *Source[T]) Loads(key string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, c := range s.calls {
		if slices.Contains(c.keys, key) {
			n++
		}
	}
	return n
}

// WantLoads reports by t.Errorf if [Source.Loads] of key is not n, and what has happened:
//
//	singlefilltest: loads of "42": 2, want 1:
//		"42" at 0s: returned after 500ms
//		"42", "43" at 1.2s: failed after 0s: db is down
//
// The times are those since NewSource, and since the beginning of the call.
func (s *Source[T]) WantLoads(t testing.TB, key string, n int) {
	t.Helper()
	if loads := s.Loads(key); loads != n {
		t.Errorf("singlefilltest: loads of %q: %d, want %d:%s", key, loads, n, s.report(key))
	}
}

// maxReported is how many calls report lists at most.
const maxReported = 20

// report lists the calls that asked for key, or all calls if there is none.
func (s *Source[T]) report(key string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	calls := slices.DeleteFunc(slices.Clone(s.calls), func(c *call) bool { return !slices.Contains(c.keys, key) })
	if len(calls) == 0 {
		calls = s.calls
	}
	if len(calls) == 0 {
		return " the source was not called"
	}
	var b strings.Builder
	for _, c := range calls[:min(len(calls), maxReported)] {
		fmt.Fprintf(&b, "\n\t%s at %v: %s", c.keysText(), rounded(c.begun.Sub(s.begun)), c.state())
	}
	if more := len(calls) - maxReported; more > 0 {
		fmt.Fprintf(&b, "\n\tand %d more", more)
	}
	return b.String()
}

func (c *call) keysText() string {
	quoted := make([]string, min(len(c.keys), maxReported))
	for i := range quoted {
		quoted[i] = strconv.Quote(c.keys[i])
	}
	if more := len(c.keys) - maxReported; more > 0 {
		quoted = append(quoted, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(quoted, ", ")
}

func (c *call) state() string {
	switch {
	case !c.over:
		return fmt.Sprintf("has not ended after %v", rounded(time.Since(c.begun)))
	case c.panicked:
		return fmt.Sprintf("panicked or called runtime.Goexit after %v", rounded(c.took))
	case c.err != nil:
		return fmt.Sprintf("failed after %v: %v", rounded(c.took), c.err)
	}
	return fmt.Sprintf("returned after %v", rounded(c.took))
}

func rounded(d time.Duration) time.Duration { return d.Round(time.Millisecond) }

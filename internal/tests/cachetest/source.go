package cachetest

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/singlefill/singlefill"
)

var ErrSource = errors.New("the source is down")

// Gives is a Loader that has an answer at once.
func Gives[T any](value T) singlefill.Loader[T] {
	return func(context.Context, string) (T, error) { return value, nil }
}

// GivesMany is Gives for many keys. It leaves out what is not in values.
func GivesMany[T any](values map[string]T) singlefill.ManyLoader[T] {
	return func(context.Context, []string) (map[string]T, error) { return values, nil }
}

func Fails[T any](err error) singlefill.Loader[T] {
	return func(context.Context, string) (T, error) { var zero T; return zero, err }
}

// FailsMany is Fails for many keys.
func FailsMany[T any](err error) singlefill.ManyLoader[T] {
	return func(context.Context, []string) (map[string]T, error) { return nil, err }
}

// OneByOne is a ManyLoader that calls a Loader for each key.
func OneByOne[T any](load singlefill.Loader[T]) singlefill.ManyLoader[T] {
	return func(ctx context.Context, keys []string) (map[string]T, error) {
		values := make(map[string]T)
		for _, key := range keys {
			v, err := load(ctx, key)
			if err != nil {
				return nil, err
			}
			values[key] = v
		}
		return values, nil
	}
}

// Takes is a Loader that takes its time.
func Takes[T any](d time.Duration, value T, err error) singlefill.Loader[T] {
	return func(context.Context, string) (T, error) { time.Sleep(d); return value, err }
}

// MustNotLoad is the Loader of a call that has to be a hit.
func MustNotLoad[T any](t testing.TB) singlefill.Loader[T] {
	return func(_ context.Context, key string) (T, error) {
		var zero T
		t.Errorf("%q is loaded, want a hit", key)
		return zero, errors.New("loaded")
	}
}

// A HeldSource has a Loader whose loads go on until the test says how they end.
type HeldSource[T any] struct {
	loads atomic.Int64
	Begun chan *HeldLoad[T]
	over  chan struct{} // the test is: no Loader must outlive it
}

type HeldLoad[T any] struct {
	Ctx  context.Context
	Key  string
	Ends chan Ending[T]
}

type Ending[T any] struct {
	Value T
	Err   error
}

// NewSource makes a source. Make the caches first: they wait for their loads at the end of the
// test.
func NewSource[T any](t testing.TB) *HeldSource[T] {
	s := &HeldSource[T]{Begun: make(chan *HeldLoad[T], 100), over: make(chan struct{})}
	t.Cleanup(func() { close(s.over) })
	return s
}

func (s *HeldSource[T]) Load(ctx context.Context, key string) (T, error) {
	s.loads.Add(1)
	l := &HeldLoad[T]{ctx, key, make(chan Ending[T], 1)}
	s.Begun <- l
	select {
	case e := <-l.Ends:
		return e.Value, e.Err
	case <-s.over:
		var zero T
		return zero, errors.New("the test is over")
	}
}

// Begin starts a call that loads from the source, and returns when its load has begun.
func (s *HeldSource[T]) Begin(ctx context.Context, t testing.TB, c *singlefill.Cache[T], key string) (*Call[T], *HeldLoad[T]) {
	t.Helper()
	return GoGet(ctx, c, key, s.Load), s.Next(t)
}

// Next waits for the beginning of a load.
func (s *HeldSource[T]) Next(t testing.TB) *HeldLoad[T] {
	t.Helper()
	return Receive(t, "a load begins", s.Begun)
}

func (s *HeldSource[T]) Want(t testing.TB, loads int64) {
	t.Helper()
	if n := s.loads.Load(); n != loads {
		t.Errorf("%d loads, want %d", n, loads)
	}
}

func (l *HeldLoad[T]) Give(value T)   { l.Ends <- Ending[T]{Value: value} }
func (l *HeldLoad[T]) Fail(err error) { l.Ends <- Ending[T]{Err: err} }

// A Count counts loads.
type Count struct {
	Loads   atomic.Int64 // begun so far
	Most    atomic.Int64 // at a time
	running atomic.Int64
}

// Begin counts a load until end is called.
func (c *Count) Begin() (end func()) {
	c.Loads.Add(1)
	n := c.running.Add(1)
	for most := c.Most.Load(); n > most && !c.Most.CompareAndSwap(most, n); most = c.Most.Load() {
	}
	return func() { c.running.Add(-1) }
}

// WantLoads counts the loads when all goroutines of the bubble wait.
func (c *Count) WantLoads(t testing.TB, what string, want int64) {
	t.Helper()
	synctest.Wait()
	if n := c.Loads.Load(); n != want {
		t.Errorf("%s: %d loads, want %d", what, n, want)
	}
}

// A TimedSource has a Loader that ends by itself, with value and err, and is counted.
type TimedSource struct {
	Count
	Takes time.Duration
	Heeds bool // the Loader ends with its context
	Value string
	Err   error
}

func (s *TimedSource) Load(ctx context.Context, _ string) (string, error) {
	defer s.Begin()()
	if !s.Heeds {
		time.Sleep(s.Takes)
		return s.Value, s.Err
	}
	select {
	case <-time.After(s.Takes):
		return s.Value, s.Err
	case <-ctx.Done():
		return "", ctx.Err()
	}
}

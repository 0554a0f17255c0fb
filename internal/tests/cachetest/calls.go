package cachetest

import (
	"context"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

// A Call is a GetOrLoad, or a GetOrLoadMany, in a goroutine.
type Call[T any] struct {
	Answer chan Ending[T]
	joined <-chan struct{} // closed when the call waits
}

func GoGet[T any](ctx context.Context, c *singlefill.Cache[T], key string, load singlefill.Loader[T]) *Call[T] {
	joined := make(chan struct{})
	a := &Call[T]{Answer: make(chan Ending[T], 1), joined: joined}
	go func() {
		v, err := c.GetOrLoad(redistest.OnDone(ctx, func() { close(joined) }), key, load)
		a.Answer <- Ending[T]{v, err}
	}()
	return a
}

// GoGetMany is GoGet of many keys. The call has no Waits.
func GoGetMany[T any](ctx context.Context, c *singlefill.Cache[T], keys []string,
	load singlefill.ManyLoader[T]) *Call[map[string]T] {
	a := &Call[map[string]T]{Answer: make(chan Ending[map[string]T], 1)}
	go func() {
		values, err := c.GetOrLoadMany(ctx, keys, load)
		a.Answer <- Ending[map[string]T]{values, err}
	}()
	return a
}

// Waits returns when the call has joined.
func (a *Call[T]) Waits(t testing.TB) *Call[T] {
	t.Helper()
	Receive(t, "the call waits", a.joined)
	return a
}

func (a *Call[T]) Result(t testing.TB) (T, error) {
	t.Helper()
	e := Receive(t, "the call returns", a.Answer)
	return e.Value, e.Err
}

func (a *Call[T]) Want(t testing.TB, value T) {
	t.Helper()
	v, err := a.Result(t)
	WantValue(t, v, err, value)
}

// WantErr wants an error that is err itself.
func (a *Call[T]) WantErr(t testing.TB, err error) {
	t.Helper()
	if v, got := a.Result(t); got != err {
		t.Errorf("got %v, %v; want %v itself", v, got, err)
	}
}

func WantValue[T any](t testing.TB, v T, err error, want T) {
	t.Helper()
	if err != nil || !reflect.DeepEqual(v, want) {
		t.Errorf("got %#v, %v; want %#v", v, err, want)
	}
}

// WantErrText wants an error whose text contains text.
func WantErrText(t testing.TB, what string, err error, text string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), text) {
		t.Errorf("%s: got error %v, want one with %q", what, err, text)
	}
}

// WantGet calls Get until it returns what is wanted: with client-side caching it may be late.
func WantGet[T any](t testing.TB, c *singlefill.Cache[T], key string, value T, wantErr error) {
	t.Helper()
	var v T
	var err error
	redistest.Await(t, fmt.Sprintf("Get(%.50q) returns %#v, %v", key, value, wantErr), func() bool {
		v, err = c.Get(context.Background(), key)
		return reflect.DeepEqual(v, value) && err == wantErr
	})
}

// An Answer is what a GetOrLoadInfo returned, and after how long. Its Info describes the value, and
// not which entry it is: see Of.
type Answer struct {
	Value string
	Info  singlefill.ValueInfo
	Err   error
	Took  time.Duration
}

func Ask(ctx context.Context, c *singlefill.Cache[string], key string, load singlefill.Loader[string]) Answer {
	begun := time.Now()
	v, info, err := c.GetOrLoadInfo(ctx, key, load)
	return Answer{v, Of(info), err, time.Since(begun)}
}

// Of returns what info says about how a value was served.
func Of(info singlefill.ValueInfo) singlefill.ValueInfo {
	return singlefill.ValueInfo{Stale: info.Stale, Age: info.Age, Err: info.Err}
}

// GoAsk asks in the background.
func GoAsk(ctx context.Context, c *singlefill.Cache[string], key string, load singlefill.Loader[string]) <-chan Answer {
	answers := make(chan Answer, 1)
	go func() { answers <- Ask(ctx, c, key, load) }()
	return answers
}

// Want compares with what is wanted. Errors must be the same ones, not only equal.
func (a Answer) Want(t testing.TB, what string, want Answer) {
	t.Helper()
	if a != want {
		t.Errorf("%s: got %+v, want %+v", what, a, want)
	}
}

// GetAll asks for n keys at once, and waits for them.
func GetAll(ctx context.Context, t testing.TB, c *singlefill.Cache[string], n int, load singlefill.Loader[string]) {
	var callers sync.WaitGroup
	for i := range n {
		callers.Go(func() {
			v, err := c.GetOrLoad(ctx, fmt.Sprint(i), load)
			WantValue(t, v, err, "v")
		})
	}
	callers.Wait()
}

// GoClose closes a cache in a goroutine, and returns when the cache refuses calls.
func GoClose[T any](t testing.TB, c *singlefill.Cache[T]) (closed <-chan error) {
	t.Helper()
	errs := make(chan error, 1)
	go func() { errs <- c.Close() }()
	redistest.Await(t, "the cache refuses calls", func() bool {
		return c.Delete(context.Background()) == singlefill.ErrClosed
	})
	return errs
}

// Receive takes a value that must come.
func Receive[V any](t testing.TB, what string, from <-chan V) V {
	t.Helper()
	select {
	case v := <-from:
		return v
	case <-time.After(15 * time.Second):
		t.Fatalf("not within 15s: %s", what)
		panic("unreachable")
	}
}

// WantElapsed checks how much time has passed since begun, to the nanosecond.
func WantElapsed(t testing.TB, what string, begun time.Time, want time.Duration) {
	t.Helper()
	if d := time.Since(begun); d != want {
		t.Errorf("%s after %v, want %v", what, d, want)
	}
}

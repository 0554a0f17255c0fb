package singlefilltest_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/singlefilltest"
)

var errDown = errors.New("db is down")

// upper is a Loader of the keys in capitals, except those that begin with "no".
func upper(_ context.Context, key string) (string, error) {
	if strings.HasPrefix(key, "no") {
		return "", fmt.Errorf("key %q: %w", key, singlefill.ErrNotFound)
	}
	return strings.ToUpper(key), nil
}

// A source returns what its function returns, and counts calls and the keys that they ask for.
func TestSource_Counts(t *testing.T) {
	t.Parallel()
	source := singlefilltest.NewSource(t, upper)
	if v, err := source.Load(t.Context(), "a"); v != "A" || err != nil {
		t.Errorf("Load: %q, %v", v, err)
	}
	if _, err := source.Load(t.Context(), "none"); !errors.Is(err, singlefill.ErrNotFound) {
		t.Errorf("Load: %v", err)
	}
	found, err := source.LoadMany(t.Context(), []string{"a", "none", "b"})
	if !maps.Equal(found, map[string]string{"a": "A", "b": "B"}) || err != nil {
		t.Errorf("LoadMany: %v, %v", found, err)
	}
	if n := source.Calls(); n != 3 {
		t.Errorf("%d calls", n)
	}
	for key, want := range map[string]int{"a": 2, "none": 2, "b": 1, "c": 0} {
		if n := source.Loads(key); n != want {
			t.Errorf("%d loads of %q, want %d", n, key, want)
		}
		source.WantLoads(t, key, want)
	}
}

// Fail replaces the function, also for keys that do not exist, until Fail(nil).
func TestSource_Fail(t *testing.T) {
	t.Parallel()
	source := singlefilltest.NewSource(t, upper)
	ofOther := &singlefill.ManyError{Errs: map[string]error{"other": singlefill.ErrNotFound}}
	for _, err := range []error{errDown, ofOther, singlefill.ErrNotFound, nil} {
		source.Fail(err)
		if _, got := source.Load(t.Context(), "a"); got != err {
			t.Errorf("Load: %v, want %v", got, err)
		}
		found, got := source.LoadMany(t.Context(), []string{"a"})
		wantFound, want := 0, err
		switch err {
		case singlefill.ErrNotFound: // a ManyLoader leaves the key out
			want = nil
		case nil:
			wantFound = 1
		}
		if got != want || len(found) != wantFound {
			t.Errorf("LoadMany: %v, %v; want %d values, %v", found, got, wantFound, want)
		}
	}
}

// Calls that are held go on with Release. They fail if Fail has been called by then.
func TestSource_Hold(t *testing.T) {
	both(t, func(t *testing.T) {
		source := singlefilltest.NewSource(t, upper)
		source.Hold()
		var calls sync.WaitGroup
		calls.Go(func() {
			if _, err := source.Load(t.Context(), "a"); err != errDown {
				t.Errorf("Load: %v", err)
			}
		})
		source.AwaitHeld(t, 1)
		source.Hold() // changes nothing
		calls.Go(func() {
			if _, err := source.LoadMany(t.Context(), []string{"a", "b"}); err != errDown {
				t.Errorf("LoadMany: %v", err)
			}
		})
		source.AwaitHeld(t, 2)
		source.WantLoads(t, "a", 2)
		source.Fail(errDown)
		source.Release()
		source.Release() // does nothing
		calls.Wait()
		source.Fail(nil)
		if v, err := source.Load(t.Context(), "a"); v != "A" || err != nil {
			t.Errorf("after Release: %q, %v", v, err)
		}
	})
}

// The end of its context ends a call that is held or slow.
func TestSource_Context(t *testing.T) {
	both(t, func(t *testing.T) {
		source := singlefilltest.NewSource(t, upper)
		source.Slow(time.Hour)
		for range 2 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			if _, err := source.Load(ctx, "a"); err != context.DeadlineExceeded {
				t.Errorf("Load: %v", err)
			}
			cancel()
			source.Hold()
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := source.LoadMany(ctx, []string{"a"}); err != context.Canceled {
			t.Errorf("LoadMany: %v", err)
		}
		done := make(chan error)
		ctx, cancel = context.WithCancel(t.Context())
		go func() {
			_, err := source.Load(ctx, "b")
			done <- err
		}()
		source.AwaitHeld(t, 1)
		cancel()
		if err := <-done; err != context.Canceled {
			t.Errorf("Load: %v", err)
		}
	})
}

// WantLoads reports the number, and the calls that asked for the key.
func TestSource_WantLoads(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		fail := func(load func()) func() {
			return func() {
				defer func() { _ = recover() }()
				load()
			}
		}
		var end func()
		source := singlefilltest.NewSource(t, func(ctx context.Context, key string) (string, error) {
			if end != nil {
				end()
			}
			return upper(ctx, key)
		})
		want := func(key string, n int, lines ...string) {
			t.Helper()
			text := fmt.Sprintf("singlefilltest: loads of %q: %d, want %d:", key, source.Loads(key), n) + strings.Join(lines, "\n\t")
			wantReport(t, text, func(t testing.TB) { source.WantLoads(t, key, n) })
		}
		want("a", 1, " the source was not called")

		source.Load(t.Context(), "a")
		const first = `"a" at 0s: returned after 0s`
		want("a", 2, "", first)
		want("a", 0, "", first)
		want("z", 1, "", first) // what was loaded in its place

		time.Sleep(time.Second)
		source.Slow(500 * time.Millisecond)
		source.Fail(errDown)
		source.LoadMany(t.Context(), []string{"a", "b"})
		source.Fail(nil)
		const second = `"a", "b" at 1s: failed after 500ms: db is down`
		want("a", 1, "", first, second)
		want("b", 2, "", second)

		source.Slow(0)
		end = func() { panic("ouch") }
		fail(func() { source.Load(t.Context(), "p") })()
		end = runtime.Goexit
		exited := make(chan struct{})
		go func() {
			defer close(exited)
			source.Load(t.Context(), "p")
		}()
		<-exited
		const panicked = `"p" at 1.5s: panicked or called runtime.Goexit after 0s`
		want("p", 1, "", panicked, panicked)

		source.Hold()
		go source.Load(t.Context(), "c")
		synctest.Wait()
		time.Sleep(time.Minute)
		want("c", 0, "", `"c" at 1.5s: has not ended after 1m0s`)
	})
}

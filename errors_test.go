package singlefill_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

var errDown = errors.New("the price service is down")

// Errors of Options.Errors keep their identity in other processes: a RemoteError unwraps to the error
// that the waiting process has under the same name.
func TestErrors_KeepTheirIdentity(t *testing.T) {
	theirs := errors.New("down, as the other process spells it")
	for name, test := range map[string]struct {
		loaded error
		errs   map[string]error // of the process that waits
		found  bool             // errors.Is finds theirs
		text   string           // of the RemoteError; "": the text of the load
	}{
		"bare":    {errDown, map[string]error{"down": theirs}, true, ""},
		"wrapped": {fmt.Errorf("prices: %w", errDown), map[string]error{"down": theirs}, true, ""},
		"unknown": {errDown, nil, false, ""},
		"unnamed": {errors.New("no route"), map[string]error{"down": theirs}, false, ""},
		"no text": {errors.New(""), nil, false, ""},
		"long":    {errors.New(strings.Repeat("€", 400)), nil, false, strings.Repeat("€", 341)}, // cut at a character
	} {
		cachetest.RunInBubble(t, name, func(t *testing.T, _ *miniredis.Miniredis, rdb *redis.Client) {
			loads := cachetest.NewCacheIn(t, rdb, "n", &singlefill.Options[string]{Errors: map[string]error{"down": errDown, "zz": errDown}})
			waits := cachetest.NewCacheIn(t, rdb, "n", &singlefill.Options[string]{Errors: test.errs})
			failed := cachetest.GoGet(t.Context(), loads, "k", cachetest.Takes(time.Second, "", test.loaded))
			synctest.Wait() // the load has begun
			_, got := waits.GetOrLoad(t.Context(), "k", cachetest.MustNotLoad[string](t))
			var remote *singlefill.RemoteError
			if !errors.As(got, &remote) || remote.Message != cmp.Or(test.text, test.loaded.Error()) || got.Error() != remote.Message || remote.Key != "k" || remote.Namespace != "n" {
				t.Errorf("got %v, want a RemoteError of k with the text of the load", got)
			}
			if errors.Is(got, theirs) != test.found {
				t.Errorf("errors.Is finds the named error in %q: %t, want %t", got, !test.found, test.found)
			}
			failed.WantErr(t, test.loaded)
		})
	}
}

var errNever = errors.New("never returned")

// Errors with methods that panic.
type (
	panicsOnIs     struct{ error }
	panicsOnUnwrap struct{ text string }

	// incomparable panics when it is compared with an error of its type.
	incomparable struct{ with any }
)

func (*panicsOnIs) Is(error) bool       { panic("Is") }
func (*panicsOnUnwrap) Unwrap() error   { panic("Unwrap") }
func (e *panicsOnUnwrap) Error() string { return e.text }
func (incomparable) Error() string      { return "incomparable" }

// An error whose methods panic, or that cannot be compared, is returned as it is to all callers, and
// its text to other processes.
//
//fault:failed-load
func TestGetOrLoad_ErrorThatPanics(t *testing.T) {
	for _, test := range []struct {
		name string
		err  error
		text string // in other processes
	}{
		{"Error", (*typedNil)(nil), "*singlefill_test.typedNil"},
		{"Is", &panicsOnIs{errDown}, errDown.Error()},
		{"Unwrap", &panicsOnUnwrap{"no route"}, "no route"},
		{"==", incomparable{[]int{1}}, "incomparable"},
	} {
		cachetest.RunInBubble(t, test.name, func(t *testing.T, _ *miniredis.Miniredis, rdb *redis.Client) {
			opts := &singlefill.Options[string]{
				Errors: map[string]error{"first": incomparable{[]int{2}}, "second": errNever},
				Trace:  singlefill.LogTrace(slog.New(slog.DiscardHandler), nil),
			}
			c, elsewhere := cachetest.NewCacheIn(t, rdb, "n", opts), cachetest.NewCacheIn(t, rdb, "n", opts)
			src := cachetest.NewSource[string](t)
			calls := []*cachetest.Call[string]{cachetest.GoGet(t.Context(), c, "k", src.Load)}
			load := src.Next(t)
			calls = append(calls, cachetest.GoGet(t.Context(), c, "k", src.Load))
			away := cachetest.GoGet(t.Context(), elsewhere, "k", src.Load)
			synctest.Wait() // they wait for the load
			load.Fail(test.err)
			for _, a := range calls {
				if _, err := a.Result(t); !identical(err, test.err) {
					t.Errorf("got %T, want the %T of the load", err, test.err)
				}
			}
			_, err := away.Result(t)
			if remote, ok := errors.AsType[*singlefill.RemoteError](err); !ok || !strings.Contains(remote.Message, test.text) {
				t.Errorf("another process got %v, want a RemoteError with %q", err, test.text)
			}
			_, err = c.GetOrLoadMany(t.Context(), []string{"k"}, (&manySource{err: test.err}).load)
			if many, ok := errors.AsType[*singlefill.ManyError](err); !ok || !identical(many.Errs["k"], test.err) {
				t.Errorf("GetOrLoadMany: got %T, want a ManyError with the %T of the load", err, test.err)
			}
			cachetest.WantUnlocked(t, rdb, "n", "k")
			if s := c.Stats(); s.LoadErrors != 2 || s.LoadPanics != 0 {
				t.Errorf("%d errors and %d panics counted, want 2 and 0", s.LoadErrors, s.LoadPanics)
			}
		})
	}
}

// identical is ==, also for errors that cannot be compared.
func identical(a, b error) bool {
	if _, ok := b.(incomparable); ok {
		return reflect.DeepEqual(a, b)
	}
	return a == b
}

// A panic with a value that contains itself is a PanicError. fmt would overflow the stack with it, which
// ends the process.
//
//fault:failed-load
func TestPanicError_EndlessValue(t *testing.T) {
	t.Parallel()
	endless := map[string]any{}
	endless["self"] = endless
	_, rdb := redistest.StartMini(t)
	c := cachetest.NewCache(t, rdb, &cachetest.Raw)
	_, err := c.GetOrLoad(t.Context(), "k", func(context.Context, string) (string, error) { panic(endless) })
	if p, ok := errors.AsType[*singlefill.PanicError](err); !ok || !reflect.DeepEqual(p.Value, endless) {
		t.Errorf("got %T, want a PanicError with the value", err)
	}
	cachetest.WantErrText(t, "GetOrLoad", err, "map[string]interface {}") // the type of the value
	panics := cachetest.NewCache(t, rdb, &singlefill.Options[string]{Codec: cachetest.BadCodec{Codec: singlefill.JSON, OnMarshal: func(any) error { panic(endless) }}})
	cachetest.WantErrText(t, "Set", panics.Set(t.Context(), "k", "v"), "map[string]interface {}")
}

// LoadInfo.Queued is the time for which a load waited for a slot of MaxLoads.
func TestLoadInfo_Queued(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, _ *miniredis.Miniredis, rdb *redis.Client) {
		var infos []singlefill.LoadInfo
		c := cachetest.NewCacheIn(t, rdb, "n", &singlefill.Options[string]{MaxLoads: 1, Trace: &singlefill.Trace{
			LoadDone: func(_ context.Context, info singlefill.LoadInfo) { infos = append(infos, info) },
		}})
		slow := cachetest.Takes(3*time.Second, "v", nil)
		var calls sync.WaitGroup
		calls.Go(func() { _, _ = c.GetOrLoad(t.Context(), "first", slow) })
		synctest.Wait()
		begun := time.Now()
		calls.Go(func() { _, _ = c.GetOrLoad(t.Context(), "second", slow) })
		calls.Wait()
		_ = c.Close()
		if len(infos) != 2 || infos[0].Queued != 0 || infos[1].Key != "second" ||
			infos[1].Queued != time.Since(begun)-3*time.Second || infos[1].Queued < time.Second {
			t.Errorf("LoadDone was called with %+v", infos)
		}
	})
}

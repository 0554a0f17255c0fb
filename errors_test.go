package singlefill_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
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
	}{
		"bare":    {errDown, map[string]error{"down": theirs}, true},
		"wrapped": {fmt.Errorf("prices: %w", errDown), map[string]error{"down": theirs}, true},
		"unknown": {errDown, nil, false},
		"unnamed": {errors.New("no route"), map[string]error{"down": theirs}, false},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, _ *miniredis.Miniredis, rdb *redis.Client) {
				loads := newCacheIn(t, rdb, "n", &singlefill.Options[string]{Errors: map[string]error{"down": errDown, "zz": errDown}})
				waits := newCacheIn(t, rdb, "n", &singlefill.Options[string]{Errors: test.errs})
				failed := make(chan error, 1)
				go func() {
					_, err := loads.GetOrLoad(t.Context(), "k", func(context.Context, string) (string, error) {
						time.Sleep(time.Second)
						return "", test.loaded
					})
					failed <- err
				}()
				synctest.Wait() // the load has begun
				_, got := waits.GetOrLoad(t.Context(), "k", mustNotLoad[string](t))
				var remote *singlefill.RemoteError
				if !errors.As(got, &remote) || remote.Message != test.loaded.Error() || remote.Key != "k" {
					t.Errorf("got %v, want a RemoteError of k with the text of the load", got)
				}
				if errors.Is(got, theirs) != test.found {
					t.Errorf("errors.Is finds the named error in %q: %t, want %t", got, !test.found, test.found)
				}
				if err := <-failed; err != test.loaded {
					t.Errorf("in its own process the load failed with %v, want %v unchanged", err, test.loaded)
				}
			})
		})
	}
}

// LoadInfo.Queued is the time for which a load waited for a slot of MaxLoads.
func TestLoadInfo_Queued(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *miniredis.Miniredis, rdb *redis.Client) {
		var infos []singlefill.LoadInfo
		c := newCacheIn(t, rdb, "n", &singlefill.Options[string]{MaxLoads: 1, Trace: &singlefill.Trace{
			LoadDone: func(_ context.Context, info singlefill.LoadInfo) { infos = append(infos, info) },
		}})
		slow := func(context.Context, string) (string, error) { time.Sleep(3 * time.Second); return "v", nil }
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

// New refuses names that cannot travel, and names without an error.
func TestNew_Errors(t *testing.T) {
	_, rdb := redistest.StartMini(t)
	for name, err := range map[string]error{
		"": errDown, "a\x00b": errDown, strings.Repeat("n", 101): errDown, "down": nil,
	} {
		if _, got := singlefill.New(rdb, "n", time.Minute, &singlefill.Options[string]{Errors: map[string]error{name: err}}); got == nil || !strings.Contains(got.Error(), "Options.Errors") {
			t.Errorf("New with the name %.10q and the error %v returned %v", name, err, got)
		}
	}
}

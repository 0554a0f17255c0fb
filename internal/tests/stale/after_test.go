package stale_test

import (
	"context"
	"errors"
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

// within is how long the caches of these tests wait when they have an old value.
const within = 50 * time.Millisecond

// inSlowSource runs a test with a cache that has an expired value "old" under "k".
func inSlowSource(t *testing.T, run func(t *testing.T, c *singlefill.Cache[string], rdb *redis.Client)) {
	cachetest.InBubble(t, func(t *testing.T, _ *miniredis.Miniredis, rdb *redis.Client) {
		c, err := singlefill.New(rdb, "n", time.Minute, &singlefill.Options[string]{StaleIfError: time.Hour, StaleAfter: within, Jitter: -1})
		redistest.Must(t, err)
		defer c.Close()
		redistest.Must(t, c.Set(t.Context(), "k", "old"))
		time.Sleep(time.Minute + time.Second)
		run(t, c, rdb)
	})
}

// wantOldAfter calls GetOrLoad and checks that it returns the old value after d.
func wantOldAfter(t *testing.T, c *singlefill.Cache[string], d time.Duration, load singlefill.Loader[string]) {
	t.Helper()
	begun := time.Now()
	v, info, err := c.GetOrLoadInfo(t.Context(), "k", load)
	if v != "old" || err != nil || !info.Stale || info.Err != context.DeadlineExceeded {
		t.Errorf("%q, %+v, %v; want the old value, and that StaleAfter is the reason", v, info, err)
	}
	cachetest.WantElapsed(t, "GetOrLoad returned", begun, d)
}

// With an old value at hand, callers of a source that hangs wait until the load is StaleAfter old.
// The load goes on, and its value is served when it has arrived.
func TestStaleAfter_SlowSource(t *testing.T) {
	inSlowSource(t, func(t *testing.T, c *singlefill.Cache[string], _ *redis.Client) {
		slow := cachetest.Takes(10*time.Second, "new", nil)
		wantOldAfter(t, c, within, slow)
		wantOldAfter(t, c, 0, cachetest.MustNotLoad[string](t)) // the load has been in flight for StaleAfter
		time.Sleep(20 * time.Millisecond)
		var callers sync.WaitGroup
		for range 100 {
			callers.Go(func() { wantOldAfter(t, c, 0, cachetest.MustNotLoad[string](t)) })
		}
		callers.Wait()
		time.Sleep(10 * time.Second)
		v, info, err := c.GetOrLoadInfo(t.Context(), "k", cachetest.MustNotLoad[string](t))
		if v != "new" || info.Stale || err != nil {
			t.Errorf("after the load: %q, %+v, %v", v, info, err)
		}
		if s := c.Stats(); s.Loads != 1 || s.StaleOnError != 102 {
			t.Errorf("%d loads, %d stale values; want 1, 102", s.Loads, s.StaleOnError)
		}
	})
}

// A load that ends within StaleAfter is waited for, whether it succeeds or fails. Without an old value, or
// with one beyond StaleIfError, callers wait for any load.
func TestStaleAfter_Waits(t *testing.T) {
	boom := errors.New("boom")
	for name, test := range map[string]struct {
		key    string
		passes time.Duration // before the call
		takes  time.Duration
		value  string
		err    error
		want   string
	}{
		"value": {"k", 0, within / 2, "new", nil, "new"}, "error": {"k", 0, within / 2, "", boom, "old"},
		"no old value": {"cold", 0, 10 * time.Second, "new", nil, "new"}, "too old": {"k", 2 * time.Hour, 10 * time.Second, "new", nil, "new"},
	} {
		t.Run(name, func(t *testing.T) {
			inSlowSource(t, func(t *testing.T, c *singlefill.Cache[string], _ *redis.Client) {
				time.Sleep(test.passes)
				v, info, err := c.GetOrLoadInfo(t.Context(), test.key, cachetest.Takes(test.takes, test.value, test.err))
				if v != test.want || err != nil || info.Err != test.err || info.Stale != (test.want == "old") {
					t.Errorf("%q, %+v, %v; want %q", v, info, err, test.want)
				}
			})
		})
	}
}

// A caller that waits for a load in another process gets the old value after StaleAfter, too.
func TestStaleAfter_OtherProcess(t *testing.T) {
	inSlowSource(t, func(t *testing.T, c *singlefill.Cache[string], rdb *redis.Client) {
		other := cachetest.NewCacheIn(t, rdb, "n", &singlefill.Options[string]{StaleIfError: time.Hour})
		var loading sync.WaitGroup
		loading.Go(func() {
			_, _ = other.GetOrLoad(t.Context(), "k", cachetest.Takes(10*time.Second, "new", nil))
		})
		synctest.Wait()
		wantOldAfter(t, c, within, cachetest.MustNotLoad[string](t))
		loading.Wait()
	})
}

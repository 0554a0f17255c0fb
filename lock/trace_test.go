package lock_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/locktest"
	"github.com/singlefill/singlefill/lock"
)

// The functions of several Traces are called, in the order in which they were added. A lease tells those
// that were there when it was acquired.
func TestAddTrace(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, _ *miniredis.Miniredis, rdb *redis.Client) {
		var seen []string
		trace := func(name string) *lock.Trace {
			note := func(what string) func(context.Context, lock.LeaseInfo) {
				return func(context.Context, lock.LeaseInfo) { seen = append(seen, name+" "+what) }
			}
			return &lock.Trace{Acquired: note("acquired"), Released: note("released")}
		}
		l := newLocker(t, kind, rdb, "n", &lock.Options{Trace: trace("first")})
		l.AddTrace(&lock.Trace{})
		l.AddTrace(trace("second"))
		lease := mustAcquire(t, l)
		l.AddTrace(trace("late"))
		mustRelease(t, lease)
		want := []string{"first acquired", "second acquired", "first released", "second released"}
		if !slices.Equal(seen, want) {
			t.Errorf("told %q, want %q", seen, want)
		}
	})
}

// A caller that finds the lock busy learns who holds it, at once and after a wait. Its Trace learns it, too.
func TestOptions_Holder(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, _ *miniredis.Miniredis, rdb *redis.Client) {
		defer mustRelease(t, mustTry(t, newLocker(t, kind, rdb, "n", &lock.Options{Holder: "web-1 \"a\""})))
		var e locktest.Events
		l := newLocker(t, kind, rdb, "n", &lock.Options{Trace: e.Trace()})
		for what, call := range map[string]func(context.Context) (*lock.Lease, error){"TryAcquire": l.TryAcquire, "Acquire": l.Acquire} {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			_, err := call(ctx)
			cancel()
			if want := `"n" is held by "web-1 \"a\""`; !errors.Is(err, lock.ErrBusy) || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v, want ErrBusy, %s", what, err, want)
			}
		}
		if waits := e.Of("waited"); len(waits) != 1 || waits[0].Holder != "web-1 \"a\"" {
			t.Errorf("waited for %+v", waits)
		}
	})
}

// By default the holder is this process, and a semaphore has others. A lock that is free, and kept for a
// waiter, names the waiter.
func TestOptions_HolderOfOthers(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		host, _ := os.Hostname()
		of := semaphore(t, rdb, "two", 2, nil)
		defer mustRelease(t, mustTry(t, of))
		defer mustRelease(t, mustTry(t, of))
		_, err := of.TryAcquire(t.Context())
		if want := fmt.Sprintf("is held by \"%.50s:%d\" and others", host, os.Getpid()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("TryAcquire: %v, want %s", err, want)
		}

		redistest.Mute(m)
		holder := mustTry(t, newLocker(t, "fair", rdb, "fair", nil))
		go func() {
			mustRelease(t, mustAcquire(t, newLocker(t, "fair", redistest.NewMiniClient(t, m), "fair", &lock.Options{Holder: "next"})))
		}()
		time.Sleep(time.Second)
		mustRelease(t, holder)
		if _, err := newLocker(t, "fair", rdb, "fair", nil).TryAcquire(t.Context()); err == nil || !strings.Contains(err.Error(), `"fair" is held by, or kept for, "next"`) {
			t.Errorf("TryAcquire while it is kept: %v", err)
		}
	})
}

// The caller that gets a lock after a holder that died, or whose lease was deleted, learns of it once, and by
// name. A lease that was given back in any way is none of these.
//
//fault:killed-holder
func TestTrace_Expired(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		var e locktest.Events
		want := func(when, names string) {
			t.Helper()
			var got []string
			for _, event := range e.Of("expired") {
				got = append(got, event.Name+" "+event.Holder)
			}
			if s := strings.Join(got, ", "); s != names {
				t.Errorf("%s: expired are %q, want %q", when, s, names)
			}
			e.Reset()
		}
		dies := func(name string) {
			t.Helper()
			client := redistest.NewMiniClient(t, m)
			mustTry(t, newLocker(t, kind, client, "n", &lock.Options{Holder: name}))
			_ = client.Close()
		}
		l := newLocker(t, kind, rdb, "n", &lock.Options{Trace: e.Trace()})
		dies("killed")
		mustRelease(t, mustAcquire(t, l)) // it waits
		want("after a wait", "n killed")
		mustRelease(t, mustTry(t, l))
		want("after a release", "")

		dies("killed long ago")
		time.Sleep(leaseTTL + 50*time.Second)
		mustRelease(t, mustTry(t, l))
		want("without a wait", "n killed long ago")

		lease := mustTry(t, newLocker(t, kind, rdb, "n", &lock.Options{MaxHold: time.Second}))
		time.Sleep(2 * leaseTTL)
		wantIs(t, "Release after MaxHold", lease.Release(t.Context()), lock.ErrLost)
		mustRelease(t, mustTry(t, l))
		want("after a holder that gave up", "")

		if kind != "semaphore" {
			lease = mustTry(t, newLocker(t, kind, rdb, "n", &lock.Options{Holder: "broken"}))
			m.Del(lockKey)
			mustRelease(t, mustTry(t, l))
			want("of a lock that was broken", "n broken")
			wantIs(t, "Release of the broken one", lease.Release(t.Context()), lock.ErrLost)
			mustRelease(t, mustTry(t, l))
			want("after that", "")
		}
	})
}

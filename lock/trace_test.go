package lock_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/tests/locktest"
	"github.com/singlefill/singlefill/lock"
)

// A traceScene is what a path of an attempt and a lease needs.
type traceScene struct {
	*testing.T
	m      *miniredis.Miniredis
	f      *faults
	l      *lock.Locker
	holder func() *lock.Lease // of another process
}

// tracePaths are paths of an attempt and a lease, and the calls of Trace on them. Other tests have
// Transitions of the paths that they show.
var tracePaths = map[string]struct {
	run  func(s traceScene)
	want string
}{
	"held for two renewals": {func(s traceScene) {
		lease := mustAcquire(s, s.l)
		time.Sleep(7 * time.Second)
		mustRelease(s, lease)
	}, "acquired renewed renewed released"},
	"busy": {func(s traceScene) {
		defer mustRelease(s, s.holder())
		wantBusy(s, s.l)
	}, ""},
	"waited, and gave up": {func(s traceScene) {
		defer mustRelease(s, s.holder())
		ctx, cancel := context.WithTimeout(s.Context(), time.Second)
		defer cancel()
		_, err := s.l.Acquire(ctx)
		wantIs(s, "Acquire", err, lock.ErrBusy, context.DeadlineExceeded)
	}, "waited"},
	"waited for": {func(s traceScene) {
		holder := s.holder()
		time.AfterFunc(time.Second, func() { mustRelease(s, holder) })
		mustRelease(s, mustAcquire(s, s.l))
	}, "waited acquired released"},
	"waited for until Redis fails": {func(s traceScene) {
		holder := s.holder()
		time.AfterFunc(time.Second, func() { s.f.set(refusal("OOM command not allowed"), "acquire") })
		_, err := s.l.Acquire(s.Context())
		wantIs(s, "Acquire", err, lock.ErrUnavailable)
		mustRelease(s, holder)
	}, "waited"},
	"an error": {func(s traceScene) {
		s.f.set(refusal("OOM command not allowed"))
		_, err := s.l.Acquire(s.Context())
		wantIs(s, "Acquire", err, lock.ErrUnavailable)
	}, ""},
	"a lost reply": {func(s traceScene) {
		s.f.set(replyLost, "acquire")
		time.AfterFunc(time.Millisecond, func() { s.f.set(nil) })
		mustRelease(s, mustAcquire(s, s.l))
	}, "acquired released"},
	"lost replies only": {func(s traceScene) {
		s.f.set(replyLost, "acquire")
		_, err := s.l.Acquire(s.Context())
		wantIs(s, "Acquire", err, lock.ErrAmbiguous)
		s.f.set(nil)
		time.Sleep(time.Second)
		mustRelease(s, s.holder())
	}, ""},
	"released without an answer until it has ended": {func(s traceScene) {
		lease := mustAcquire(s, s.l)
		s.f.set(silence)
		wantIs(s, "Release", lease.Release(s.Context()), lock.ErrAmbiguous)
		time.Sleep(3 * leaseTTL)
	}, "acquired lost"},
	"lost without an answer": {func(s traceScene) {
		lease := mustAcquire(s, s.l)
		s.f.set(silence)
		s.m.FlushAll()
		wantIs(s, "Release", lease.Release(s.Context()), lock.ErrAmbiguous)
		s.f.set(nil)
	}, "acquired lost"},
	"given back in the middle of a renewal": {func(s traceScene) {
		lease := mustAcquire(s, s.l)
		s.f.set(func(ctx context.Context, execute func() error) error {
			time.Sleep(leaseWaits / 2)
			return execute()
		}, "renew")
		time.Sleep(leaseTTL/3 + leaseWaits/4)
		mustRelease(s, lease)
	}, "acquired released"},
}

// Trace is called once for each transition of a lease, on every path of an attempt and a lease.
func TestTrace_TransitionsOnce(t *testing.T) {
	for what, path := range tracePaths {
		runEachKind(t, what, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
			learn(t, rdb)
			var e locktest.Events
			client, f := withFaults(t, m)
			s := traceScene{T: t, m: m, f: f, l: newLocker(t, kind, client, "n", &lock.Options{Trace: e.Trace()})}
			s.holder = func() *lock.Lease { return mustAcquire(t, newLocker(t, kind, rdb, "n", nil)) }
			mustRelease(t, mustAcquire(t, newLocker(t, kind, client, "n", nil))) // so that the time of the server is known
			time.Sleep(time.Millisecond)
			path.run(s)
			time.Sleep(time.Minute)
			var got []string
			for _, event := range e.Of("acquired", "renewed", "released", "lost", "waited") {
				got = append(got, event.What)
				if event.What == "lost" && !errors.Is(event.Err, lock.ErrLost) || event.What != "lost" && event.What != "waited" && event.Err != nil {
					t.Errorf("%s with the error %v", event.What, event.Err)
				}
			}
			f.mu.Lock()
			defer f.mu.Unlock()
			if n := len(e.Of("acquire", "renew", "release", "abandon")); n != f.failed {
				t.Errorf("told %d times of a failed command, there were %d:%s", n, f.failed, &e)
			}
			if keys := leftKeys(m); len(keys) > 0 {
				t.Errorf("%v are left", keys)
			}
			if got := strings.Join(got, " "); got != path.want {
				t.Errorf("told %q, want %q", got, path.want)
			}
		})
	}
}

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

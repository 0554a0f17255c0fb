package lock_test

import (
	"cmp"
	"context"
	"errors"
	"runtime/debug"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/locktest"
	"github.com/singlefill/singlefill/lock"
)

func TestMain(m *testing.M) {
	debug.SetGCPercent(400) // miniredis makes a Lua state for each script
	redistest.Main(m)
}

// kinds are the kinds of locks. Each has one holder at most.
var kinds = []string{"mutex", "fair", "semaphore"}

// newLocker returns a Locker of one of the kinds.
func newLocker(t testing.TB, kind string, rdb redis.UniversalClient, name string, opts *lock.Options) *lock.Locker {
	t.Helper()
	l, err := locktest.Kind{Name: kind, Size: 1}.Open(rdb, name, opts)
	redistest.Must(t, err)
	return l
}

// eachKind runs a test for each of the kinds, in parallel.
func eachKind(t *testing.T, run func(t *testing.T, kind string)) {
	locktest.EachKind(t, func(t *testing.T, k locktest.Kind) { run(t, k.Name) })
}

// inBubble runs a test with a miniredis that lives by the bubble's clock. The background of its
// calls has a minute to finish. A goroutine that is left then, as of a lease that is not released,
// fails the test.
func inBubble(t *testing.T, run func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client)) {
	synctest.Test(t, func(t *testing.T) {
		m, rdb := redistest.StartMini(t)
		defer time.Sleep(time.Minute)
		run(t, m, rdb)
	})
}

// eachKindInBubble runs a test for each of the kinds, each in a bubble.
func eachKindInBubble(t *testing.T, run func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client)) {
	eachKind(t, func(t *testing.T, kind string) {
		inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) { run(t, kind, m, rdb) })
	})
}

// runInBubble is inBubble as a subtest.
func runInBubble(t *testing.T, name string, run func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client)) {
	t.Run(name, func(t *testing.T) { inBubble(t, run) })
}

// runEachKind is eachKindInBubble as a subtest.
func runEachKind(t *testing.T, name string,
	run func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client)) {
	t.Run(name, func(t *testing.T) { eachKindInBubble(t, run) })
}

// patient returns options for tests by the real clock that see only the errors which they have
// made, also on a busy machine. What o sets is kept.
func patient(o lock.Options) *lock.Options {
	o.RedisTimeout = cmp.Or(o.RedisTimeout, 9*time.Second)
	o.TTL = cmp.Or(o.TTL, time.Minute)
	o.WaiterTTL = cmp.Or(o.WaiterTTL, time.Minute)
	return &o
}

func mustAcquire(t testing.TB, l *lock.Locker) *lock.Lease {
	t.Helper()
	lease, err := l.Acquire(t.Context())
	if err != nil {
		t.Fatalf("Acquire: %v", err)
	}
	return lease
}

// mustTry acquires a lease that is free.
func mustTry(t testing.TB, l *lock.Locker) *lock.Lease {
	t.Helper()
	lease, err := l.TryAcquire(t.Context())
	if err != nil {
		t.Fatalf("TryAcquire: %v", err)
	}
	return lease
}

func mustRelease(t testing.TB, lease *lock.Lease) {
	t.Helper()
	if err := lease.Release(t.Context()); err != nil {
		t.Errorf("Release: %v", err)
	}
}

// wantBusy checks that the lock is held.
func wantBusy(t testing.TB, l *lock.Locker) {
	t.Helper()
	if lease, err := l.TryAcquire(t.Context()); !errors.Is(err, lock.ErrBusy) {
		t.Errorf("TryAcquire while it is held: %v, %v; want ErrBusy", lease, err)
		_ = lease.Release(t.Context())
	}
}

// wantIs checks an error by errors.Is, and that it is no other error of this package. A nil in want says nothing.
func wantIs(t testing.TB, what string, err error, want ...error) {
	t.Helper()
	for _, w := range want {
		if w != nil && !errors.Is(err, w) {
			t.Errorf("%s: %v, want it to be %q", what, err, w)
		}
	}
	for _, other := range []error{lock.ErrBusy, lock.ErrLost, lock.ErrUnavailable, lock.ErrAmbiguous} {
		if !slices.Contains(want, other) && errors.Is(err, other) {
			t.Errorf("%s: %v, want it not to be %q", what, err, other)
		}
	}
}

// wantElapsed checks how much time has passed since begun, to the nanosecond. Use it in bubbles
// only.
func wantElapsed(t testing.TB, what string, begun time.Time, want time.Duration) {
	t.Helper()
	if d := time.Since(begun); d != want {
		t.Errorf("%s after %v, want %v", what, d, want)
	}
}

func wantHeld(t testing.TB, lease *lock.Lease) {
	t.Helper()
	if cause := context.Cause(lease.Context()); cause != nil {
		t.Errorf("the context has ended by %v", cause)
	}
}

// wantLost waits until the lease is lost, but not for ever: a bubble would renew it endlessly.
func wantLost(t testing.TB, lease *lock.Lease) {
	t.Helper()
	select {
	case <-lease.Context().Done():
		if cause := context.Cause(lease.Context()); !errors.Is(cause, lock.ErrLost) {
			t.Errorf("the cause is %v, want ErrLost", cause)
		}
	case <-time.After(10 * time.Minute):
		t.Error("the lease's context does not end")
	}
}

// keysOf returns the keys of a name, without {name}:lock, and their TTLs: "" is the lock itself,
// ":ended" has the marks. A TTL of -1 is none. The name must not begin with '}' or '%'.
func keysOf(t testing.TB, rdb redis.UniversalClient, name string) map[string]time.Duration {
	t.Helper()
	ttls := make(map[string]time.Duration)
	for _, suffix := range []string{"", ":fence", ":ended", ":next", ":waiting", ":queue", ":alive", ":details"} {
		left, err := rdb.PTTL(context.Background(), "{"+name+"}:lock"+suffix).Result()
		redistest.Must(t, err)
		if left != -2 { // it exists
			ttls[suffix] = left
		}
	}
	return ttls
}

// wantKeys checks that the name has exactly these keys, named as by keysOf, and that each has a
// TTL. The marks, ":ended", are only checked if want has them.
func wantKeys(t testing.TB, rdb redis.UniversalClient, name string, want ...string) {
	t.Helper()
	var got []string
	for key, left := range keysOf(t, rdb, name) {
		if left == -1 {
			t.Errorf("%q of %.50q has no TTL", key, name)
		}
		if key != ":ended" || slices.Contains(want, key) {
			got = append(got, key)
		}
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("%.50q has the keys %q, want %q", name, got, want)
	}
}

// Every kind of lock works on every kind of client, with as many holders as places: the least that must work.
func TestLocker_EveryKindOfClient(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		for _, k := range locktest.Kinds {
			t.Run(k.Name, func(t *testing.T) {
				t.Parallel()
				name := redistest.Namespace(t)
				here := k.Locker(t, rdb, name, locktest.Patient, locktest.Long)
				// With another TTL: here wakes the waiters of there through the server only.
				there := k.Locker(t, rdb, name, locktest.Patient, locktest.Long+time.Second)
				leases := k.Fill(t, here)
				wantBusy(t, here.Locker)
				wantBusy(t, there.Locker)
				held := []string{"", ":fence"}
				if k.Name == "semaphore" {
					held = append(held, ":details")
				}
				wantKeys(t, rdb, name, held...)
				got := k.Wait(t, there)
				for _, lease := range leases {
					locktest.Release(t, lease)
				}
				locktest.Release(t, got())
				wantKeys(t, rdb, name, ":fence", ":ended")
			})
		}
	})
}

// A closed client ends calls at once, and nothing goes on in the background.
//
//fault:release-twice
func TestLocker_ClosedClient(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		client, f := withFaults(t, m)
		l := newLocker(t, kind, client, "n", nil)
		lease, forgotten := mustAcquire(t, l), mustAcquire(t, newLocker(t, kind, client, "other", nil))
		_ = client.Close()
		begun := time.Now()
		err := lease.Release(t.Context())
		wantIs(t, "Release", err, lock.ErrUnavailable, redis.ErrClosed)
		wantIs(t, "the second Release", lease.Release(t.Context()), lock.ErrUnavailable, redis.ErrClosed)
		_, err = l.Acquire(t.Context())
		wantIs(t, "Acquire", err, lock.ErrUnavailable, redis.ErrClosed)
		_, err = l.TryAcquire(t.Context())
		wantIs(t, "TryAcquire", err, lock.ErrUnavailable, redis.ErrClosed)
		wantElapsed(t, "all that returns", begun, 0)
		f.take()
		wantLost(t, forgotten)
		wantElapsed(t, "the other lease is lost", begun, leaseTTL-leaseMargin)
		f.take()
		time.Sleep(time.Hour)
		if ops := f.take(); ops != "abandon" {
			t.Errorf("it tried %q, want once to give back what was lost", ops)
		}
	})
}

package lock_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"
)

func TestMain(m *testing.M) { redistest.Main(m) }

// kinds are those of which one lease is held at a time.
var kinds = []string{"mutex", "fair", "semaphore"}

// newLocker returns a Locker of one of the kinds.
func newLocker(t testing.TB, kind string, rdb redis.UniversalClient, name string, opts *lock.Options) *lock.Locker {
	t.Helper()
	var l *lock.Locker
	var err error
	switch kind {
	case "mutex":
		l, err = lock.NewMutex(rdb, name, opts)
	case "fair":
		l, err = lock.NewFairMutex(rdb, name, opts)
	case "semaphore":
		l, err = lock.NewSemaphore(rdb, name, 1, opts)
	default:
		t.Fatalf("no kind is called %q", kind)
	}
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// eachKind runs a test for each of the kinds, in parallel.
func eachKind(t *testing.T, run func(t *testing.T, kind string)) {
	t.Parallel()
	for _, kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			run(t, kind)
		})
	}
}

// inBubble runs a test with a miniredis that lives by the bubble's clock. What calls have left to be done behind
// them has a minute for it; a goroutine that is left then, as of a lease that is not released, fails the test.
func inBubble(t *testing.T, run func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client)) {
	synctest.Test(t, func(t *testing.T) {
		m, rdb := redistest.StartMini(t)
		defer time.Sleep(time.Minute)
		run(t, m, rdb)
	})
}

// eachKindInBubble runs a test for each of the kinds, in a bubble of its own.
func eachKindInBubble(t *testing.T, run func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client)) {
	eachKind(t, func(t *testing.T, kind string) {
		inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) { run(t, kind, m, rdb) })
	})
}

// patient returns options for tests by the real clock that want to see no errors but those that they have made,
// on a machine that is busy with others. What o sets is kept.
func patient(o lock.Options) *lock.Options {
	if o.RedisTimeout == 0 {
		o.RedisTimeout = 3 * time.Second
	}
	if o.TTL == 0 {
		o.TTL = max(15*time.Second, 4*o.RedisTimeout)
	}
	if o.WaiterTTL == 0 {
		o.WaiterTTL = max(15*time.Second, 4*o.RedisTimeout)
	}
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

func mustRelease(t testing.TB, lease *lock.Lease) {
	t.Helper()
	if err := lease.Release(t.Context()); err != nil {
		t.Fatalf("Release: %v", err)
	}
}

// wantBusy checks that somebody holds it.
func wantBusy(t testing.TB, l *lock.Locker) {
	t.Helper()
	if lease, err := l.TryAcquire(t.Context()); err != lock.ErrBusy {
		t.Errorf("TryAcquire while it is held: %v, %v; want ErrBusy itself", lease, err)
		_ = lease.Release(t.Context())
	}
}

// wantIs checks an error by errors.Is, and that it is no other of this package's.
func wantIs(t testing.TB, what string, err error, want ...error) {
	t.Helper()
	for _, w := range want {
		if !errors.Is(err, w) {
			t.Errorf("%s: %v, want it to be %q", what, err, w)
		}
	}
	for _, other := range []error{lock.ErrBusy, lock.ErrLost, lock.ErrUnavailable, lock.ErrAmbiguous} {
		if !slices.Contains(want, other) && errors.Is(err, other) {
			t.Errorf("%s: %v, want it not to be %q", what, err, other)
		}
	}
}

// wantElapsed checks how much time has passed since begun, to the nanosecond. Use it in bubbles only.
func wantElapsed(t testing.TB, what string, begun time.Time, want time.Duration) {
	t.Helper()
	if d := time.Since(begun); d != want {
		t.Errorf("%s after %v, want %v", what, d, want)
	}
}

// keysOf returns the keys of a name, without {name}:lock, and their TTLs: "" is the lock itself, ":fence",
// ":queue", ":alive" and ":details" are what they say, ":ended" has the marks. A TTL of -1 is none. The
// name must not begin with '}' or '%'.
func keysOf(t testing.TB, rdb redis.UniversalClient, name string) map[string]time.Duration {
	t.Helper()
	ctx := context.Background() // it may be called by a Cleanup
	prefix := "{" + name + "}:lock"
	pattern := strings.NewReplacer("\\", "\\\\", "*", "\\*", "?", "\\?", "[", "\\[", "]", "\\]").Replace(prefix) + "*"
	var mu sync.Mutex
	var all []string // protected by mu
	list := func(ctx context.Context, node redis.Cmdable) error {
		found, err := node.Keys(ctx, pattern).Result()
		mu.Lock()
		defer mu.Unlock()
		all = append(all, found...)
		return err
	}
	var err error
	if cluster, ok := rdb.(*redis.ClusterClient); ok {
		err = cluster.ForEachMaster(ctx, func(ctx context.Context, node *redis.Client) error { return list(ctx, node) })
	} else {
		err = list(ctx, rdb)
	}
	if err != nil {
		t.Fatal(err)
	}
	ttls := make(map[string]time.Duration)
	for _, key := range all {
		left, err := rdb.PTTL(ctx, key).Result()
		if err != nil {
			t.Fatal(err)
		}
		if left != -2 { // it has expired meanwhile
			ttls[strings.TrimPrefix(key, prefix)] = left
		}
	}
	return ttls
}

// wantKeys checks that the name has exactly these keys, named as by keysOf, and that each has a TTL. Tombstones
// count as one key ":ended", which is not asked for if it is not in want.
func wantKeys(t testing.TB, rdb redis.UniversalClient, name string, want ...string) {
	t.Helper()
	var got []string
	for key, left := range keysOf(t, rdb, name) {
		if left == -1 {
			t.Errorf("%q of %.50q has no TTL", key, name)
		}
		if strings.HasPrefix(key, ":ended") {
			key = ":ended"
		}
		if !slices.Contains(got, key) && (key != ":ended" || slices.Contains(want, key)) {
			got = append(got, key)
		}
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("%.50q has the keys %q, want %q", name, got, want)
	}
}

// events records what a Trace is told.
type events struct {
	mu   sync.Mutex
	list []event // protected by mu
}

type event struct {
	what string // acquired, released, lost, renewed, waited, or the op of a RedisError
	at   time.Time
	lock.LeaseInfo
}

func (e *events) add(what string, info lock.LeaseInfo) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.list = append(e.list, event{what, time.Now(), info})
}

func (e *events) trace() *lock.Trace {
	on := func(what string) func(context.Context, lock.LeaseInfo) {
		return func(_ context.Context, info lock.LeaseInfo) { e.add(what, info) }
	}
	return &lock.Trace{
		Acquired: on("acquired"), Released: on("released"), Lost: on("lost"), Renewed: on("renewed"), Waited: on("waited"),
		RedisError: func(_ context.Context, op string, err error) { e.add(op, lock.LeaseInfo{Err: err}) },
	}
}

// all returns what has been told so far.
func (e *events) all() []event {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.list)
}

// of returns those with one of the names.
func (e *events) of(what ...string) []event {
	return slices.DeleteFunc(e.all(), func(e event) bool { return !slices.Contains(what, e.what) })
}

// transitions names the events of leases, in order, but not renewals.
func (e *events) transitions() string {
	var names []string
	for _, event := range e.of("acquired", "released", "lost") {
		names = append(names, event.what)
	}
	return strings.Join(names, " ")
}

func (e *events) String() string {
	var b strings.Builder
	for _, e := range e.all() {
		fmt.Fprintf(&b, "\n%s %+v", e.what, e.LeaseInfo)
	}
	return b.String()
}

// One after the other, on every kind of client: the least that must work.
func TestEveryKindOfClientWorksWithEveryKindOfLock(t *testing.T) {
	t.Parallel()
	redistest.Each(t, func(t *testing.T, rdb redis.UniversalClient) {
		for _, kind := range kinds {
			t.Run(kind, func(t *testing.T) {
				t.Parallel()
				name := redistest.Namespace(t)
				var e events
				opts := patient(lock.Options{Trace: e.trace()})
				here, there := newLocker(t, kind, rdb, name, opts), newLocker(t, kind, rdb, name, opts)
				lease := mustAcquire(t, here)
				wantBusy(t, here)
				wantBusy(t, there)
				held := []string{"", ":fence"}
				if kind == "semaphore" {
					held = append(held, ":details")
				}
				wantKeys(t, rdb, name, held...)

				var wg sync.WaitGroup
				inside, last := 0, lease.Fence() // the lock protects them: -race says if it does not
				for range 4 {
					wg.Go(func() {
						for range 3 {
							err := there.Do(t.Context(), func(ctx context.Context) error {
								if inside++; inside != 1 {
									t.Errorf("%d at once", inside)
								}
								inside--
								return ctx.Err()
							})
							if err != nil {
								t.Error(err)
							}
						}
					})
				}
				redistest.Await(t, "somebody waits", func() bool { return waiting(t, rdb, kind, name) })
				mustRelease(t, lease)
				wg.Wait()
				next := mustAcquire(t, here)
				if next.Fence() <= last {
					t.Errorf("the fence is %d after %d", next.Fence(), last)
				}
				mustRelease(t, next)
				wantKeys(t, rdb, name, ":fence", ":ended")
				if n := len(e.of("acquire", "renew", "release", "abandon")); n != 0 {
					t.Errorf("%d commands have failed:%s", n, &e)
				}
			})
		}
	})
}

// waiting reports whether a waiter is known to Redis; only a fair mutex tells.
func waiting(t testing.TB, rdb redis.UniversalClient, kind, name string) bool {
	if kind != "fair" {
		return true
	}
	n, err := rdb.ZCard(t.Context(), "{"+name+"}:lock:queue").Result()
	if err != nil {
		t.Fatal(err)
	}
	return n > 0
}

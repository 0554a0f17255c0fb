package locktest

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"
)

// A Locker is a lock.Locker, and the calls of its Trace.
type Locker struct {
	*lock.Locker
	Events
}

// Locker makes a Locker of the kind, on a connection that exists: making it takes longer than a
// command.
func (k Kind) Locker(t testing.TB, rdb redis.UniversalClient, name string, redisTimeout, ttl time.Duration) *Locker {
	t.Helper()
	_ = rdb.Ping(context.Background())
	l := new(Locker)
	var err error
	l.Locker, err = k.Open(rdb, name, &lock.Options{
		TTL: ttl, RedisTimeout: redisTimeout, WaiterTTL: 4 * redisTimeout, Trace: l.Trace(),
	})
	redistest.Must(t, err)
	return l
}

// Take acquires a lease. The end of the test releases it, if it is still held.
func Take(t testing.TB, l *Locker) *lock.Lease {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), awaitLimit)
	defer cancel()
	lease, err := l.Acquire(ctx)
	if err != nil {
		t.Fatalf("Acquire = %v", err)
	}
	t.Cleanup(func() { _ = lease.Release(context.Background()) })
	return lease
}

// Release releases a lease that must not have been lost.
func Release(t testing.TB, l *lock.Lease) {
	t.Helper()
	if err := l.Release(context.Background()); err != nil {
		t.Errorf("Release = %v", err)
	}
}

// WantLost waits until the context of a lease has ended. It checks the cause, and that Release and
// Trace agree.
func (l *Locker) WantLost(t testing.TB, lease *lock.Lease, because string) {
	t.Helper()
	select {
	case <-lease.Context().Done():
	case <-time.After(awaitLimit):
		t.Fatal("the lease's context does not end")
	}
	if err := context.Cause(lease.Context()); !errors.Is(err, lock.ErrLost) {
		t.Errorf("the lease's context has ended by %v, want ErrLost", err)
	}
	if err := lease.Release(context.Background()); !errors.Is(err, lock.ErrLost) {
		t.Errorf("Release = %v, want ErrLost", err)
	}
	var why error
	redistest.Await(t, "Trace is told of the loss", func() bool {
		for _, e := range l.Of("lost") {
			if e.Fence == lease.Fence() {
				why = e.Err
			}
		}
		return why != nil
	})
	if !errors.Is(why, lock.ErrLost) || !strings.Contains(why.Error(), because) {
		t.Errorf("Trace was told %v, want ErrLost because %q", why, because)
	}
}

// NotifyAsked returns a context that never ends, and closes asked when an Acquire with it has asked.
func NotifyAsked() (ctx context.Context, asked <-chan struct{}) {
	c := make(chan struct{})
	return redistest.OnDone(context.Background(), func() { close(c) }), c
}

package lock_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/locktest"
	"github.com/singlefill/singlefill/lock"
)

// Faults that concern the queue of a fair mutex.

var fair = locktest.KindOf("fair")

func (p proxied) queued() int64 {
	return p.s.Admin().ZCard(p.t.Context(), locktest.Key(p.name)+":queue").Val()
}

func (p proxied) awaitQueued(n int64) {
	p.t.Helper()
	redistest.Await(p.t, fmt.Sprint(n, " in the queue"), func() bool { return p.queued() == n })
}

func (p proxied) awaitNothing() {
	p.t.Helper()
	redistest.Await(p.t, "there is neither a holder nor a waiter", func() bool {
		keys, _ := p.left()
		return len(keys) == 0
	})
}

type result struct {
	lease *lock.Lease
	err   error
}

func acquire(ctx context.Context, l *locktest.Locker) <-chan result {
	c := make(chan result, 1)
	go func() {
		lease, err := l.Acquire(ctx)
		c <- result{lease, err}
	}()
	return c
}

// A grant whose waiter leaves before the reply is given back in the same step as its place.
//
//fault:cancelled
func TestNewFairMutex_GrantWhileLeaving(t *testing.T) {
	t.Parallel()
	p := behindProxy(t, fair, redistest.Start(t))
	lease := locktest.Take(t, p.direct())
	ctx, cancel := context.WithCancel(t.Context())
	got := acquire(ctx, p.through(locktest.Patient))
	p.awaitQueued(1)
	held := p.on("acquire", redistest.HoldReply)
	locktest.Release(t, lease)
	redistest.Await(t, "the waiter is granted the lease, and does not know", func() bool {
		return p.Holders(t, p.s.Admin(), p.name) == 1
	})
	awaitFault(t, held)
	cancel()
	r := <-got
	if r.lease != nil || !errors.Is(r.err, lock.ErrAmbiguous) || !errors.Is(r.err, context.Canceled) {
		t.Errorf("Acquire: %v, %v", r.lease, r.err)
	}
	p.awaitNothing()
	locktest.Release(t, locktest.Take(t, p.direct()))
	held.Release()
	p.awaitNothing()
}

// A waiter whose clean-up was refused leaves the queue as soon as it may write.
//
//fault:missing-right
func TestNewFairMutex_LeavesWhenItMayWrite(t *testing.T) {
	t.Parallel()
	p := behindProxy(t, fair, redistest.Start(t))
	lease := locktest.Take(t, p.direct())
	waiter, err := lock.NewFairMutex(p.s.Client(t), p.name, &lock.Options{WaiterTTL: time.Hour})
	redistest.Must(t, err)
	ended := make(chan error, 1)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	go func() { _, err := waiter.Acquire(ctx); ended <- err }()
	p.awaitQueued(1)
	redistest.Do(t, p.s.Admin(), "config", "set", "min-replicas-to-write", "1")
	if err := <-ended; !errors.Is(err, context.DeadlineExceeded) { // busy, if it has not asked since
		t.Errorf("Acquire: %v, want the end of its context", err)
	}
	redistest.Do(t, p.s.Admin(), "config", "set", "min-replicas-to-write", "0")
	p.awaitQueued(0)
	locktest.Release(t, lease)
}

// A missing right shows before a script changes anything that would need it: the mutex is not held,
// and no key is without a TTL. Nothing else could mend that, since cleaning up needs rights too.
//
//fault:missing-right
func TestNewFairMutex_MissingRight(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	locker := func(name string, change ...func(*redis.Options)) *locktest.Locker {
		return fair.Locker(t, s.Client(t, change...), name, locktest.Patient, locktest.Long)
	}
	without := func(name string, rules ...string) *locktest.Locker {
		return locker(name, s.User(t, append([]string{"~*", "&*", "+@all"}, rules...)...))
	}
	exist := func(name string, parts ...string) int64 {
		keys := make([]string, len(parts))
		for i, part := range parts {
			keys[i] = locktest.Key(name) + part
		}
		return s.Admin().Exists(t.Context(), keys...).Val()
	}
	wantNamed := func(err error) {
		t.Helper()
		if err == nil || errors.Is(err, lock.ErrBusy) {
			t.Errorf("Acquire = %v, want it to say what to allow", err)
		}
	}

	l := without("endless", "-pexpire", "-zrem")
	holder := locktest.Take(t, locker("endless"))
	_, err := l.Acquire(t.Context())
	wantNamed(err)
	if n := exist("endless", ":queue", ":alive"); n != 0 {
		t.Errorf("there are %d of the queue's two keys, without a TTL", n)
	}
	locktest.Release(t, holder)

	l = without("taker", "-zrem", "-del") // without DEL what it takes stays
	holder = locktest.Take(t, locker("taker"))
	got := acquire(t.Context(), l)
	redistest.Await(t, "it waits", func() bool { return exist("taker", ":queue") == 1 })
	locktest.Release(t, holder)
	wantNamed((<-got).err)
	if n := exist("taker", ""); n != 0 {
		t.Error("the server says that it holds the mutex")
	}
}

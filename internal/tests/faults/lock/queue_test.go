package lock_test

import (
	"context"
	"errors"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/locktest"
	"github.com/singlefill/singlefill/lock"
)

// Faults that concern the queue of a fair mutex.

var fair = locktest.KindOf("fair")

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

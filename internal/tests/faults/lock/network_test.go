package lock_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/locktest"
	"github.com/singlefill/singlefill/lock"
)

// A server that cannot be reached.

// A black hole around a holder costs it the lease, and does not affect other holders when it ends.
//
//fault:isolated-holder
func TestLease_BlackHole(t *testing.T) {
	t.Parallel()
	const ttl = 1800 * time.Millisecond
	s := redistest.Start(t)
	p := redistest.NewProxy(t, s.Addr)
	type cut struct {
		heldLock
		before string
		others []*lock.Lease
	}
	var all []cut
	for _, k := range locktest.Kinds {
		all = append(all, cut{heldLock: hold(t, k, p.Client(t), k.Name, hasty, ttl)})
	}
	begun := time.Now()
	p.BlackHole(true)
	for i := range all {
		c := &all[i]
		c.others = c.Fill(t, c.Locker(t, s.Client(t), c.Name, locktest.Patient, locktest.Long))
		c.before = c.State(t, s.Admin(), c.Name)
		for _, l := range c.leases {
			c.holder.WantLost(t, l, notRenewed)
		}
	}
	redistest.Await(t, "three TTLs are over", func() bool { return time.Since(begun) > 3*ttl })
	p.BlackHole(false)
	for _, c := range all {
		l := c.Locker(t, p.Client(t), c.Name, locktest.Patient, locktest.Long)
		if _, err := l.TryAcquire(t.Context()); !errors.Is(err, lock.ErrBusy) {
			t.Errorf("%s: TryAcquire = %v, want ErrBusy", c.Name, err)
		}
		if now := c.State(t, s.Admin(), c.Name); now != c.before {
			t.Errorf("the lock had %s, and has %s", c.before, now)
		}
		for _, l := range c.others {
			locktest.Release(t, l)
		}
		c.WantFree(t, s, c.Name)
	}
}

// open makes a Locker with the default options.
func open(t testing.TB, k locktest.Kind, rdb redis.UniversalClient) *lock.Locker {
	t.Helper()
	l, err := k.Open(rdb, k.Name, nil)
	redistest.Must(t, err)
	return l
}

// A missing server is ErrUnavailable, however long the client dials: it dials five times, with
// pauses, so that RedisTimeout may pass without anything sent.
//
//fault:unreachable-lock
func TestErrUnavailable_LongDials(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	rdb := redis.NewClient(&redis.Options{Addr: s.Addr})
	t.Cleanup(func() { _ = rdb.Close() })
	held := make(map[string]*lock.Lease)
	for _, k := range locktest.Kinds {
		lease, err := open(t, k, rdb).Acquire(t.Context())
		redistest.Must(t, err)
		held[k.Name] = lease
	}
	s.Kill()
	for _, k := range locktest.Kinds {
		l := open(t, k, rdb)
		if _, err := l.TryAcquire(t.Context()); !errors.Is(err, lock.ErrUnavailable) || errors.Is(err, lock.ErrAmbiguous) {
			t.Errorf("%s: TryAcquire: %v, want ErrUnavailable", k.Name, err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		if _, err := l.Acquire(ctx); !errors.Is(err, lock.ErrUnavailable) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: Acquire: %v, want ErrUnavailable and the end of ctx", k.Name, err)
		}
		err := held[k.Name].Release(t.Context())
		// The command may have been sent over the old connection.
		if !errors.Is(err, lock.ErrUnavailable) && !errors.Is(err, lock.ErrAmbiguous) {
			t.Errorf("%s: Release: %v", k.Name, err)
		}
	}
}

// A caller whose context ends while Redis cannot be reached does not get ErrBusy.
//
//fault:unreachable-lock
func TestErrUnavailable_NeverBusy(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	rdb := s.Client(t, func(o *redis.Options) { o.MaxRetries, o.DialerRetries = -1, 1 })
	s.Kill()
	for _, k := range locktest.Kinds {
		l := open(t, k, rdb)
		for patience := range 10 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Duration(1+10*patience)*time.Millisecond)
			if _, err := l.TryAcquire(ctx); errors.Is(err, lock.ErrBusy) || err == nil {
				t.Errorf("%s: TryAcquire: %v", k.Name, err)
			}
			cancel()
		}
	}
}

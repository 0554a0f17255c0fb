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

// A server that is frozen, asleep or silent for some time.

// A server that is frozen for less than TTL costs no lease.
//
//fault:short-freeze
func TestLease_ShortFreeze(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	all := holdAll(t, s, hasty, 9*time.Second)
	s.Freeze()
	for _, h := range all {
		redistest.Await(t, "a renewal of each has failed", func() bool { return len(h.holder.Errors()["renew"]) >= h.Size })
	}
	s.Thaw()
	for _, h := range all {
		h.awaitRenewal(t)
		if _, err := h.Locker(t, s.Client(t), h.Name, locktest.Patient, locktest.Long).TryAcquire(t.Context()); !errors.Is(err, lock.ErrBusy) {
			t.Errorf("TryAcquire of another = %v, want ErrBusy", err)
		}
		h.release(t)
		h.WantFree(t, s, h.Name)
	}
}

// A server that is silent for two TTLs costs the lease, and keeps the lock from no later caller.
//
//fault:long-freeze
func TestLease_LongFreeze(t *testing.T) {
	t.Parallel()
	const ttl = 1800 * time.Millisecond
	for what, silence := range map[string]func(t *testing.T, s *redistest.Server) (end func()){
		"frozen": func(t *testing.T, s *redistest.Server) func() { s.Freeze(); return s.Thaw },
		"writes paused": func(t *testing.T, s *redistest.Server) func() {
			do(t, s, "client", "pause", 600_000, "write")
			return func() { do(t, s, "client", "unpause") }
		},
		"paused": func(t *testing.T, s *redistest.Server) func() {
			do(t, s, "client", "pause", (2 * ttl).Milliseconds(), "all")
			return func() {}
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			s := redistest.Start(t)
			others := make(map[string]*locktest.Locker)
			for _, k := range locktest.Kinds {
				others[k.Name] = k.Locker(t, s.Client(t), k.Name, hasty, ttl)
			}
			all := holdAll(t, s, hasty, ttl)
			end := silence(t, s)
			begun := time.Now()
			eachHeld(all, func(h heldLock) {
				if _, err := others[h.Name].Acquire(t.Context()); !errors.Is(err, lock.ErrAmbiguous) {
					t.Errorf("%s: Acquire during the silence = %v, want ErrAmbiguous", h.Name, err)
				}
			})
			for _, h := range all {
				for _, l := range h.leases {
					h.holder.WantLost(t, l, notRenewed)
				}
			}
			redistest.Await(t, "two TTLs are over", func() bool { return time.Since(begun) > 2*ttl })
			end()
			for _, h := range all {
				h.WantFree(t, s, h.Name)
			}
		})
	}
}

// A server that thaws after Acquire has given up executes the acquire then, before or after its
// undoing, and nothing is left.
//
//fault:long-freeze
func TestAcquire_ServerThawsLater(t *testing.T) {
	locktest.EachKind(t, func(t *testing.T, k locktest.Kind) {
		s := redistest.Start(t)
		for _, act := range []string{"acquire", "abandon"} {
			k.Command(t, s, act)
		}
		for i := range 20 {
			name := fmt.Sprint("name", i)
			// It is connected, so that the command is sent.
			l := k.Locker(t, s.Client(t, noRetries), name, 30*time.Millisecond, locktest.Long)
			s.ResetCalls()
			s.Freeze()
			if _, err := l.Acquire(t.Context()); !errors.Is(err, lock.ErrAmbiguous) {
				t.Errorf("Acquire = %v, want ErrAmbiguous", err)
			}
			s.Thaw()
			redistest.Await(t, "the acquire is executed, and undone or refused", func() bool {
				calls := s.AllCalls()
				_, marks := locktest.Left(t, s.Admin(), name)
				return calls["zscore"] > 0 && len(marks) == 1
			})
			if left, _ := locktest.Left(t, s.Admin(), name); len(left) > 0 {
				t.Errorf("left behind: %q", left)
			}
		}
	})
}

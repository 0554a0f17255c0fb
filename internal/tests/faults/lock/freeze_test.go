package lock_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/locktest"
	"github.com/singlefill/singlefill/lock"
)

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

// A server that is asleep is not ErrBusy, and costs no lease.
//
//fault:short-freeze
func TestTryAcquire_ServerAsleep(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	all := holdAll(t, s, hasty, 9*time.Second)
	others := make(map[string]*locktest.Locker)
	for _, h := range all {
		others[h.Name] = h.Locker(t, s.Client(t, noRetries), h.Name, hasty, locktest.Long)
	}
	slept := make(chan struct{})
	once := s.Client(t, unbounded)
	go func() {
		defer close(slept)
		once.Do(context.Background(), "debug", "sleep", "1.5")
	}()
	asks := s.Client(t, noRetries).WithTimeout(50 * time.Millisecond)
	redistest.Await(t, "the server is asleep", func() bool { return asks.Ping(context.Background()).Err() != nil })
	eachHeld(all, func(h heldLock) {
		lease, err := others[h.Name].TryAcquire(t.Context())
		if lease != nil || !errors.Is(err, lock.ErrAmbiguous) || errors.Is(err, lock.ErrBusy) {
			t.Errorf("%s: TryAcquire = %v, %v, want ErrAmbiguous", h.Name, lease, err)
		}
	})
	<-slept
	for _, h := range all {
		h.awaitRenewal(t)
		h.release(t)
		h.WantFree(t, s, h.Name)
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

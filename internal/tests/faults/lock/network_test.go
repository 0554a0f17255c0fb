package lock_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/locktest"
	"github.com/singlefill/singlefill/lock"
)

// A server that cannot be reached.

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

// A server that is silent for two TTLs costs the lease, and keeps the lock from no later caller. One that executes
// everything and is not heard grants nothing for good.
//
//fault:long-freeze
//fault:one-way
func TestLease_LongFreeze(t *testing.T) {
	t.Parallel()
	const ttl = 1800 * time.Millisecond
	for what, silence := range map[string]func(t *testing.T, s *redistest.Server, p *redistest.Proxy) (end func()){
		"frozen": func(_ *testing.T, s *redistest.Server, _ *redistest.Proxy) func() { s.Freeze(); return s.Thaw },
		"not heard": func(t *testing.T, s *redistest.Server, p *redistest.Proxy) func() {
			// Except HELLO: without its reply no connection would be made, and nothing sent.
			rule := p.On(func(cmd []string) bool { return !strings.EqualFold(cmd[0], "HELLO") }, redistest.MuteReply)
			s.ResetCalls()
			return func() {
				rule.Times(0)
				if rule.Fired() == 0 || s.Calls("zscore") == 0 {
					t.Error("no acquire was executed without a reply")
				}
			}
		},
		"writes paused": func(t *testing.T, s *redistest.Server, _ *redistest.Proxy) func() {
			redistest.Do(t, s.Admin(), "client", "pause", 600_000, "write")
			return func() { redistest.Do(t, s.Admin(), "client", "unpause") }
		},
		"paused": func(t *testing.T, s *redistest.Server, _ *redistest.Proxy) func() {
			redistest.Do(t, s.Admin(), "client", "pause", (2 * ttl).Milliseconds(), "all")
			return func() {}
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			s := redistest.Start(t)
			p := redistest.NewProxy(t, s.Addr)
			others := make(map[string]*locktest.Locker)
			var all []heldLock
			for _, k := range locktest.Kinds {
				for _, act := range []string{"acquire", "renew", "release", "abandon"} {
					k.Command(t, s, act)
				}
				others[k.Name] = k.Locker(t, p.Client(t, redistest.NoRetry), "other "+k.Name, hasty, locktest.Long)
				locktest.Release(t, locktest.Take(t, others[k.Name])) // so that the time of the server is known
				all = append(all, hold(t, k, p.Client(t, redistest.NoRetry), k.Name, hasty, ttl))
			}
			end := silence(t, s, p)
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
				h.WantFree(t, s, "other "+h.Name)
			}
		})
	}
}

// A network that is bad all the time. What is measured is logged.

// Clients whose connections are killed all the time never hold a lock together.
//
//fault:killed-connections
func TestAcquire_KilledConnections(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	for _, k := range locktest.Kinds {
		for _, act := range []string{"acquire", "renew", "release", "abandon"} {
			k.Command(t, s, act)
		}
	}
	kills, stop := s.KillConnections()
	var all sync.WaitGroup
	for _, k := range locktest.Kinds {
		all.Go(func() {
			c := &locktest.Crowd{Kind: k, Lockers: []*locktest.Locker{
				k.Locker(t, s.Client(t), k.Name, time.Second, locktest.Long),
				k.Locker(t, s.Client(t, redistest.NoRetry), k.Name, time.Second, locktest.Long),
			}}
			c.Run(t, 3, func(int) bool { return kills.Load() < 150 })
		})
	}
	all.Wait()
	stop()
	t.Logf("%d connections were killed", kills.Load())
	for _, k := range locktest.Kinds {
		k.WantFree(t, s, k.Name)
	}
}

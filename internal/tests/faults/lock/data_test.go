package lock_test

import (
	"slices"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/locktest"
	"github.com/singlefill/singlefill/lock"
)

// A server that loses data.

// Callers do not notice script flushes.
//
//fault:script-flush
func TestAcquire_ScriptFlushes(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	flushes, stop := s.FlushScripts()
	for _, k := range locktest.Kinds {
		l := k.Locker(t, s.Client(t), k.Name, locktest.Patient, locktest.Long)
		for range 30 {
			locktest.Release(t, locktest.Take(t, l))
		}
		k.WantFree(t, s, k.Name)
	}
	renewed := locktest.KindOf("semaphore").Locker(t, s.Client(t), "renewed", 500*time.Millisecond, 3*time.Second)
	locktest.Take(t, renewed)
	redistest.Await(t, "it is renewed", func() bool { return renewed.Count("renewed") > 0 })
	stop()
	if flushes.Load() < 10 || s.Calls("eval") == 0 {
		t.Errorf("the fault has not come about: %v", s.AllCalls())
	}
}

// When Redis forgets everything, also by a failover to a replica that does not know the leases, holders
// learn it at their next renewal, and their release changes nothing. Waiters go on. The fences grow.
//
//fault:flushall
//fault:failover-lost-lock
//fault:eviction
func TestLease_RedisForgets(t *testing.T) {
	t.Parallel()
	type forget func(t *testing.T, s, replica *redistest.Server, p *redistest.Proxy) (now *redistest.Server)
	for what, forget := range map[string]forget{
		"by FLUSHALL": func(t *testing.T, s, _ *redistest.Server, _ *redistest.Proxy) *redistest.Server {
			redistest.Do(t, s.Admin(), "flushall")
			return s
		},
		"by evictions": func(t *testing.T, s, _ *redistest.Server, _ *redistest.Proxy) *redistest.Server {
			for _, k := range locktest.Kinds {
				redistest.Do(t, s.Admin(), "del", locktest.Key(k.Name))
			}
			return s
		},
		"by a crash": func(_ *testing.T, s, _ *redistest.Server, _ *redistest.Proxy) *redistest.Server {
			s.Restart()
			return s
		},
		"by a failover": func(t *testing.T, s, replica *redistest.Server, p *redistest.Proxy) *redistest.Server {
			s.Kill()
			redistest.Do(t, replica.Admin(), "replicaof", "no", "one")
			p.Redirect(replica.Addr)
			p.Cut()
			return replica
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			s := redistest.Start(t)
			replica := redistest.StartReplica(t, s)
			redistest.Do(t, replica.Admin(), "replicaof", "127.0.0.1", 1) // cut off: no server is there
			p := redistest.NewProxy(t, s.Addr)
			var all []heldLock
			waiters := make(map[string][]func() *lock.Lease)
			for _, k := range locktest.Kinds {
				h := hold(t, k, p.Client(t), k.Name, time.Second, 6*time.Second)
				all = append(all, h)
				for range h.Size {
					waiters[h.Name] = append(waiters[h.Name], h.Wait(t, h.Locker(t, p.Client(t), h.Name, locktest.Patient, locktest.Long)))
				}
			}
			s = forget(t, s, replica, p)
			for _, h := range all {
				var fences []int64
				for _, got := range waiters[h.Name] {
					fences = append(fences, got().Fence())
				}
				before := h.State(t, s.Admin(), h.Name)
				for _, l := range h.leases {
					h.holder.WantLost(t, l, "gone from Redis") // a renewal was answered
					if slices.Min(fences) <= l.Fence() {
						t.Errorf("fences %v after %d", fences, l.Fence())
					}
				}
				if now := h.State(t, s.Admin(), h.Name); now != before || before == "" {
					t.Errorf("the lock had %s, and has %s after the old holders' Release", before, now)
				}
			}
		})
	}
}

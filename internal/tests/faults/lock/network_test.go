package lock_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/locktest"
	"github.com/singlefill/singlefill/lock"
)

// A server that cannot be reached.

// A missing server is ErrUnavailable, however long the client dials: it dials five times, with
// pauses, so that RedisTimeout may pass without anything sent.
//
//fault:unreachable-lock
func TestErrUnavailable_LongDials(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	rdb := redis.NewClient(&redis.Options{Addr: s.Addr})
	t.Cleanup(func() { _ = rdb.Close() })
	all := holdAll(t, rdb, hasty, 10*time.Second)
	s.Kill()
	for _, h := range all {
		if _, err := h.holder.TryAcquire(t.Context()); !errors.Is(err, lock.ErrUnavailable) || errors.Is(err, lock.ErrAmbiguous) {
			t.Errorf("%s: TryAcquire: %v, want ErrUnavailable", h.Name, err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		if _, err := h.holder.Acquire(ctx); !errors.Is(err, lock.ErrUnavailable) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: Acquire: %v, want ErrUnavailable and the end of ctx", h.Name, err)
		}
		err := h.leases[0].Release(t.Context())
		// The command may have been sent over the old connection.
		if !errors.Is(err, lock.ErrUnavailable) && !errors.Is(err, lock.ErrAmbiguous) {
			t.Errorf("%s: Release: %v", h.Name, err)
		}
	}
}

// A server that is frozen, restarted or silent for some time.

// A server that is frozen for less than TTL, or restarts and forgets nothing, costs no lease and no waiter its place.
//
//fault:short-freeze
//fault:restart-aof
func TestLease_ShortOutage(t *testing.T) {
	t.Parallel()
	for what, outage := range map[string]func(t *testing.T, s *redistest.Server, all []contestedLock){
		"freeze": func(t *testing.T, s *redistest.Server, all []contestedLock) {
			s.Freeze()
			for _, c := range all {
				redistest.Await(t, "a renewal of each has failed", func() bool { return len(c.holder.Errors()["renew"]) >= c.Size })
			}
			s.Thaw()
		},
		"restart": func(t *testing.T, s *redistest.Server, _ []contestedLock) {
			pid := s.Pid()
			s.Restart()
			if s.Pid() == pid {
				t.Error("the server was not restarted")
			}
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			s := redistest.Start(t, "--appendonly", "yes", "--appendfsync", "always")
			all := contestAll(t, s.Client(t), holdAll(t, s.Client(t), hasty, 9*time.Second))
			outage(t, s, all)
			for _, c := range all {
				c.handOver(t)
				c.WantFree(t, s, c.Name)
			}
		})
	}
}

// A server that is silent for two TTLs costs the lease, and keeps the lock from no later caller. If a server
// executes everything but its replies are lost, no grant lasts.
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
			var callers sync.WaitGroup
			for name, other := range others {
				callers.Go(func() {
					if _, err := other.Acquire(t.Context()); !errors.Is(err, lock.ErrAmbiguous) {
						t.Errorf("%s: Acquire during the silence = %v, want ErrAmbiguous", name, err)
					}
				})
			}
			callers.Wait()
			for _, h := range all {
				for _, l := range h.leases {
					h.holder.WantLost(t, l, "not be renewed")
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

// A network that is bad all the time.

// Clients whose connections are killed all the time never hold a lock together, and no call fails.
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
	var callers sync.WaitGroup
	var crowds []*crowd
	for _, k := range locktest.Kinds {
		c := &crowd{Kind: k}
		for _, change := range retryingClients {
			l := k.Locker(t, s.Client(t, change), k.Name, time.Second, locktest.Long)
			for range 3 {
				callers.Go(func() {
					for kills.Load() < 150 && !t.Failed() {
						c.turn(t, l)
					}
				})
			}
		}
		crowds = append(crowds, c)
	}
	callers.Wait()
	stop()
	t.Logf("%d connections were killed", kills.Load())
	for _, c := range crowds {
		if c.last == 0 {
			t.Errorf("%s: there was no grant", c.Name)
		}
		c.WantFree(t, s, c.Name)
	}
}

// A crowd is callers that compete for a lock, and what they have seen. What they do with the lock held is only right
// if there are never too many holders.
type crowd struct {
	locktest.Kind
	running atomic.Int64

	mu   sync.Mutex
	last int64 // protected by mu: the largest fence
}

// turn takes a lease and releases it.
func (c *crowd) turn(t *testing.T, l *locktest.Locker) {
	ctx, cancel := context.WithTimeout(t.Context(), stuckAfter)
	defer cancel()
	lease, err := l.Acquire(ctx)
	if err != nil {
		t.Errorf("%s: cannot acquire: %v", c.Name, err)
		return
	}
	if n := int(c.running.Add(1)); n > c.Size {
		t.Errorf("%s: %d hold it at once, want at most %d", c.Name, n, c.Size)
	}
	c.mu.Lock()
	if c.Size == 1 && lease.Fence() <= c.last {
		t.Errorf("%s: fence %d after %d", c.Name, lease.Fence(), c.last)
	}
	c.last = max(c.last, lease.Fence())
	c.mu.Unlock()
	time.Sleep(50 * time.Microsecond) // so that holders could overlap
	c.running.Add(-1)
	if err := lease.Release(t.Context()); err != nil {
		t.Errorf("%s: cannot release: %v", c.Name, err)
	}
}

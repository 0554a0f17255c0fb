package lock_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

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
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
				if err := s.Admin().ScriptFlush(context.Background()).Err(); err != nil {
					t.Error(err)
				}
			}
		}
	}()
	for _, k := range locktest.Kinds {
		c := &crowd{Kind: k}
		for range 2 {
			c.lockers = append(c.lockers, k.Locker(t, s.Client(t), k.Name, locktest.Patient, locktest.Long))
		}
		c.run(t, 4, func(turns int) bool { return turns < 10 })
		c.want(t, 80)
		k.WantFree(t, s, k.Name)
	}
	renewed := locktest.KindOf("semaphore").Locker(t, s.Client(t), "renewed", 500*time.Millisecond, 3*time.Second)
	locktest.Take(t, renewed)
	redistest.Await(t, "it is renewed", func() bool { return renewed.Count("renewed") > 0 })
	close(stop)
	<-stopped
	if s.Calls("script|flush") < 10 || s.Calls("eval") == 0 {
		t.Errorf("the fault has not come about: %v", s.AllCalls())
	}
}

// When Redis forgets everything, holders learn it and waiters go on.
//
//fault:flushall
func TestLease_RedisForgets(t *testing.T) {
	t.Parallel()
	for what, forget := range map[string]func(t *testing.T, s *redistest.Server){
		"by FLUSHALL": func(t *testing.T, s *redistest.Server) { do(t, s, "flushall") },
		"by a crash":  func(t *testing.T, s *redistest.Server) { s.Restart() },
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			s := redistest.Start(t)
			all := holdAll(t, s, time.Second, 6*time.Second)
			waiters := make(map[string][]func() *lock.Lease)
			for _, h := range all {
				for range h.Size {
					waiters[h.Name] = append(waiters[h.Name], h.Wait(t, h.Locker(t, s.Client(t), h.Name, locktest.Patient, locktest.Long)))
				}
			}
			forget(t, s)
			for _, h := range all {
				var fences []int64
				for _, got := range waiters[h.Name] {
					fences = append(fences, got().Fence())
				}
				before := h.State(t, s.Admin(), h.Name)
				for _, l := range h.leases {
					h.holder.WantLost(t, l, gone) // a renewal was answered
					if slices.Min(fences) <= l.Fence() {
						t.Errorf("fences %v after %d", fences, l.Fence())
					}
				}
				if now := h.State(t, s.Admin(), h.Name); now != before {
					t.Errorf("the lock had %s, and has %s after the old holders' Release", before, now)
				}
			}
		})
	}
}

// A restart that forgets nothing costs no lease.
//
//fault:restart-aof
func TestLease_RestartWithAOF(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t, "--appendonly", "yes", "--appendfsync", "always")
	all := contestAll(t, s.Client(t), holdAll(t, s, time.Second, 6*time.Second))
	pid := s.Pid()
	begun := time.Now()
	s.Restart()
	t.Logf("the restart took %v; TTL is 6 s", time.Since(begun).Round(time.Millisecond))
	if s.Pid() == pid {
		t.Error("the server was not restarted")
	}
	for _, c := range all {
		c.handOver(t)
		c.WantFree(t, s, c.Name)
	}
}

// An evicted lease is lost to its holder, and other leases are not.
//
//fault:eviction
func TestLease_Evicted(t *testing.T) {
	locktest.EachKind(t, func(t *testing.T, k locktest.Kind) {
		const names = 20
		s := redistest.Start(t, "--maxmemory-policy", "allkeys-random", "--maxmemory-samples", "1")
		admin := s.Admin()
		leases := make(map[string]*lock.Lease)
		lockers := make(map[string]*locktest.Locker)
		rdb := s.Client(t)
		for i := range names {
			name := fmt.Sprint("name", i)
			lockers[name] = k.Locker(t, rdb, name, time.Second, 5*time.Second)
			leases[name] = locktest.Take(t, lockers[name])
		}
		used := admin.InfoMap(t.Context(), "memory").Item("Memory", "used_memory")
		var limit int64
		fmt.Sscan(used, &limit)
		do(t, s, "config", "set", "maxmemory", limit+200_000)
		churn := 0
		redistest.Await(t, "a lease is evicted", func() bool {
			for range 50 {
				churn++
				_ = admin.Set(t.Context(), fmt.Sprint("churn", churn), strings.Repeat("x", 2000), 0).Err()
			}
			for name := range leases {
				if k.Holders(t, admin, name) == 0 {
					return true
				}
			}
			return false
		})
		do(t, s, "config", "set", "maxmemory", 0)
		lost := 0
		for name, l := range leases {
			if k.Holders(t, admin, name) > 0 {
				locktest.Release(t, l)
				continue
			}
			lost++
			next := k.Fill(t, k.Locker(t, s.Client(t), name, locktest.Patient, locktest.Long))
			before := k.State(t, admin, name)
			lockers[name].WantLost(t, l, gone)
			if now := k.State(t, admin, name); now != before || before == "" {
				t.Errorf("the lock had %s, and has %s after the old holder's Release", before, now)
			}
			for _, l := range next {
				locktest.Release(t, l)
			}
		}
		if n := admin.InfoMap(t.Context(), "stats").Item("Stats", "evicted_keys"); lost == 0 || n == "0" {
			t.Errorf("%d leases lost, %s keys evicted", lost, n)
		}
		for name := range leases {
			k.WantFree(t, s, name)
		}
	})
}

// Holders and waiters learn of a key that is lost or foreign, or go on, and the lock works when the
// foreign key is gone.
//
//fault:foreign-key
func TestAcquire_LostOrForeignKey(t *testing.T) {
	suffixes := map[string][]string{
		"mutex":     {"", ":fence"},
		"fair":      {"", ":fence", ":queue", ":alive"},
		"semaphore": {"", ":fence", ":details"},
	}
	damages := map[string][]any{
		"deleted":  nil,
		"a list":   {"rpush", "x"},
		"a string": {"set", "x"},
		"a zset":   {"zadd", 1, "x"},
		"a hash":   {"hset", "x", "y"},
	}
	locktest.EachKind(t, func(t *testing.T, k locktest.Kind) {
		s := redistest.Start(t)
		var victims []*victim
		for _, suffix := range suffixes[k.Name] {
			for what, damage := range damages {
				v := newVictim(t, k, s, "the key "+suffix+" is "+what)
				v.key = locktest.Key(v.name) + suffix
				v.damage(damage)
				victims = append(victims, v)
			}
		}
		for _, v := range victims {
			for _, lease := range v.leases {
				v.check("a holder", lease.Release(t.Context()))
			}
			select {
			case err := <-v.waiter:
				v.check("the waiter", err)
			case <-time.After(stuckAfter):
				t.Fatalf("%s: the waiter is stuck", v.name)
			}
			s.Admin().Del(t.Context(), v.key)
		}
		for _, v := range victims {
			k.WantFree(t, s, v.name)
		}
	})
}

// A victim is a lock with holders and a waiter, one of whose keys is damaged.
type victim struct {
	heldLock
	t         *testing.T
	admin     *redis.Client
	name, key string
	waiter    chan error // of Acquire, or of Release
}

func newVictim(t *testing.T, k locktest.Kind, s *redistest.Server, name string) *victim {
	const timeout, ttl = 400 * time.Millisecond, 2 * time.Second
	v := &victim{t: t, admin: s.Admin(), name: name, waiter: make(chan error, 1)}
	v.heldLock = hold(t, k, s.Client(t), name, timeout, ttl)
	l := k.Locker(t, s.Client(t), name, timeout, ttl)
	ctx, asked := locktest.NotifyAsked(context.Background())
	go func() {
		lease, err := l.Acquire(ctx)
		if err == nil {
			err = lease.Release(context.Background())
		}
		v.waiter <- err
	}()
	<-asked
	if k.Name == "fair" {
		redistest.Await(t, "the waiter is in the queue", func() bool {
			return v.admin.ZCard(context.Background(), locktest.Key(name)+":queue").Val() == 1
		})
	}
	return v
}

// damage deletes the key, and in the same step makes another one by a command, if there is one.
func (v *victim) damage(command []any) {
	v.t.Helper()
	var was *redis.IntCmd
	if _, err := v.admin.TxPipelined(v.t.Context(), func(p redis.Pipeliner) error {
		was = p.Del(v.t.Context(), v.key)
		if command != nil {
			p.Do(v.t.Context(), append([]any{command[0], v.key}, command[1:]...)...)
		}
		return nil
	}); err != nil || was.Val() != 1 {
		v.t.Errorf("%s: %d deleted, %v", v.name, was.Val(), err)
	}
}

// check checks what a caller has got.
func (v *victim) check(who string, err error) {
	v.t.Helper()
	if err != nil && !strings.Contains(err.Error(), "holds something else") && !errors.Is(err, lock.ErrUnavailable) && !errors.Is(err, lock.ErrLost) {
		v.t.Errorf("%s: %s got %v", v.name, who, err)
	}
	if errors.Is(err, lock.ErrAmbiguous) || errors.Is(err, lock.ErrBusy) {
		v.t.Errorf("%s: %s got %v", v.name, who, err)
	}
}

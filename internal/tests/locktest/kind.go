// Package locktest holds what the tests of package lock share with those in the rings around it:
// the kinds of locks, Lockers that record the calls of their Trace, and the scripts.
package locktest

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"
)

// A Kind is one kind of lock, named as its scripts are.
type Kind struct {
	Name string
	Size int // how many may hold it
}

// Kinds are all kinds of locks.
var Kinds = []Kind{{"mutex", 1}, {"fair", 1}, {"semaphore", 2}}

// Times of a Locker.
const (
	// Patient is the RedisTimeout of a Locker that sees no error which its test has not made.
	Patient = 8 * time.Second

	// Long is a TTL that no test waits for: a lease that is gone earlier was given back.
	Long = 10 * time.Minute
)

// awaitLimit bounds the waits for what happens at once, or never.
const awaitLimit = 30 * time.Second

// KindOf returns the kind of that name.
func KindOf(name string) Kind {
	for _, k := range Kinds {
		if k.Name == name {
			return k
		}
	}
	panic("no kind is named " + name)
}

// EachKind runs a test for each kind, in parallel.
func EachKind(t *testing.T, run func(t *testing.T, k Kind)) {
	t.Parallel()
	for _, k := range Kinds {
		t.Run(k.Name, func(t *testing.T) {
			t.Parallel()
			run(t, k)
		})
	}
}

// Open makes a Locker of the kind.
func (k Kind) Open(rdb redis.UniversalClient, name string, opts *lock.Options) (*lock.Locker, error) {
	switch k.Name {
	case "mutex":
		return lock.NewMutex(rdb, name, opts)
	case "fair":
		return lock.NewFairMutex(rdb, name, opts)
	}
	return lock.NewSemaphore(rdb, name, k.Size, opts)
}

// Fill takes all places.
func (k Kind) Fill(t testing.TB, l *Locker) (leases []*lock.Lease) {
	t.Helper()
	for range k.Size {
		leases = append(leases, Take(t, l))
	}
	return leases
}

// Wait begins an Acquire and returns when it has begun to ask. got returns its lease.
func (k Kind) Wait(t testing.TB, l *Locker) (got func() *lock.Lease) {
	t.Helper()
	leases := make(chan *lock.Lease, 1)
	ctx, asks := NotifyAsked()
	go func() {
		lease, err := l.Acquire(ctx)
		if err != nil {
			t.Errorf("a waiter's Acquire = %v", err)
		}
		leases <- lease
	}()
	<-asks
	return func() *lock.Lease {
		t.Helper()
		select {
		case lease := <-leases:
			if lease == nil {
				t.FailNow()
			}
			t.Cleanup(func() { _ = lease.Release(context.Background()) })
			return lease
		case <-time.After(awaitLimit):
			t.Fatal("the waiter is stuck")
			return nil
		}
	}
}

// Holders returns how many hold a lock, by the server.
func (k Kind) Holders(t testing.TB, admin *redis.Client, name string) int {
	t.Helper()
	ctx := context.Background()
	var n int64
	var err error
	if k.Name == "semaphore" {
		now := admin.Time(ctx).Val().UnixMilli()
		n, err = admin.ZCount(ctx, Key(name), fmt.Sprintf("(%d", now), "+inf").Result()
	} else {
		n, err = admin.Exists(ctx, Key(name)).Result()
	}
	redistest.Must(t, err)
	return int(n)
}

// State returns what the server knows about the holders.
func (k Kind) State(t testing.TB, admin *redis.Client, name string) string {
	t.Helper()
	ctx := context.Background()
	if k.Name == "semaphore" {
		return fmt.Sprint(admin.ZRangeWithScores(ctx, Key(name), 0, -1).Val(), admin.HGetAll(ctx, Key(name)+":details").Val())
	}
	return admin.Get(ctx, Key(name)).Val()
}

// WantFree waits until nothing is left of a lock, and checks that all its places can be had again.
// An acquire removes the leases of a semaphore that have ended; until then they stay as long as any
// later lease does.
func (k Kind) WantFree(t testing.TB, s *redistest.Server, name string) {
	t.Helper()
	probe := k.Locker(t, s.Client(t), name, Patient, Long)
	redistest.Await(t, "nothing is left of the lock", func() bool {
		if l, err := probe.TryAcquire(context.Background()); err == nil {
			Release(t, l)
		}
		left, _ := Left(t, s.Admin(), name)
		return len(left) == 0
	})
	for _, l := range k.Fill(t, k.Locker(t, s.Client(t), name, Patient, Long)) {
		Release(t, l)
	}
	if left, _ := Left(t, s.Admin(), name); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}

// Key returns the lock key of a name. All keys of the name begin with it.
func Key(name string) string { return "{" + name + "}:lock" }

// Left returns the keys of a lock other than the fence, and the marks of ended attempts. A key
// without a TTL fails the test.
func Left(t testing.TB, admin *redis.Client, name string) (left, marks []string) {
	t.Helper()
	ctx := context.Background()
	keys, err := admin.Keys(ctx, "*").Result()
	redistest.Must(t, err)
	for _, key := range keys {
		if !strings.HasPrefix(key, Key(name)) {
			continue
		}
		if ttl := admin.PTTL(ctx, key).Val(); ttl == -1 {
			t.Errorf("%s is without a TTL", key)
		}
		switch rest := strings.TrimPrefix(key, Key(name)); {
		case strings.HasPrefix(rest, ":ended"):
			marks = admin.ZRange(ctx, key, 0, -1).Val()
		case rest != ":fence":
			left = append(left, key)
		}
	}
	return left, marks
}

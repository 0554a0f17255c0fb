package lock_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/locktest"
	"github.com/singlefill/singlefill/lock"
)

// A network that is bad all the time, for many callers. What is measured is logged.

// A crowd is goroutines that compete for a lock, and what they have seen. What they do with the
// lock held is only right if there are never too many holders.
type crowd struct {
	locktest.Kind
	lockers []*locktest.Locker

	running, most, granted, failed atomic.Int64

	mu      sync.Mutex
	last    int64         // protected by mu: the largest fence
	slowest time.Duration // protected by mu
}

// run has n goroutines for each Locker take turns while more says so.
func (c *crowd) run(t testing.TB, n int, more func(turns int) bool) {
	t.Helper()
	var wg sync.WaitGroup
	for _, l := range c.lockers {
		for range n {
			wg.Go(func() {
				for i := 0; more(i); i++ {
					if err := c.turn(l); err != nil {
						t.Errorf("%s: %v", c.Name, err)
						return
					}
				}
			})
		}
	}
	wg.Wait()
	if most := int(c.most.Load()); most > c.Size {
		t.Errorf("%s: %d held it at once, want at most %d", c.Name, most, c.Size)
	}
	if c.granted.Load() == 0 {
		t.Errorf("%s: there was no grant", c.Name)
	}
	t.Logf("%s: %d grants, %d refusals, the slowest grant took %v", c.Name, c.granted.Load(), c.failed.Load(),
		c.slowest.Round(time.Millisecond))
}

// turn takes a lease and releases it. Its error is not one of Redis.
func (c *crowd) turn(l *locktest.Locker) error {
	ofRedis := func(err error) bool { return errors.Is(err, lock.ErrUnavailable) || errors.Is(err, lock.ErrAmbiguous) }
	begun := time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), stuckAfter)
	defer cancel()
	lease, err := l.Acquire(ctx)
	if err != nil {
		c.failed.Add(1)
		if ofRedis(err) {
			return nil
		}
		return fmt.Errorf("Acquire = %w", err)
	}
	n := c.running.Add(1)
	for m := c.most.Load(); n > m && !c.most.CompareAndSwap(m, n); m = c.most.Load() {
	}
	c.granted.Add(1)
	c.mu.Lock()
	backwards := c.Size == 1 && lease.Fence() <= c.last
	c.last = max(c.last, lease.Fence())
	c.slowest = max(c.slowest, time.Since(begun))
	c.mu.Unlock()
	time.Sleep(50 * time.Microsecond) // so that holders could overlap
	c.running.Add(-1)
	err = lease.Release(context.Background())
	switch {
	case backwards:
		return fmt.Errorf("the fence %d is not larger than the one before", lease.Fence())
	case err != nil && !ofRedis(err):
		return fmt.Errorf("Release = %w", err)
	}
	return nil
}

// want fails the test unless there were n grants and no error.
func (c *crowd) want(t testing.TB, n int) {
	t.Helper()
	if got := int(c.granted.Load()); got != n {
		t.Errorf("%s: %d grants, want %d", c.Name, got, n)
	}
	for _, l := range c.lockers {
		if errs := l.Errors(); len(errs) > 0 || l.Count("lost") > 0 {
			t.Errorf("%s: %d lost; %v", c.Name, l.Count("lost"), errs)
		}
	}
}

// crowdThrough is a crowd with two Lockers behind the proxy.
func (p proxied) crowdThrough() *crowd {
	return &crowd{Kind: p.Kind, lockers: []*locktest.Locker{p.through(locktest.Patient), p.through(locktest.Patient)}}
}

// Callers that compete get their leases without an error when each command arrives twice.
//
//fault:repeated-command
func TestAcquire_EveryCommandTwice(t *testing.T) {
	locktest.EachKind(t, func(t *testing.T, k locktest.Kind) {
		p := behindProxy(t, k, redistest.Shared(t))
		rules := make(map[string]*redistest.Rule)
		for _, act := range []string{"acquire", "renew", "release"} {
			rules[act] = p.on(act, redistest.Twice)
		}
		holder := k.Locker(t, p.proxy.Client(t), p.name, 400*time.Millisecond, 1500*time.Millisecond)
		lease := locktest.Take(t, holder)
		redistest.Await(t, "it is renewed", func() bool { return holder.Count("renewed") > 0 })
		locktest.Release(t, lease)
		c := p.crowdThrough()
		c.run(t, 3, func(turns int) bool { return turns < 10 })
		c.want(t, 60)
		for act, rule := range rules {
			if rule.Fired() == 0 {
				t.Errorf("no %s has arrived twice", act)
			}
		}
		p.wantFree()
	})
}

// A reply that comes byte by byte is a reply.
//
//fault:crumbs
func TestReply_ByteByByte(t *testing.T) {
	locktest.EachKind(t, func(t *testing.T, k locktest.Kind) {
		p := behindProxy(t, k, redistest.Shared(t))
		p.proxy.Trickle(1, 100*time.Microsecond)
		c := p.crowdThrough()
		c.run(t, 2, func(turns int) bool { return turns < 5 })
		c.want(t, 20)
		if n := p.proxy.Counts().Sliced; n < 40 {
			t.Errorf("%d replies came byte by byte", n)
		}
		p.wantFree()
	})
}

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
	var kills atomic.Int64
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				n, _ := s.Admin().ClientKillByFilter(context.Background(), "type", "normal", "skipme", "yes").Result()
				kills.Add(n)
			}
		}
	}()
	var all sync.WaitGroup
	for _, k := range locktest.Kinds {
		all.Go(func() {
			c := &crowd{Kind: k, lockers: []*locktest.Locker{
				k.Locker(t, s.Client(t), k.Name, time.Second, locktest.Long),
				k.Locker(t, s.Client(t, noRetries), k.Name, time.Second, locktest.Long),
			}}
			c.run(t, 3, func(int) bool { return kills.Load() < 150 })
		})
	}
	all.Wait()
	close(stop)
	<-stopped
	t.Logf("%d connections were killed", kills.Load())
	for _, k := range locktest.Kinds {
		k.WantFree(t, s, k.Name)
	}
}

// A Redis that executes everything and is not heard grants nothing for good: callers get
// ErrAmbiguous, grants are given back, and a holder learns in time that its lease could not be
// renewed.
//
//fault:one-way
func TestLease_RedisIsNotHeard(t *testing.T) {
	locktest.EachKind(t, func(t *testing.T, k locktest.Kind) {
		const ttl = 1800 * time.Millisecond
		p := behindProxy(t, k, redistest.Start(t))
		for _, act := range []string{"acquire", "renew", "release", "abandon"} {
			k.Command(t, p.s, act)
		}
		holder := k.Locker(t, p.proxy.Client(t, noRetries), "held", hasty, ttl)
		lease := locktest.Take(t, holder)
		taken := time.Now()
		asks := k.Locker(t, p.proxy.Client(t, noRetries), "asked", hasty, locktest.Long)
		// Except HELLO: without its reply no connection would be made, and nothing sent.
		rule := p.proxy.On(func(cmd []string) bool { return !strings.EqualFold(cmd[0], "HELLO") }, redistest.MuteReply)
		p.s.ResetCalls()
		if got, err := asks.Acquire(t.Context()); got != nil || !errors.Is(err, lock.ErrAmbiguous) {
			t.Errorf("Acquire = %v, %v, want ErrAmbiguous", got, err)
		}
		if p.s.Calls("zscore") == 0 {
			t.Error("no acquire was executed")
		}
		holder.WantLost(t, lease, notRenewed)
		t.Logf("%s: the holder learnt it %v after its grant; TTL is %v", k.Name,
			time.Since(taken).Round(time.Millisecond), ttl)
		if rule.Fired() == 0 {
			t.Error("no reply was lost")
		}
		k.WantFree(t, p.s, "asked")
		k.WantFree(t, p.s, "held")
	})
}

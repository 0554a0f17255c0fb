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

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"
)

// In these tests the network between the lockers and Redis is bad all the time, for everybody at once. What is
// measured is logged.

// A faultCrowd is goroutines that compete for a lock, and what they have seen. What they do with the lock held is
// only right if no more of them do it than may hold it.
type faultCrowd struct {
	faultKind
	lockers []*faultLocker

	running, most, granted, failed atomic.Int64
	mu                             sync.Mutex
	last                           int64 // protected by mu: the largest fence
	slowest                        time.Duration
}

func (k faultKind) crowd(lockers ...*faultLocker) *faultCrowd {
	return &faultCrowd{faultKind: k, lockers: lockers}
}

// turn takes a lease, and gives it back. It reports whether there were only errors of Redis, if any.
func (c *faultCrowd) turn(l *faultLocker) error {
	begun := time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	lease, err := l.Acquire(ctx)
	if err != nil {
		c.failed.Add(1)
		if errors.Is(err, lock.ErrUnavailable) || errors.Is(err, lock.ErrAmbiguous) {
			return nil
		}
		return fmt.Errorf("Acquire = %w", err)
	}
	n := c.running.Add(1)
	for m := c.most.Load(); n > m && !c.most.CompareAndSwap(m, n); m = c.most.Load() {
	}
	c.granted.Add(1)
	c.mu.Lock()
	backwards := c.size == 1 && lease.Fence() <= c.last
	c.last = max(c.last, lease.Fence())
	c.slowest = max(c.slowest, time.Since(begun))
	c.mu.Unlock()
	time.Sleep(50 * time.Microsecond) // or nobody would meet anybody
	c.running.Add(-1)
	err = lease.Release(context.Background())
	switch {
	case backwards:
		return fmt.Errorf("the fence %d is not larger than the one before", lease.Fence())
	case err != nil && !errors.Is(err, lock.ErrUnavailable) && !errors.Is(err, lock.ErrAmbiguous):
		return fmt.Errorf("Release = %w", err)
	}
	return nil
}

// run has n goroutines for each locker take turns while more says so.
func (c *faultCrowd) run(t testing.TB, n int, more func(turns int) bool) {
	t.Helper()
	var wg sync.WaitGroup
	for _, l := range c.lockers {
		for range n {
			wg.Go(func() {
				for i := 0; more(i); i++ {
					if err := c.turn(l); err != nil {
						t.Errorf("%s: %v", c.name, err)
						return
					}
				}
			})
		}
	}
	wg.Wait()
	if most := int(c.most.Load()); most > c.size {
		t.Errorf("%s: %d held it at once, want at most %d", c.name, most, c.size)
	}
	if c.granted.Load() == 0 {
		t.Errorf("%s: nobody has had it", c.name)
	}
	t.Logf("%s: %d grants, %d refusals, the slowest grant took %v", c.name, c.granted.Load(), c.failed.Load(),
		c.slowest.Round(time.Millisecond))
}

// want fails the test unless there were n grants and no error at all.
func (c *faultCrowd) want(t testing.TB, n int) {
	t.Helper()
	if got := int(c.granted.Load()); got != n {
		t.Errorf("%s: %d grants, want %d", c.name, got, n)
	}
	for _, l := range c.lockers {
		if errs := l.errors(); len(errs) > 0 || l.told("lost") > 0 {
			t.Errorf("%s: %d lost; %v", c.name, l.told("lost"), errs)
		}
	}
}

//fault:repeated-command
func TestWithEveryCommandArrivingTwiceEverythingIsAsItShouldBe(t *testing.T) {
	faultEachKind(t, func(t *testing.T, k faultKind) {
		s := redistest.Shared(t)
		p := redistest.NewProxy(t, s.Addr)
		name := redistest.Namespace(t)
		rules := make(map[string]*redistest.Rule)
		for _, act := range []string{"acquire", "renew", "release"} {
			rules[act] = p.On(k.act(t, s, act), redistest.Twice)
		}
		holder := k.locker(t, p.Client(t), name, 400*time.Millisecond, 1500*time.Millisecond)
		lease := faultTake(t, holder)
		redistest.Await(t, "it is renewed", func() bool { return holder.told("renewed") > 0 })
		faultRelease(t, lease)
		c := k.crowd(k.locker(t, p.Client(t), name, faultPatient, faultLong), k.locker(t, p.Client(t), name,
			faultPatient, faultLong))
		c.run(t, 3, func(turns int) bool { return turns < 10 })
		c.want(t, 60)
		for act, rule := range rules {
			if rule.Fired() == 0 {
				t.Errorf("no %s has arrived twice", act)
			}
		}
		k.free(t, s, name)
	})
}

//fault:crumbs
func TestRepliesInCrumbsAreReplies(t *testing.T) {
	faultEachKind(t, func(t *testing.T, k faultKind) {
		s := redistest.Shared(t)
		p := redistest.NewProxy(t, s.Addr)
		p.Trickle(1, 100*time.Microsecond)
		name := redistest.Namespace(t)
		c := k.crowd(k.locker(t, p.Client(t), name, faultPatient, faultLong), k.locker(t, p.Client(t), name,
			faultPatient, faultLong))
		c.run(t, 2, func(turns int) bool { return turns < 5 })
		c.want(t, 20)
		if n := p.Counts().Sliced; n < 40 {
			t.Errorf("%d replies came in crumbs", n)
		}
		k.free(t, s, name)
	})
}

//fault:reset
func TestAConnectionThatBreaksInTheMiddleOfAReplyIsLikeALostReply(t *testing.T) {
	faultEachKind(t, func(t *testing.T, k faultKind) {
		for _, act := range []string{"acquire", "release"} {
			for client, change := range map[string]func(*redis.Options){"client tries again": func(*redis.Options) {},
				"client does not": faultOnce} {
				t.Run(act+", "+client, func(t *testing.T) {
					s := redistest.Shared(t)
					p := redistest.NewProxy(t, s.Addr)
					name := redistest.Namespace(t)
					rule := p.On(k.act(t, s, act), redistest.ResetReply).Times(1)
					l := k.locker(t, p.Client(t, change), name, faultPatient, faultLong)
					lease := faultTake(t, l)
					if last, _ := s.Admin().Get(t.Context(), faultKey(name)+":fence").Int64(); lease.Fence() != last {
						t.Errorf("fence %d, in Redis %d", lease.Fence(), last)
					}
					if n := k.holders(t, s.Admin(), name); n != 1 {
						t.Errorf("%d hold it", n)
					}
					faultRelease(t, lease)
					if rule.Fired() != 1 {
						t.Errorf("the fault has come about %d times", rule.Fired())
					}
					if a, r, n := l.told("acquired"), l.told("released"), l.told("lost"); a != 1 || r != 1 || n != 0 {
						t.Errorf("Trace was told of %d acquired, %d released, %d lost", a, r, n)
					}
					k.free(t, s, name)
				})
			}
		}
	})
}

// Redis hears everything, executes it, and is not heard: whoever asks is told that nothing is known, and what was
// granted is given back; whoever holds a lease is told in time that it could not be renewed.
//
//fault:one-way
func TestARedisThatIsNotHeardGrantsNothingForGood(t *testing.T) {
	faultEachKind(t, func(t *testing.T, k faultKind) {
		s := redistest.Start(t)
		for _, act := range []string{"acquire", "renew", "release", "abandon"} {
			k.act(t, s, act)
		}
		p := redistest.NewProxy(t, s.Addr)
		const ttl = 1800 * time.Millisecond
		holder := k.locker(t, p.Client(t, faultOnce), "held", faultHasty, ttl)
		lease := faultTake(t, holder)
		taken := time.Now()
		asks := k.locker(t, p.Client(t, faultOnce), "asked", faultHasty, faultLong)
		// But for HELLO, or no connection would be made, and nothing be sent.
		rule := p.On(func(cmd []string) bool { return !strings.EqualFold(cmd[0], "HELLO") }, redistest.MuteReply)
		s.ResetCalls()
		if got, err := asks.Acquire(t.Context()); got != nil || !errors.Is(err, lock.ErrAmbiguous) {
			t.Errorf("Acquire = %v, %v, want ErrAmbiguous", got, err)
		}
		if s.Calls("zscore") == 0 {
			t.Error("no acquire was executed")
		}
		holder.lost(t, lease, faultNotRenewed)
		t.Logf("%s: the holder was told %v after its grant; TTL is %v", k.name,
			time.Since(taken).Round(time.Millisecond), ttl)
		if rule.Fired() == 0 {
			t.Error("no reply was lost")
		}
		k.free(t, s, "asked")
		k.free(t, s, "held")
	})
}

// Every connection is closed by the server, again and again.
//
//fault:killed-connections
func TestClientsThatAreKilledAllTheTimeNeverHoldItTogether(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	for _, k := range faultKinds {
		for _, act := range []string{"acquire", "renew", "release", "abandon"} {
			k.act(t, s, act)
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
	for _, k := range faultKinds {
		all.Go(func() {
			c := k.crowd(k.locker(t, s.Client(t), k.name, time.Second, faultLong), k.locker(t, s.Client(t, faultOnce),
				k.name, time.Second, faultLong))
			c.run(t, 3, func(int) bool { return kills.Load() < 150 })
		})
	}
	all.Wait()
	close(stop)
	<-stopped
	t.Logf("%d connections were killed", kills.Load())
	for _, k := range faultKinds {
		k.free(t, s, k.name)
	}
}

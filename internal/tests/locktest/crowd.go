package locktest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/singlefill/singlefill/lock"
)

// A Crowd is goroutines that compete for a lock, and what they have seen. What they do with the
// lock held is only right if there are never too many holders.
type Crowd struct {
	Kind
	Lockers []*Locker

	running, granted, refused atomic.Int64

	mu      sync.Mutex
	last    int64         // protected by mu: the largest fence
	slowest time.Duration // protected by mu
}

// Run has n goroutines for each Locker take turns while more says so.
func (c *Crowd) Run(t testing.TB, n int, more func(turns int) bool) {
	t.Helper()
	var wg sync.WaitGroup
	for _, l := range c.Lockers {
		for range n {
			wg.Go(func() {
				for i := 0; more(i) && !t.Failed(); i++ {
					if err := c.turn(l); err != nil {
						t.Errorf("%s: %v", c.Name, err)
						return
					}
				}
			})
		}
	}
	wg.Wait()
	if c.granted.Load() == 0 {
		t.Errorf("%s: there was no grant", c.Name)
	}
	t.Logf("%s: %d grants, %d refusals, the slowest grant took %v", c.Name, c.granted.Load(), c.refused.Load(),
		c.slowest.Round(time.Millisecond))
}

// turn takes a lease and releases it. Its error is not one of Redis.
func (c *Crowd) turn(l *Locker) error {
	ofRedis := func(err error) bool { return errors.Is(err, lock.ErrUnavailable) || errors.Is(err, lock.ErrAmbiguous) }
	begun := time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), awaitLimit)
	defer cancel()
	lease, err := l.Acquire(ctx)
	if err != nil {
		c.refused.Add(1)
		if ofRedis(err) {
			return nil
		}
		return fmt.Errorf("cannot acquire: %w", err)
	}
	holders := int(c.running.Add(1))
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
	case holders > c.Size:
		return fmt.Errorf("%d hold it at once, want at most %d", holders, c.Size)
	case backwards:
		return fmt.Errorf("the fence %d is not larger than the one before", lease.Fence())
	case err != nil && !ofRedis(err):
		return fmt.Errorf("cannot release: %w", err)
	}
	return nil
}

// Want fails the test unless there were n grants and no error.
func (c *Crowd) Want(t testing.TB, n int) {
	t.Helper()
	if got := int(c.granted.Load()); got != n {
		t.Errorf("%s: %d grants, want %d", c.Name, got, n)
	}
	for _, l := range c.Lockers {
		if errs := l.Errors(); len(errs) > 0 || l.Count("lost") > 0 {
			t.Errorf("%s: %d lost; %v", c.Name, l.Count("lost"), errs)
		}
	}
}

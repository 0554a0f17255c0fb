package lock_test

import (
	"context"
	"errors"

	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/schedule"
	"github.com/singlefill/singlefill/lock"
)

// The tests in here hold in every order in which the commands of several processes can reach Redis: see package
// schedule. Where the orders are too many a sample of them is run.

// Whole steps of the scheduler.
const (
	stepTTL     = 9 * schedule.Step
	stepTimeout = 2 * schedule.Step
	stepMark    = 2*(stepTTL+2*stepTimeout) + schedule.Step // the longest life of a mark, and a step
)

// A contest is processes that acquire leases of one name. It knows who may hold one.
type contest struct {
	*schedule.World
	kind   string
	size   int      // how many may hold a lease at a time
	harmed []string // the processes to which faults may happen: they may fail, and lose their leases

	mu      sync.Mutex             // guards what follows
	holders map[string]*lock.Lease // by process
	fence   int64                  // the largest
	queue   []string               // processes that wait, in the order in which they have come to the server
}

func newContest(w *schedule.World, kind string, size int, harmed ...string) *contest {
	w.Scripts(lua, "lua")
	c := &contest{World: w, kind: kind, size: size, harmed: harmed, holders: make(map[string]*lock.Lease)}
	w.Executed = c.executed
	return c
}

// sizeOf returns the size for a scenario in which one semaphore lets more in.
func sizeOf(kind string) int {
	if kind == "semaphore" {
		return 2
	}
	return 1
}

func (c *contest) locker(process string) (l *lock.Locker) {
	opts := &lock.Options{TTL: stepTTL, WaiterTTL: stepTTL, RedisTimeout: stepTimeout}
	rdb := c.Client(process)
	var err error
	switch c.kind {
	case "mutex":
		l, err = lock.NewMutex(rdb, "n", opts)
	case "fair":
		l, err = lock.NewFairMutex(rdb, "n", opts)
	default:
		l, err = lock.NewSemaphore(rdb, "n", c.size, opts)
	}
	if err != nil {
		panic(err)
	}
	return l
}

// executed is called after each command.
func (c *contest) executed(process, what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, key := range c.Server.Keys() {
		if c.Server.TTL(key) <= 0 {
			c.Errorf("key %q has no TTL", key)
		}
	}
	if n := c.held(); n > c.size {
		c.Errorf("%d leases are held by the server's account, want at most %d", n, c.size)
	}
	if strings.HasPrefix(what, `"fair_acquire`) && !slices.Contains(c.queue, process) && c.holders[process] == nil {
		c.queue = append(c.queue, process)
	}
}

// held returns how many leases are held by the server's account.
func (c *contest) held() (n int) {
	switch c.Server.Type("{n}:lock") {
	case "string":
		return 1
	case "zset":
		ends, _ := c.Server.SortedSet("{n}:lock")
		for _, end := range ends {
			if int64(end) > time.Now().UnixMilli() {
				n++
			}
		}
	}
	return n
}

// goTurn starts a process that acquires a lease, works, and releases it, and checks that it may.
func (c *contest) goTurn(process string, work func()) {
	l := c.locker(process)
	c.Go(process, process, func(ctx context.Context) {
		lease, err := l.Acquire(ctx)
		c.entered(process, lease, err)
		if err != nil {
			return
		}
		work()
		lost := c.leaves(process, lease)
		switch err := lease.Release(ctx); {
		case lost && !errors.Is(err, lock.ErrLost):
			c.Errorf("%s has lost its lease, and Release returned %v", process, err)
		case !lost && err != nil && !slices.Contains(c.harmed, process):
			c.Errorf("%s: Release: %v", process, err)
		}
	})
}

func (c *contest) entered(process string, lease *lock.Lease, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	place := slices.Index(c.queue, process)
	c.queue = slices.DeleteFunc(c.queue, func(p string) bool { return p == process })
	if err != nil {
		if !slices.Contains(c.harmed, process) {
			c.Errorf("%s: Acquire: %v", process, err)
		}
		return
	}
	if place > 0 {
		c.Errorf("%s acquired it before %v", process, c.queue[:place])
	}
	others := 0
	for _, other := range c.holders {
		if other.Context().Err() == nil {
			others++
		}
	}
	if others >= c.size {
		c.Errorf("%s acquired it while %d others held it", process, others)
	}
	if c.size == 1 && lease.Fence() <= c.fence {
		c.Errorf("%s: the fence is %d after %d", process, lease.Fence(), c.fence)
	}
	c.fence = max(c.fence, lease.Fence())
	c.holders[process] = lease
}

func (c *contest) leaves(process string, lease *lock.Lease) (lost bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.holders, process)
	lost = lease.Context().Err() != nil
	if lost && !slices.Contains(c.harmed, process) {
		c.Errorf("%s has lost its lease", process)
	}
	return lost
}

// wantNothingLeft runs the schedule to its end and then for d, and wants no key but the last fence and the marks of
// what has ended; and some time later not even these.
func (c *contest) wantNothingLeft(d time.Duration) {
	c.Settle(d)
	for _, key := range c.Server.Keys() {
		if key != "{n}:lock:fence" && !strings.HasPrefix(key, "{n}:lock:ended") {
			c.Errorf("key %q is left behind", key)
		}
	}
	c.Settle(stepMark)
	if keys := c.Server.Keys(); len(keys) > 1 || len(keys) == 1 && keys[0] != "{n}:lock:fence" {
		c.Errorf("keys %q are left behind for good", keys)
	}
}

func TestInEveryOrderNoMoreHoldALeaseThanMay(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			schedule.Explore(t, schedule.Plan{AtLeast: 80, Together: true}, func(w *schedule.World) {
				c := newContest(w, kind, sizeOf(kind))
				for _, p := range []string{"A", "B", "C"} {
					c.goTurn(p, func() {
						time.Sleep(schedule.Step)
						w.At(p, "works")
					})
				}
				c.wantNothingLeft(0)
			})
		})
	}
}

func TestInEveryOrderTheTroublesOfOneDoNotDisturbTheOthers(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			plan := schedule.Plan{
				AtLeast: 200, Together: true, Faults: 1, Hit: []string{"A"}, Cancel: []string{"A"}, Break: true,
				Hold: []time.Duration{3 * schedule.Step}, Cut: []time.Duration{stepTTL + 2*schedule.Step},
			}
			schedule.Explore(t, plan, func(w *schedule.World) {
				c := newContest(w, kind, 1, "A")
				for _, p := range []string{"A", "B"} {
					c.goTurn(p, func() {
						time.Sleep(schedule.Step)
						w.At(p, "works")
					})
				}
				c.wantNothingLeft(stepTTL)
			})
		})
	}
}

func TestInEveryOrderAWaiterThatGivesUpHarmsNobody(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			plan := schedule.Plan{AtLeast: 40, Together: true, Faults: 1, Cancel: []string{"B"}}
			schedule.Explore(t, plan, func(w *schedule.World) {
				c := newContest(w, kind, 1, "B")
				processes := []string{"A", "B"}
				if kind == "fair" {
					processes = append(processes, "C") // who may stand behind B
				}
				for _, p := range processes {
					c.goTurn(p, func() { w.At(p, "works") })
				}
				c.wantNothingLeft(0)
			})
		})
	}
}

// What may happen to the commands of a process: they are held up for longer than it waits for them, and lose their
// connections.
var late = schedule.Plan{Hit: []string{"A"}, Break: true, Hold: []time.Duration{3 * schedule.Step}}

func TestInEveryOrderARenewalBringsNothingBack(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			plan := late
			plan.AtLeast, plan.Faults = 40, 1
			schedule.Explore(t, plan, func(w *schedule.World) {
				c := newContest(w, kind, 1, "A")
				c.goTurn("A", func() {
					time.Sleep(stepTTL / 3) // a renewal is on its way
					w.At("A", "is done")
				})
				c.wantNothingLeft(stepTimeout)
			})
		})
	}
}

func TestInEveryOrderAnAcquireThatHasBeenGivenUpTakesNothing(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			plan := late
			plan.AtLeast, plan.Faults, plan.Cancel = 200, 2, []string{"A"}
			schedule.Explore(t, plan, func(w *schedule.World) {
				c := newContest(w, kind, 1, "A")
				c.goTurn("A", func() { w.At("A", "works") })
				c.wantNothingLeft(stepTimeout)
			})
		})
	}
}

func TestInEveryOrderALostReplyDoesNotLockItsOwnerOut(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			plan := schedule.Plan{AtLeast: 10, Faults: 1, Break: true}
			schedule.Explore(t, plan, func(w *schedule.World) {
				c := newContest(w, kind, 1)
				begun := time.Now()
				c.goTurn("A", func() {
					if d := time.Since(begun); d >= stepTTL {
						w.Errorf("acquired after %v, as if another one had held it", d)
					}
				})
				c.wantNothingLeft(stepTimeout)
			})
		})
	}
}

func TestInEveryOrderALeaseThatRedisHasLostEndsWithItsRenewal(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			schedule.Explore(t, schedule.Plan{AtLeast: 5, Together: true, Pauses: 4}, func(w *schedule.World) {
				c := newContest(w, kind, 1)
				a, b, rdb := c.locker("A"), c.locker("B"), w.Client("B")
				acquired := make(chan struct{})
				w.Go("A", "A", func(ctx context.Context) {
					lease, err := a.Acquire(ctx)
					close(acquired)
					if err != nil {
						w.Errorf("A: %v", err)
						return
					}
					time.Sleep(2 * stepTTL) // longer than B takes to begin, and then a third of TTL
					if context.Cause(lease.Context()) != lock.ErrLost {
						w.Errorf("A does not know that it has lost its lease")
					}
					if err := lease.Release(ctx); !errors.Is(err, lock.ErrLost) {
						w.Errorf("A: Release: %v, want ErrLost", err)
					}
				})
				w.Go("B", "B", func(ctx context.Context) {
					<-acquired
					w.At("B", "makes Redis lose it")
					if n := rdb.Del(ctx, "{n}:lock").Val(); n != 1 {
						w.Errorf("%d keys were there", n)
					}
					lease, err := b.Acquire(ctx)
					if err != nil {
						w.Errorf("B: %v", err)
						return
					}
					time.Sleep(stepTTL)
					if err := lease.Release(ctx); err != nil {
						w.Errorf("B: Release: %v", err)
					}
				})
				c.wantNothingLeft(0)
			})
		})
	}
}

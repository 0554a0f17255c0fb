package lock_test

import (
	"context"
	"errors"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/schedule"
	"github.com/singlefill/singlefill/internal/tests/locktest"
	"github.com/singlefill/singlefill/lock"
)

// These tests hold in every order in which the commands of several processes can reach Redis: see
// package schedule. With -short they run a sample of the orders.

func TestMain(m *testing.M) {
	debug.SetGCPercent(400) // miniredis makes a Lua state for each script
	redistest.Main(m)
}

// Times in whole steps of the scheduler.
const (
	stepTTL     = 9 * schedule.Step
	stepTimeout = 2 * schedule.Step

	// stepMark is the longest life of a mark, and a step.
	stepMark = 2*(stepTTL+2*stepTimeout) + schedule.Step
)

// A contest is processes that acquire leases of one name. It knows which of them may hold one.
type contest struct {
	*schedule.World
	kind locktest.Kind

	// harmed are the processes to which faults may happen. They may fail, and lose their leases.
	harmed []string

	mu      sync.Mutex             // guards all fields below
	holders map[string]*lock.Lease // by process
	fence   int64                  // the largest
	queue   []string               // processes that wait, in the order of their first commands
}

func newContest(w *schedule.World, kind locktest.Kind, harmed ...string) *contest {
	w.Scripts(locktest.Scripts(), ".")
	c := &contest{World: w, kind: kind, harmed: harmed, holders: make(map[string]*lock.Lease)}
	w.Executed = c.executed
	return c
}

func (c *contest) locker(process string) *lock.Locker {
	opts := &lock.Options{TTL: stepTTL, WaiterTTL: stepTTL, RedisTimeout: stepTimeout}
	l, err := c.kind.Open(c.Client(process), "n", opts)
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
	if n := c.held(); n > c.kind.Size {
		c.Errorf("%d leases are held on the server, want at most %d", n, c.kind.Size)
	}
	if strings.HasPrefix(what, `"fair_acquire`) && !slices.Contains(c.queue, process) && c.holders[process] == nil {
		c.queue = append(c.queue, process)
	}
}

// held returns how many leases the server has.
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

// goTurn starts a process that acquires a lease, works and releases it, and checks that it may.
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
	if others >= c.kind.Size {
		c.Errorf("%s acquired it while %d others held it", process, others)
	}
	if c.kind.Size == 1 && lease.Fence() <= c.fence {
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

// wantNothingLeft runs the schedule to its end and then for d. It wants no key but the last fence
// and the marks of ended attempts, and later no marks.
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

// eachKind runs a test for each kind, each with one holder at most.
func eachKind(t *testing.T, run func(t *testing.T, kind locktest.Kind)) {
	for _, kind := range locktest.Kinds {
		kind.Size = 1
		t.Run(kind.Name, func(t *testing.T) {
			t.Parallel()
			run(t, kind)
		})
	}
}

// explore runs a scenario in every order of the plan, or in a sample of them.
func explore(t *testing.T, plan schedule.Plan, scenario func(w *schedule.World)) {
	if redistest.Quick() || redistest.Race {
		plan.AtLeast, plan.Sample = 0, 10
	}
	schedule.Explore(t, plan, scenario)
}

// late is a plan in which the commands of a process are held up for longer than it waits for them,
// and lose their connections.
var late = schedule.Plan{Hit: []string{"A"}, Break: true, Hold: []time.Duration{3 * schedule.Step}}

func with(plan schedule.Plan, atLeast, faults int, cancel ...string) schedule.Plan {
	plan.AtLeast, plan.Faults, plan.Cancel = atLeast, faults, cancel
	return plan
}

// scenarios are processes that take turns in every order of a plan.
var scenarios = []struct {
	promise   string
	plan      schedule.Plan
	harmed    []string
	processes []string
	work      time.Duration
	rest      time.Duration // until nothing is left
}{
	{"not too many holders", schedule.Plan{AtLeast: 80, Together: true},
		nil, []string{"A", "B", "C"}, schedule.Step, 0},
	{"the faults of one process do not affect the others", schedule.Plan{
		AtLeast: 200, Together: true, Faults: 1, Hit: []string{"A"}, Cancel: []string{"A"}, Break: true,
		Hold: []time.Duration{3 * schedule.Step}, Cut: []time.Duration{stepTTL + 2*schedule.Step},
	}, []string{"A"}, []string{"A", "B"}, schedule.Step, stepTTL},
	{"a waiter that gives up does not affect the others", with(schedule.Plan{Together: true}, 40, 1, "B"),
		[]string{"B"}, []string{"A", "B", "C"}, 0, 0},
	{"a renewal that is in transit at the release brings no lease back", with(late, 40, 1),
		[]string{"A"}, []string{"A"}, stepTTL / 3, stepTimeout},
	{"an acquire that was given up takes nothing", with(late, 200, 2, "A"),
		[]string{"A"}, []string{"A"}, 0, stepTimeout},
	{"a lost reply does not lock its owner out", schedule.Plan{AtLeast: 10, Faults: 1, Break: true},
		nil, []string{"A"}, 0, stepTimeout},
}

// What each scenario promises holds in every order. A process that is alone has the lock before it
// could be another's lease that ends.
func TestInEveryOrder(t *testing.T) {
	for _, sc := range scenarios {
		t.Run(sc.promise, func(t *testing.T) {
			each := eachKind
			if sc.harmed == nil && len(sc.processes) > 1 {
				each = locktest.EachKind // with a semaphore of two places
			}
			each(t, func(t *testing.T, kind locktest.Kind) {
				explore(t, sc.plan, func(w *schedule.World) {
					c := newContest(w, kind, sc.harmed...)
					begun := time.Now()
					for _, p := range sc.processes {
						if p == "C" && len(sc.harmed) > 0 && kind.Name != "fair" {
							continue // only in a queue it can be behind a waiter that gives up
						}
						c.goTurn(p, func() {
							if d := time.Since(begun); len(sc.processes) == 1 && sc.harmed == nil && d >= stepTTL {
								w.Errorf("acquired after %v, as if another one had held it", d)
							}
							time.Sleep(sc.work)
							w.At(p, "works")
						})
					}
					c.wantNothingLeft(sc.rest)
				})
			})
		})
	}
}

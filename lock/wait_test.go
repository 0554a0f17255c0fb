package lock_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"
)

// A waiter backs off, and takes over from a dead holder when its lease ends.
func TestAcquire_DeadHolder(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		const life = leaseTTL
		c := recordMuted(m)
		for i := range 4 {
			name := fmt.Sprint("n", i)
			learn(t, rdb)
			begun := time.Now()
			takeFor(t, rdb, kind, name)
			c.reset()
			lease := mustAcquire(t, newLocker(t, kind, rdb, name, nil))
			// A semaphore's leases, and what is left of them, end with a millisecond of the
			// server's clock.
			if took := time.Since(begun); took < life-time.Millisecond || took > life+6*time.Millisecond {
				t.Errorf("taken over after %v, want %v and 6ms more at most", took, life)
			}
			asked := c.all()
			pauses := make(map[time.Duration]bool) // random ones: waiters that begin together do not ask together
			backoff := 2 * time.Millisecond
			for i := range len(asked) - 2 { // the last pause ends with the lease
				if kind == "fair" { // the pause of the first waiter follows the age of the lease
					backoff = min(max(2*time.Millisecond, asked[i].at.Sub(begun)/8), 100*time.Millisecond)
				}
				pause := asked[i+1].at.Sub(asked[i].at)
				if pause < backoff/2 || pause > backoff*3/2 {
					t.Errorf("pause %d is %v, want half to one and a half of %v", i, pause, backoff)
				}
				pauses[pause] = true
				backoff = min(2*backoff, 100*time.Millisecond)
			}
			if n := len(asked); n < 70 || n > 200 || len(pauses) < n/2 {
				t.Errorf("it has asked %d times in %v, after %d different pauses", n, life, len(pauses))
			}
			mustRelease(t, lease)
		}
	})
}

// A waiting process is not starved by others that take the lock again at once: four of them all get
// it again and again in a time that follows from the rules, whichever of them is quicker at an
// instant.
//
//fault:greedy-loop
func TestAcquire_IsNotStarvedByALoop(t *testing.T) {
	for _, hold := range []time.Duration{time.Millisecond, 10 * time.Millisecond, 300 * time.Millisecond} {
		for _, muted := range []bool{false, true} { // without wake-ups, too
			what := fmt.Sprintf("%v, muted %v", hold, muted)
			runEachKind(t, what, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
				if muted {
					redistest.Mute(m)
				}
				compete(t, kind, m, hold)
			})
		}
	}
}

// compete has four processes acquire the lock in loops, until each has had it ten times.
func compete(t *testing.T, kind string, m *miniredis.Miniredis, hold time.Duration) {
	const loops, times = 4, 10
	// A waiter that sees two grants to others reserves the next one, and gets it after those that
	// have waited for longer, each of which may see two, too. A grant may take a hold and a pause.
	const grants = loops * (2 + 1 + 1)
	ctx, cancel := context.WithTimeout(t.Context(), times*grants*(hold+longestPause))
	defer cancel()
	var wg sync.WaitGroup
	var counts [loops]int
	var done atomic.Int32
	for i := range counts {
		l := newLocker(t, kind, redistest.NewMiniClient(t, m), "n", nil)
		wg.Go(func() {
			for ctx.Err() == nil {
				lease, err := l.Acquire(ctx)
				if err != nil {
					if !errors.Is(err, ctx.Err()) {
						t.Error(err)
					}
					return
				}
				if counts[i]++; counts[i] == times && done.Add(1) == loops {
					cancel()
				}
				time.Sleep(hold)
				mustRelease(t, lease)
			}
		})
	}
	wg.Wait()
	t.Logf("%s: %v", kind, counts)
	if done.Load() != loops {
		t.Errorf("grants: %v, want each process to have %d", counts, times)
	}
}

// Two hundred waiters of a process send a few scripts, and waiters of a fair mutex one more each, for
// a place. With a Locker for each of them they cost the server the same: one of them asks and listens.
//
//fault:long-waits
func TestShared_ManyLockers(t *testing.T) {
	eachKindInBubble(t, func(t *testing.T, kind string, m *miniredis.Miniredis, rdb *redis.Client) {
		waiters := 200
		if redistest.Race {
			waiters = 50
		}
		opts := &lock.Options{TTL: time.Hour}
		holder := newLocker(t, kind, rdb, "n", opts)
		c := record(m)
		// wait has waiters wait for a time, each with the Locker that next returns, and then get the
		// lock. It returns how many scripts the server got during that, and after it.
		wait := func(next func() *lock.Locker) (waiting, serving int) {
			lease := mustAcquire(t, holder)
			c.reset()
			var wg sync.WaitGroup
			for range waiters {
				l := next()
				wg.Go(func() {
					if err := l.Do(t.Context(), func(context.Context) error { return nil }); err != nil {
						t.Error(err)
					}
				})
			}
			synctest.Wait()
			if n := len(c.all()); kind != "fair" && n > 10 || n > 2*waiters+10 {
				t.Errorf("%d scripts at first", n)
			}
			c.reset()
			time.Sleep(10 * time.Minute)
			waiting = len(c.all())
			most := 200
			if kind == "fair" {
				most = 730 // they keep their places
			}
			if waiting > most {
				t.Errorf("%d scripts in ten minutes, want %d at most", waiting, most)
			}
			if channels := m.PubSubChannels("*"); len(channels) != 1 {
				t.Errorf("%d channels are subscribed", len(channels))
			}
			c.reset()
			mustRelease(t, lease)
			wg.Wait()
			return waiting, len(c.all())
		}
		l, client := newLocker(t, kind, redistest.NewMiniClient(t, m), "n", opts), redistest.NewMiniClient(t, m)
		waiting, serving := wait(func() *lock.Locker { return l })
		time.Sleep(time.Minute)
		waitingMany, servingMany := wait(func() *lock.Locker { return newLocker(t, kind, client, "n", opts) })
		if waitingMany > waiting*11/10 { // the pauses are random
			t.Errorf("while they wait: %d scripts, and %d with one Locker", waitingMany, waiting)
		}
		// Each acquires and releases. A wake-up that comes before its poll has ended costs another poll.
		if most := 3 * waiters; serving > most || servingMany > most {
			t.Errorf("until all have had it: %d scripts, and %d with one Locker; want at most %d", servingMany, serving, most)
		}
	})
}

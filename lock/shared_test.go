package lock_test

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/lock"
)

// Two hundred Lockers of one name in a process cost the server what the waiters of one cost: one of
// them asks and listens.
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
			c.reset()
			time.Sleep(10 * time.Minute)
			waiting = len(c.all())
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

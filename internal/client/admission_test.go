package client_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// Hits of a Redis that is some milliseconds away are hits, however many are sent at a time.
//
//fault:many-commands
func TestAdmission_Hits(t *testing.T) {
	const keys, connections = 300, 10
	const roundTrip, redisTimeout = 40 * time.Millisecond, 100 * time.Millisecond // too slow to send many together
	for kind, bounded := range map[string]bool{"default": false, "minds deadlines": true} {
		synctest.Test(t, func(t *testing.T) {
			rdb := distantMini(t, connections, bounded, roundTrip)
			c := cachetest.New(t, rdb, "ns", redisTimeout)
			for i := range keys {
				key := fmt.Sprint("k", i)
				redistest.Must(t, c.Set(t.Context(), key, "value of "+key))
			}
			begun := time.Now()
			var wg sync.WaitGroup
			for i := range keys {
				wg.Go(func() { c.WantValue(fmt.Sprint("k", i)) })
			}
			synctest.Wait()
			if n := c.Stats().CommandsQueued; n != keys-connections/4 {
				t.Errorf("%s: %d commands wait to be sent, want %d", kind, n, keys-connections/4)
			}
			wg.Wait()
			if took := time.Since(begun); took < 10*redisTimeout {
				t.Errorf("%s: the last hit came after %v, which shows nothing", kind, took)
			}
			if n := c.Stats(); n.Loads != 0 || n.Hits != keys || n.RedisErrors != 0 || n.CommandsQueued != 0 {
				t.Errorf("%s: Stats are %+v", kind, n)
			}
			_ = c.Close()
			time.Sleep(time.Minute)
		})
	}
}

// A caller whose read waits for a connection returns at its deadline or cancellation, while callers
// beside it wait on.
//
//fault:many-commands
func TestAdmission_ImpatientCaller(t *testing.T) {
	const redisTimeout, takes, patience = 8 * time.Second, time.Second, 800 * time.Millisecond
	for kind, bounded := range map[string]bool{"default": false, "minds deadlines": true} {
		for end, cancelAt := range map[string]time.Duration{"deadline": time.Hour, "cancelled": patience} {
			synctest.Test(t, func(t *testing.T) {
				rdb := distantMini(t, 1, bounded, takes)
				c := cachetest.New(t, rdb, "ns", redisTimeout, func(o *singlefill.Options[string]) { o.LockTTL = 25 * time.Second })
				c.During = func(string) { time.Sleep(10 * time.Millisecond) }
				var wg sync.WaitGroup
				for i := range 20 { // of which one is sent, and the others wait
					wg.Go(func() { _, _ = c.Get(t.Context(), fmt.Sprint("other", i)) })
					synctest.Wait()
				}
				ctx, cancel := context.WithCancel(t.Context())
				time.AfterFunc(cancelAt, cancel)
				if end == "deadline" {
					ctx, cancel = context.WithTimeout(t.Context(), patience)
				}
				defer cancel()
				begun := time.Now()
				wg.Go(func() {
					_, err := c.GetOrLoad(ctx, "k", c.Load)
					if took := time.Since(begun); err != ctx.Err() || err == nil || took != patience {
						t.Errorf("%s, %s: %v after %v, want it after %v", kind, end, err, took, patience)
					}
				})
				synctest.Wait()
				wg.Go(func() { c.WantValue("k") })
				wg.Wait()
				if n := c.Stats(); c.Loads.Load() != 1 || n.LoadsUnlocked != 0 || n.RedisErrors != 0 {
					t.Errorf("%s, %s: %d loads, Stats are %+v", kind, end, c.Loads.Load(), n)
				}
				_ = c.Close()
				time.Sleep(time.Minute)
			})
		}
	}
}

// distantMini returns a client of a miniredis, with so many connections, for which each write takes
// roundTrip.
func distantMini(t *testing.T, connections int, bounded bool, roundTrip time.Duration) *redis.Client {
	m, _ := redistest.StartMini(t)
	opt := *redistest.NewMiniClient(t, m).Options()
	opt.PoolSize, opt.ContextTimeoutEnabled = connections, bounded
	redistest.Distant(roundTrip)(&opt)
	rdb := redis.NewClient(&opt)
	t.Cleanup(func() { _ = rdb.Close() })
	return rdb
}

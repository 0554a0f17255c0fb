package cache_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// Callers less patient than RedisTimeout open the breaker of a silent Redis, and then get values:
// the commands of callers that have left go on and count.
//
//fault:impatient-callers
func TestClient_ImpatientCallers(t *testing.T) {
	t.Parallel()
	const deadline = 20 * time.Millisecond
	synctest.Test(t, func(t *testing.T) {
		link, rdb := redistest.StartMiniLink(t)
		link.BlackHole(true)
		c := cachetest.New(t, rdb, "ns", cachetest.Impatient)
		call := func(i int) error {
			ctx, cancel := context.WithTimeout(t.Context(), deadline)
			defer cancel()
			begun := time.Now()
			v, err := c.GetOrLoad(ctx, fmt.Sprintf("k%d", i), c.Load)
			switch took := time.Since(begun); {
			case err == nil && v != fmt.Sprintf("value of k%d", i):
				t.Errorf("GetOrLoad = %q", v)
			case err != nil && (err != context.DeadlineExceeded || took != deadline):
				t.Errorf("GetOrLoad = %v after %v, want DeadlineExceeded after %v", err, took, deadline)
			}
			return err
		}
		begun := time.Now()
		calls := 0
		for !c.Stats().BreakerOpen {
			if call(calls) == nil {
				t.Fatal("a call returned a value before the breaker was open")
			}
			if calls++; time.Since(begun) > 2*cachetest.Impatient {
				t.Fatal("the breaker does not open")
			}
		}
		if calls < breakerLimit {
			t.Errorf("the breaker is open after %d calls", calls)
		}
		for i := range 50 {
			if err := call(1000 + i); err != nil {
				t.Fatalf("with the breaker open: %v", err)
			}
		}
	})
}

// A healthy Redis is not taken for a dead one when many more keys are cold than the client has
// connections. The commands need more time than RedisTimeout, even if each is answered at once.
//
//fault:many-commands
func TestClient_ManyColdKeys(t *testing.T) {
	t.Parallel()
	const keys, connections, redisTimeout = 1000, 10, 2 * time.Second
	const each = redisTimeout * connections / keys // of the reads alone
	s := redistest.Start(t)
	few := func(o *redis.Options) {
		o.PoolSize = connections
		redistest.Distant(each)(o)
	}
	a, b := newPair(t, s.Client(t, few), s.Client(t, few), redisTimeout)
	var loaded sync.Map
	a.During = func(key string) {
		if _, again := loaded.LoadOrStore(key, true); again {
			t.Errorf("%s is loaded again", key)
		}
		time.Sleep(10 * time.Millisecond)
	}
	var wg sync.WaitGroup
	for _, c := range []*cachetest.Cache{a, b} {
		for i := range keys {
			wg.Go(func() { c.WantValue(fmt.Sprint("k", i)) })
		}
	}
	redistest.Await(t, "commands wait to be sent", func() bool { return a.Stats().CommandsQueued > 0 })
	wg.Wait()
	a.WantLoads(keys)
	for _, c := range []*cachetest.Cache{a, b} {
		c.WantNoErrors()
		if n := c.Stats(); n.LoadsUnlocked != 0 || n.BreakerOpens != 0 {
			t.Errorf("Stats are %+v", n)
		}
	}
}

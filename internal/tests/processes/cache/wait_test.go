package cache_test

import (
	"fmt"
	"testing"

	"github.com/singlefill/singlefill/internal/redistest"
)

// Waiting holds no connection.
//
//fault:waiting-callers
func TestWait_NoConnection(t *testing.T) {
	t.Parallel()
	const keys, callers, connections = 50, 10, 2
	f := newFleet(t)
	holder, waiter := f.start(config{}), f.start(config{PoolSize: connections})
	var groups []waiters
	for i := range keys {
		key := fmt.Sprint("key", i)
		holder.block(key, key)
		waiter.get(key, key, callers, plan{})
		groups = append(groups, waiters{waiter, key, key})
	}
	awaitWaiting(groups...)
	redistest.Await(t, "all connections are idle while callers wait for all keys", func() bool {
		pool := waiter.pool()
		return pool.TotalConns > 0 && pool.TotalConns <= connections && pool.IdleConns == pool.TotalConns
	})
	waiter.get("own", "own", 5, plan{})
	waiter.wantDone("own", 5, gotValue, waiter.begun("own").Value)
	for i := range keys {
		key := fmt.Sprint("key", i)
		holder.release(key)
		waiter.wantDone(key, callers, gotValue, fmt.Sprintf("%s/%d", holder.name, i+1))
	}
	if s := waiter.stats(); s.Waits != keys || s.Loads != 1 || s.RedisErrors != 0 {
		t.Errorf("Stats are %+v", s)
	}
}

package cache_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// A replica may serve hits, but takes no part in decisions: one that lags costs a command, not a
// load.
//
//fault:replica
func TestReplica_ServesHits(t *testing.T) {
	t.Parallel()
	master := redistest.Start(t)
	replica := redistest.StartReplica(t, master)
	rdb := redis.NewClusterClient(&redis.ClusterOptions{
		RouteRandomly: true,
		ClusterSlots: func(context.Context) ([]redis.ClusterSlot, error) {
			return []redis.ClusterSlot{{End: 16383, Nodes: []redis.ClusterNode{{Addr: master.Addr}, {Addr: replica.Addr}}}}, nil
		},
	})
	t.Cleanup(func() { _ = rdb.Close() })
	c := cachetest.New(t, rdb, redistest.Namespace(t), cachetest.Patient)

	c.MustLoad("k")
	redistest.Await(t, "the replica has the value", func() bool { return redistest.Exists(t, replica.Admin(), c.ValueKey("k")) })
	replica.ResetCalls()
	redistest.Await(t, "the replica has answered hits", func() bool { c.MustLoad("k"); return replica.Calls("get") > 10 })
	if n := replica.Calls("evalsha") + replica.Calls("eval"); n != 0 {
		t.Errorf("the replica was sent %d scripts", n)
	}

	// The replica loses the key, as if it lagged.
	redistest.Do(t, replica.Admin(), "config", "set", "replica-read-only", "no")
	if n, err := replica.Admin().Del(t.Context(), c.ValueKey("k")).Result(); n != 1 || err != nil {
		t.Fatalf("DEL on the replica: %d, %v", n, err)
	}
	misses := c.Stats().Misses
	redistest.Await(t, "the replica has answered misses", func() bool { c.MustLoad("k"); return c.Stats().Misses > misses+10 })
	if s := c.Stats(); s.Loads != 1 || s.RedisErrors != 0 {
		t.Errorf("Stats are %+v, want one load and no error", s)
	}
}

// A failover by a sentinel costs the time that it takes.
//
//fault:sentinel
func TestReplica_TakesOver(t *testing.T) {
	t.Parallel()
	master := redistest.Start(t)
	replica := redistest.StartReplica(t, master)
	sentinel := redistest.StartSentinel(t, master)
	rdb := redis.NewFailoverClient(&redis.FailoverOptions{
		MasterName: redistest.MasterName, SentinelAddrs: []string{sentinel.Addr}, DisableIdentity: true,
	})
	t.Cleanup(func() { _ = rdb.Close() })
	c := cachetest.New(t, rdb, redistest.Namespace(t), 300*time.Millisecond)
	c.AwaitCached("kept")
	redistest.Await(t, "the replica has the entry", func() bool { return redistest.Exists(t, replica.Admin(), c.ValueKey("kept")) })
	master.Kill()
	c.MustLoad("kept")
	c.MustLoad("new")
	c.WantErrors()
	c.AwaitRecovery()
	redistest.Await(t, "a hit on the former replica", func() bool {
		_, err := c.Get(t.Context(), "kept")
		return err == nil
	})
	role, err := replica.Admin().Do(t.Context(), "role").Slice()
	if err != nil || role[0] != "master" {
		t.Errorf("the replica's role is %v, %v", role, err)
	}
	redistest.WantTTLs(t, replica.Admin())
}

// A failover that loses a lock costs a second load, and the value of the first one is refused.
//
//fault:failover-lost-lock
func TestReplica_TakesOverWithoutLock(t *testing.T) {
	t.Parallel()
	master := redistest.Start(t)
	replica := redistest.StartReplica(t, master)
	p := redistest.NewProxy(t, master.Addr)
	a, b := newPair(t, p.Client(t), p.Client(t), cachetest.Patient)
	a.During = func(key string) {
		a.During = nil
		if redistest.Exists(t, replica.Admin(), a.LockKey(key)) {
			t.Error("the replica has the lock")
		}
		master.Kill()
		redistest.Do(t, replica.Admin(), "replicaof", "no", "one")
		p.Redirect(replica.Addr)
		p.Cut()
		b.MustLoad(key)
		b.WantHit(key)
	}
	host, _, _ := strings.Cut(replica.Addr, ":")
	redistest.Do(t, replica.Admin(), "replicaof", host, 1) // a port without a server: the replica is cut off
	a.MustLoad("k")
	a.AwaitLoads()
	a.WantLoads(2)
	b.WantHit("k")
	if s := a.Stats(); s.Stored != 0 || s.Fenced != 1 {
		t.Errorf("Stats of the cache that lost its lock are %+v; errors %v", s, a.Log.Errors())
	}
	if s := b.Stats(); s.Stored != 1 || s.Loads != 1 {
		t.Errorf("Stats of the other cache are %+v; errors %v", s, b.Log.Errors())
	}
}

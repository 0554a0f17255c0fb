package cache_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// A dead node of a cluster costs only the keys in its slots.
//
//fault:frozen-node
//fault:dead-node
func TestCluster_NodeDies(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t)
	for _, node := range cluster.Nodes {
		redistest.Do(t, node.Admin(), "config", "set", "cluster-require-full-coverage", "no")
	}
	c := cachetest.New(t, cluster.Client(t), redistest.Namespace(t), 300*time.Millisecond)
	const each = 6
	var living, dead []string
	for i := 0; len(living) < each || len(dead) < each; i++ {
		key := fmt.Sprintf("k%d", i)
		c.AwaitCached(key)
		if cluster.Owner(t, c.ValueKey(key)) == cluster.Nodes[1] {
			dead = append(dead, key)
		} else {
			living = append(living, key)
		}
	}
	cluster.Nodes[1].Kill()

	redistest.Await(t, "a round in which all keys of living nodes are hits", func() bool {
		ok := true
		for i := range each {
			c.MustLoad(dead[i])
			before := c.Loads.Load()
			c.MustLoad(living[i])
			ok = ok && c.Loads.Load() == before
		}
		return ok
	})
	c.WantErrors()
	for name, invalidate := range map[string]func(context.Context, ...string) error{
		"Delete": c.Delete, "Expire": c.Expire,
	} {
		if err := invalidate(t.Context(), append(living, dead...)...); err == nil {
			t.Errorf("%s of keys on all nodes = nil", name)
		}
		before := c.Loads.Load()
		for _, key := range living { // loaded and stored again
			c.MustLoad(key)
			c.WantHit(key)
		}
		c.WantLoads(before + int64(len(living)))
	}
}

// While a node is frozen, values are stored whose key, and what is known of their tags, are on others.
//
//fault:frozen-node
func TestCluster_FrozenNodeOfTags(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t)
	ns, ctx := redistest.Namespace(t), t.Context()
	c := cachetest.New(t, cluster.Client(t), ns, 300*time.Millisecond, func(o *singlefill.Options[string]) {
		o.Tags = func(key, _ string) []string { return []string{strings.TrimRight(key, "0123456789")} }
	})
	frozen := cluster.Owner(t, fmt.Sprintf("%s:tags:{%s:0}:book", ns, ns)) // the node that is asked first
	onFrozen := func(key string) bool { return cluster.Owner(t, c.ValueKey(key)) == frozen }
	tag := ""
	for letter := 'a'; tag == ""; letter++ {
		redistest.Must(t, c.Set(ctx, string(letter), "v"))
		for _, node := range cluster.Nodes {
			found, err := node.Admin().Keys(ctx, ns+":tags:*:"+string(letter)+":index").Result()
			redistest.Must(t, err)
			if len(found) > 0 && node != frozen {
				tag = string(letter)
			}
		}
	}
	var living []string
	dead := ""
	for i := 0; len(living) < 20 || dead == ""; i++ {
		if key := fmt.Sprint(tag, i); onFrozen(key) {
			dead = key
		} else {
			living = append(living, key)
		}
	}
	frozen.Freeze()
	defer frozen.Thaw()
	redistest.Await(t, "the breaker opens", func() bool { c.MustLoad(dead); return c.Stats().BreakerOpen })
	for _, key := range living {
		c.MustLoad(key)
	}
	c.AwaitLoads()
	for _, key := range living {
		c.WantHit(key)
	}
	c.WantErrors()
}

// A master that dies is replaced, while callers of its keys get their values.
//
//fault:dead-master
func TestCluster_MasterDies(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartReplicatedCluster(t) // three masters with a replica each
	often := func(o *redis.ClusterOptions) { o.ClusterStateReloadInterval, o.DialerRetries = 500*time.Millisecond, 1 }
	a, b := newPair(t, cluster.Client(t, often), cluster.Client(t, often), 300*time.Millisecond)
	keys := keysOf("k", 60)
	for _, key := range keys {
		a.AwaitCached(key)
	}
	victim := cluster.Owner(t, a.ValueKey("k0"))
	survives := func(key string) bool { return cluster.Owner(t, a.ValueKey(key)) != victim }
	lost := slices.DeleteFunc(slices.Clone(keys), survives)
	victim.Kill()
	begun := time.Now()
	var stopped atomic.Bool
	var wg sync.WaitGroup
	for _, c := range []*cachetest.Cache{a, b} {
		for g := range 4 {
			wg.Go(func() {
				for i := 0; !stopped.Load(); i++ {
					c.MustLoad(keys[(i+g*17)%len(keys)])
				}
			})
		}
	}
	redistest.Await(t, "the keys of the dead master are cached again", func() bool {
		for _, key := range lost {
			if _, err := b.Get(context.Background(), key); err != nil {
				return false
			}
		}
		return true
	})
	back := time.Since(begun)
	stopped.Store(true)
	wg.Wait()
	t.Logf("%d of %d keys were on the dead master, and cached again after %v", len(lost), len(keys), back.Round(time.Millisecond))
	if a.Log.ErrorCount()+b.Log.ErrorCount() == 0 {
		t.Error("no cache has noticed the fault")
	}
	if owner := cluster.Owner(t, a.ValueKey(lost[0])); owner == victim {
		t.Error("the dead master still owns its slots")
	}
	a.AwaitRecovery()
	b.AwaitRecovery()
}

// A slot that moves to another node during a load costs no call its value. In between the lock is
// on one node and the value on the other or nowhere, and Redis answers scripts on both with
// TRYAGAIN.
//
//fault:moved-slot
func TestCluster_MovingSlot(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t)
	tryAgain := func() int { return redistest.ErrorsSaid(t, "TRYAGAIN", cluster.Nodes...) }
	for key, movesFirst := range map[string]func(c *cachetest.Cache, key string) string{
		"lock-first":  (*cachetest.Cache).LockKey,
		"value-first": (*cachetest.Cache).ValueKey,
	} {
		t.Run(key, func(t *testing.T) {
			a, b := newPair(t, cluster.Client(t), cluster.Client(t), cachetest.Patient,
				func(o *singlefill.Options[string]) { o.StaleIfError = time.Hour })
			if key == "value-first" { // there is one, and it is expired
				a.MustLoad(key)
				redistest.Must(t, a.Expire(t.Context(), key))
				a.AwaitLoads()
				a.Loads.Store(0)
			}
			from := cluster.Owner(t, a.ValueKey(key))
			before := tryAgain()
			var wg sync.WaitGroup
			var moving atomic.Pointer[redistest.Move]
			a.During = func(string) {
				goWait(t, &wg, b, from, key)
				move := cluster.Move(t, a.ValueKey(key))
				move.Take(movesFirst(a, key))
				moving.Store(move)
			}
			begun := time.Now()
			wg.Go(func() { a.MustLoad(key) })
			redistest.Await(t, "scripts are answered with TRYAGAIN", func() bool { return tryAgain() > before+2 })
			move := moving.Load()
			move.End()
			wg.Wait()
			t.Logf("a load with a move in it took %v", time.Since(begun).Round(time.Millisecond))
			if owner := cluster.Owner(t, a.ValueKey(key)); owner != move.To {
				t.Error("the key has not changed its node")
			}
			a.WantHit(key)
			b.WantHit(key)
			a.WantLoads(1)
			if s := a.Stats(); s.LoadsUnlocked+s.LocksLost+s.Fenced != 0 {
				t.Errorf("Stats are %+v; errors %v", s, a.Log.Errors())
			}
			redistest.Await(t, "the lock is free", func() bool { return !strings.HasPrefix(held(move.To, a, key), "H") })
		})
	}
}

// A replica may serve hits, but takes no part in decisions: a replica that lags costs a command,
// not a load.
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
}

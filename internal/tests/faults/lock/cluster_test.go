package lock_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/locktest"
	"github.com/singlefill/singlefill/lock"
)

// Clusters whose keys move and whose nodes die.

// The keys of a lock that is held and waited for move to another node, one by one, and nothing is
// lost. Redis runs no script on keys that are in two places, and says to try again.
//
//fault:moved-slot
func TestCluster_SlotMoves(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t)
	contested := contestAll(t, cluster.Client(t), holdAll(t, cluster.Client(t), time.Second, 6*time.Second))
	renewals := make(map[string]int) // after the move
	for _, c := range contested {
		from := cluster.Owner(t, locktest.Key(c.Name))
		if c.Name == "fair" {
			redistest.Await(t, "the waiter is in the queue", func() bool {
				return from.Admin().ZCard(context.Background(), locktest.Key(c.Name)+":queue").Val() == 1
			})
		}
		before := redistest.ErrorsSaid(t, "TRYAGAIN", cluster.Nodes...)
		move := cluster.Move(t, locktest.Key(c.Name))
		move.Take(locktest.Key(c.Name))
		if len(move.Rest()) == 0 {
			t.Fatalf("%s: nothing is left to be moved", c.Name)
		}
		redistest.Await(t, "a client is told to try again", func() bool { return redistest.ErrorsSaid(t, "TRYAGAIN", cluster.Nodes...) > before })
		move.End()
		if left, marks := locktest.Left(t, from.Admin(), c.Name); len(left)+len(marks) > 0 {
			t.Errorf("%s: on the old node: %q %q", c.Name, left, marks)
		}
		renewals[c.Name] = c.holder.Count("renewed")
	}
	for _, c := range contested {
		redistest.Await(t, "each is renewed on its new node",
			func() bool { return c.holder.Count("renewed") >= renewals[c.Name]+c.Size })
		c.handOver(t)
		owner := cluster.Owner(t, locktest.Key(c.Name))
		redistest.Await(t, "nothing is left of the lock", func() bool {
			left, _ := locktest.Left(t, owner.Admin(), c.Name)
			return len(left) == 0
		})
	}
}

// A master that dies costs no lease that its replica knows, if the replica takes over within TTL.
//
//fault:dead-master
func TestCluster_MasterDies(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartReplicatedCluster(t)
	often := func(o *redis.ClusterOptions) { o.ClusterStateReloadInterval, o.DialerRetries = 500*time.Millisecond, 1 }
	var all []heldLock
	for _, k := range locktest.Kinds {
		name := "{name}" + k.Name // all on one node
		all = append(all, hold(t, k, cluster.Client(t, often), name, time.Second, 12*time.Second))
	}
	victim := cluster.Owner(t, locktest.Key("{name}"))
	conn := victim.Admin().Conn()
	if n, err := conn.Wait(t.Context(), 1, 10*time.Second).Result(); n < 1 || err != nil {
		t.Fatalf("%d replicas know of it, %v", n, err)
	}
	_ = conn.Close()
	victim.Kill()
	begun := time.Now()
	for i, h := range all {
		h.awaitRenewal(t)
		if i == 0 {
			t.Logf("the first renewal by the new master came %v after the death of the old one; TTL is 12 s",
				time.Since(begun).Round(time.Millisecond))
		}
	}
	if owner := cluster.Owner(t, locktest.Key("{name}")); owner == victim {
		t.Error("the dead master serves the keys")
	}
	for _, h := range all {
		other := h.Locker(t, cluster.Client(t, often), "{name}"+h.Name, time.Second, locktest.Long)
		if _, err := other.TryAcquire(t.Context()); !errors.Is(err, lock.ErrBusy) {
			t.Errorf("%s: TryAcquire of another = %v, want ErrBusy", h.Name, err)
		}
		h.release(t)
		for _, l := range h.Fill(t, other) {
			locktest.Release(t, l)
		}
	}
}

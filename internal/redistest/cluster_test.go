package redistest

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// A cluster spreads keys over its nodes.
func TestCluster_SpreadsKeys(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	t.Parallel()
	cluster := StartCluster(t)
	c := cluster.Client(t)
	ctx := t.Context()
	for i := range 60 {
		key := fmt.Sprint("key", i)
		Must(t, c.Set(ctx, key, i, 0).Err())
		if n, err := c.Get(ctx, key).Int(); n != i || err != nil {
			t.Fatalf("read %d, %v, not %d", n, err, i)
		}
	}
	for _, node := range cluster.Nodes {
		if n := node.Calls("set"); n < 5 {
			t.Errorf("node %s got %d of 60 SETs", node.Addr, n)
		}
	}
}

// A cluster with replicas replaces a dead master.
func TestCluster_DeadMaster(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	t.Parallel()
	cluster := StartReplicatedCluster(t)
	if len(cluster.Nodes) != 3 || len(cluster.Replicas) != 3 {
		t.Fatalf("%d masters, %d replicas", len(cluster.Nodes), len(cluster.Replicas))
	}
	c := cluster.Client(t, func(o *redis.ClusterOptions) { o.ClusterStateReloadInterval = time.Second })
	ctx := t.Context()
	master := cluster.Owner(t, "k")
	setReplicated(t, master.Admin(), "k", "v")
	master.Kill()
	Await(t, "another node serves the key", func() bool { return c.Get(ctx, "k").Val() == "v" })
	if owner := cluster.Owner(t, "k"); owner == master || !strings.Contains(owner.Admin().Info(ctx,
		"replication").Val(), "role:master") {
		t.Errorf("%s serves the key, and %s is dead", owner.Addr, master.Addr)
	}
}

// Move moves a slot to another node; both nodes serve their keys in between.
func TestCluster_Move(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	t.Parallel()
	cluster := StartCluster(t)
	c := cluster.Client(t)
	ctx := t.Context()
	for _, key := range []string{"{k}1", "{k}2"} {
		Must(t, c.Set(ctx, key, key, time.Minute).Err())
	}
	move := cluster.Move(t, "{k}1")
	move.Take("{k}1")
	if rest := move.Rest(); len(rest) != 1 || rest[0] != "{k}2" {
		t.Errorf("still to be moved: %q", rest)
	}
	if err := move.From.Admin().MGet(ctx, "{k}1", "{k}2").Err(); !redis.IsTryAgainError(err) {
		t.Errorf("a command with keys on both nodes: %v", err)
	}
	both := func(when string) {
		t.Helper()
		for _, key := range []string{"{k}1", "{k}2"} {
			if v, err := c.Get(ctx, key).Result(); v != key || err != nil {
				t.Errorf("%s: read %q, %v", when, v, err)
			}
		}
	}
	both("during the move")
	move.End()
	both("after the move")
	if owner := cluster.Owner(t, "{k}1"); owner != move.To {
		t.Errorf("%s serves the keys, not %s", owner.Addr, move.To.Addr)
	}
}

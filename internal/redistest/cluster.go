package redistest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
)

// Cluster is a Redis Cluster of three masters without replicas, each with a third
// of the slots.
type Cluster struct {
	Nodes []*Server
}

const (
	clusterNodes = 3
	clusterSlots = 16384
)

// StartCluster starts a cluster and returns when every node serves every slot,
// which takes about 2 s: a master waits that long after its start. Nodes give each
// other up only after a minute, as there is nobody to take over, and a machine that
// stalls must not take the cluster down. A test that wants CLUSTERDOWN sets
// cluster-node-timeout by CONFIG.
func StartCluster(t testing.TB) *Cluster {
	t.Helper()
	c, err := launchCluster(program(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.stop)
	return c
}

func launchCluster(bin string) (*Cluster, error) {
	c := new(Cluster)
	for range clusterNodes {
		node, err := launch(bin, plain([]string{
			"--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf",
			"--cluster-node-timeout", "60000", "--cluster-announce-ip", "127.0.0.1",
		}))
		if err != nil {
			c.stop()
			return nil, err
		}
		c.Nodes = append(c.Nodes, node)
	}
	if err := c.join(); err != nil {
		c.stop()
		return nil, err
	}
	return c, nil
}

// join gives each node its slots and makes the first one meet the others. The
// epochs differ from the start, as redis-cli does it: else the nodes would settle
// the collision among themselves, later.
func (c *Cluster) join() error {
	ctx := context.Background()
	for i, node := range c.Nodes {
		low, high := i*clusterSlots/clusterNodes, (i+1)*clusterSlots/clusterNodes-1
		host, port, err := net.SplitHostPort(node.Addr)
		if err != nil {
			return err
		}
		err = errors.Join(
			node.admin.ClusterAddSlotsRange(ctx, low, high).Err(),
			node.admin.Do(ctx, "CLUSTER", "SET-CONFIG-EPOCH", i+1).Err(),
		)
		if err == nil && i > 0 {
			err = c.Nodes[0].admin.ClusterMeet(ctx, host, port).Err()
		}
		if err != nil {
			return fmt.Errorf("redistest: joining %s: %w", node.Addr, err)
		}
	}
	if !poll(awaitLimit, c.whole) {
		return fmt.Errorf("redistest: the cluster of %s is not whole after %v", c.Nodes[0].Addr, awaitLimit)
	}
	return nil
}

// whole reports whether each node knows the owner of every slot and serves.
func (c *Cluster) whole() bool {
	for _, node := range c.Nodes {
		info, err := node.admin.ClusterInfo(context.Background()).Result()
		if err != nil || !strings.Contains(info, "cluster_state:ok") ||
			!strings.Contains(info, fmt.Sprintf("cluster_slots_ok:%d", clusterSlots)) ||
			!strings.Contains(info, fmt.Sprintf("cluster_size:%d", clusterNodes)) {
			return false
		}
	}
	return true
}

func (c *Cluster) stop() {
	for _, node := range c.Nodes {
		node.stop()
	}
}

// Client returns a client of the cluster, on the terms of Server.Client.
func (c *Cluster) Client(t testing.TB, mutate ...func(*redis.ClusterOptions)) *redis.ClusterClient {
	opt := &redis.ClusterOptions{DisableIdentity: true, MaintNotificationsConfig: maintOff()}
	for _, node := range c.Nodes {
		opt.Addrs = append(opt.Addrs, node.Addr)
	}
	for _, m := range mutate {
		m(opt)
	}
	client := redis.NewClusterClient(opt)
	t.Cleanup(func() { _ = client.Close() })
	return client
}

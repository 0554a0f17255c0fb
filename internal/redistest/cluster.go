package redistest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// Cluster is a Redis Cluster of three masters, each with a third of the slots.
type Cluster struct {
	Nodes    []*Server // the masters; after a failover, the former masters
	Replicas []*Server // Replicas[i] follows Nodes[i]; empty after StartCluster
}

const (
	clusterMasters = 3
	clusterSlots   = 16384
)

// StartCluster starts a cluster without replicas and returns when every node serves every slot.
// That takes about 2 s, since a master waits that long after its start.
//
// Nodes declare each other dead only after a minute: no replica could take over, and a machine that
// stalls must not take the cluster down. A test that needs CLUSTERDOWN sets cluster-node-timeout by
// CONFIG.
func StartCluster(t testing.TB) *Cluster {
	t.Helper()
	return startCluster(t, time.Minute, false)
}

// StartReplicatedCluster starts a cluster of six nodes, in which each master has a replica with its
// data. A dead master is declared dead after 1 s and replaced 1 to 2 s later. Clients notice when
// they reload the cluster's state, every ClusterStateReloadInterval, which is a minute by default.
func StartReplicatedCluster(t testing.TB) *Cluster {
	t.Helper()
	return startCluster(t, time.Second, true)
}

func startCluster(t testing.TB, nodeTimeout time.Duration, replicas bool) *Cluster {
	t.Helper()
	c, err := launchCluster(program(t), nodeTimeout, replicas)
	Must(t, err)
	t.Cleanup(func() {
		check(t, c.all()...)
		c.stop()
	})
	return c
}

func launchCluster(bin string, nodeTimeout time.Duration, replicas bool) (*Cluster, error) {
	c := new(Cluster)
	err := c.launch(bin, nodeTimeout, replicas)
	if err == nil {
		err = c.join()
	}
	if err != nil {
		c.stop()
		return nil, err
	}
	return c, nil
}

func (c *Cluster) launch(bin string, nodeTimeout time.Duration, replicas bool) error {
	kinds := []*[]*Server{&c.Nodes}
	if replicas {
		kinds = append(kinds, &c.Replicas)
	}
	for _, nodes := range kinds {
		for range clusterMasters {
			node, err := launch(bin, plain([]string{
				"--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf",
				"--cluster-node-timeout", strconv.FormatInt(nodeTimeout.Milliseconds(), 10),
				"--cluster-announce-ip", "127.0.0.1", "--repl-diskless-sync-delay", "0",
			}))
			if err != nil {
				return err
			}
			*nodes = append(*nodes, node)
		}
	}
	return nil
}

// join assigns the slots, introduces the nodes to the first one, and gives each master its replica.
// It sets different epochs, as redis-cli does. Otherwise the nodes would resolve the collision
// later, by themselves.
func (c *Cluster) join() error {
	ctx := context.Background()
	for i, node := range c.all() {
		var err error
		if i < clusterMasters {
			low, high := i*clusterSlots/clusterMasters, (i+1)*clusterSlots/clusterMasters-1
			err = errors.Join(
				node.admin.ClusterAddSlotsRange(ctx, low, high).Err(),
				node.admin.Do(ctx, "CLUSTER", "SET-CONFIG-EPOCH", i+1).Err(),
			)
		}
		if err == nil && i > 0 {
			host, port := node.hostPort()
			err = c.Nodes[0].admin.ClusterMeet(ctx, host, port).Err()
		}
		if err != nil {
			return fmt.Errorf("redistest: joining %s: %w", node.Addr, err)
		}
	}
	if err := c.await("each knows all", c.acquainted); err != nil {
		return err
	}
	for i, replica := range c.Replicas {
		if err := replica.admin.ClusterReplicate(ctx, c.Nodes[i].clusterID()).Err(); err != nil {
			return fmt.Errorf("redistest: making %s a replica: %w", replica.Addr, err)
		}
	}
	return c.await("every slot is served, and each replica has its data", c.whole)
}

func (c *Cluster) await(what string, cond func() bool) error {
	if !poll(awaitLimit, cond) {
		return fmt.Errorf("redistest: the cluster of %s: not within %v: %s", c.Nodes[0].Addr, awaitLimit, what)
	}
	return nil
}

func (c *Cluster) acquainted() bool {
	return c.each(func(node *Server) bool {
		return says(node.admin.ClusterInfo(context.Background()), fmt.Sprintf("cluster_known_nodes:%d\r", len(c.all())))
	})
}

// whole reports whether each node serves, knows the owner of every slot, and knows the role of
// every node.
func (c *Cluster) whole() bool {
	ctx := context.Background()
	for _, replica := range c.Replicas {
		if !says(replica.admin.Info(ctx, "replication"), "master_link_status:up") {
			return false
		}
	}
	return c.each(func(node *Server) bool {
		info, nodes := node.admin.ClusterInfo(ctx), node.admin.ClusterNodes(ctx)
		return says(info, "cluster_state:ok") &&
			says(info, fmt.Sprintf("cluster_slots_ok:%d\r", clusterSlots)) &&
			says(info, fmt.Sprintf("cluster_size:%d\r", clusterMasters)) &&
			strings.Count(nodes.Val(), "slave ") == len(c.Replicas)
	})
}

func (c *Cluster) each(holds func(node *Server) bool) bool {
	return !slices.ContainsFunc(c.all(), func(node *Server) bool { return !holds(node) })
}

// says reports whether an answer contains text.
func says(answer *redis.StringCmd, text string) bool {
	return answer.Err() == nil && strings.Contains(answer.Val(), text)
}

// clusterID returns the id of the node in its cluster, or "" if it does not answer.
func (s *Server) clusterID() string { return s.admin.ClusterMyID(context.Background()).Val() }

func (s *Server) hostPort() (host, port string) {
	host, port, err := net.SplitHostPort(s.Addr)
	if err != nil {
		panic(err)
	}
	return host, port
}

func (c *Cluster) all() []*Server { return slices.Concat(c.Nodes, c.Replicas) }

func (c *Cluster) stop() {
	for _, node := range c.all() {
		node.stop()
	}
}

// Owner returns the node that currently serves key.
func (c *Cluster) Owner(t testing.TB, key string) *Server {
	t.Helper()
	var owner *Server
	Await(t, "a node serves "+key, func() bool {
		for _, node := range c.all() {
			if !node.ended() && node.admin.Exists(context.Background(), key).Err() == nil {
				owner = node
			}
		}
		return owner != nil
	})
	return owner
}

// Client returns a client of the cluster, with the options of Server.Client.
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

package client

import (
	"context"
	"slices"
	"sync"
	"time"
	"weak"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/line"
	"github.com/singlefill/singlefill/internal/wake"
)

// A node is one server of a Client. Only a Cluster has several, each with its own line, so that a dead
// node affects only its own keys.
//
// Each node of a Cluster has a gate and a line, found by MasterForKey with a context that has
// ended. MasterForKey asks the servers if the client does not know them yet; with an ended context
// it cannot. Until the first answer one gate and one line serve all nodes. A node is forgotten
// when the Cluster has changed and the node has not answered for ten minutes. Reads that a replica
// answers count for its master. See TestCluster_FrozenNodeOfTags.
type node struct {
	*server
	limit limit
	user  *line.User // of the line; nil: its Client watches no server
}

// newNode returns a node of the server behind rdb. Clients that watch no server share one, since it has
// nothing that belongs to a Client.
func (c *Client) newNode(rdb redis.UniversalClient, cluster *redis.ClusterClient) *node {
	s := serverOf(rdb, cluster)
	if c.background == nil {
		return s.node
	}
	n := &node{server: s}
	n.user = &line.User{Timeout: c.Timeout, Away: func(o *line.Outage) { c.tell(n, o) }}
	return n
}

// join has the Client of a node watch the server from now on.
func (n *node) join() {
	if n.user != nil {
		n.line.Join(n.user)
	}
}

// nodes are the nodes of a Cluster, by their clients in go-redis.
type nodes struct {
	cluster *redis.ClusterClient // nil: there is only one node
	of      sync.Map             // *redis.Client to *node
}

// ended is a context that has ended: a function called with it asks no server.
var ended = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// nodeOf returns the node of key: its master, even for reads that the client sends to a replica.
// Before the first answer the client may not know the nodes, and would have to ask for them; until
// then c.node is the node of all keys.
func (c *Client) nodeOf(key string) *node {
	if c.nodes.cluster == nil || key == "" || c.node.line.Last().IsZero() {
		return c.node
	}
	master, err := c.nodes.cluster.MasterForKey(ended, key)
	if err != nil {
		return c.node
	}
	if n, ok := c.nodes.of.Load(master); ok {
		return n.(*node)
	}
	c.nodes.forgetIdle()
	n, known := c.nodes.of.LoadOrStore(master, c.newNode(master, c.nodes.cluster))
	if !known {
		n.(*node).join()
	}
	return n.(*node)
}

// idle is how long a node that does not answer is remembered. A forgotten node starts again from
// zero.
const idle = 10 * time.Minute

// forgetIdle is called when the Cluster has changed, so that nodes that have left it are not kept
// for ever. While a node is away its line notices that it has left: see [server.Ping].
func (n *nodes) forgetIdle() {
	n.of.Range(func(master, known any) bool {
		s := known.(*node).server
		if min(time.Since(s.line.Last()), time.Since(s.clock.begun)) > idle && s.line.Away(0) == nil {
			n.of.Delete(master)
		}
		return true
	})
}

// ByNode returns items in groups, one for each node of their keys.
func ByNode[E any](c *Client, items []E, keyOf func(E) string) [][]E {
	if c.nodes.cluster == nil || len(items) == 1 {
		return [][]E{items}
	}
	var groups [][]E
	group := make(map[*node]int)
	for _, item := range items {
		n := c.nodeOf(keyOf(item))
		i, ok := group[n]
		if !ok {
			i = len(groups)
			group[n] = i
			groups = append(groups, nil)
		}
		groups[i] = append(groups[i], item)
	}
	return groups
}

// Batch is how many keys one round trip, and so one timeout, has to carry at most.
const Batch = 256

// InParts returns items in parts, each of which goes in one pipeline: at most [Batch] of them, whose keys are on one
// node.
func InParts[E any](c *Client, items []E, keyOf func(E) string) (parts [][]E) {
	groups := ByNode(c, items, keyOf)
	if n := len(items); 0 < n && n <= Batch { // mostly
		return groups
	}
	for _, group := range groups {
		parts = slices.AppendSeq(parts, slices.Chunk(group, Batch))
	}
	return parts
}

// Carried returns how many of n values one pipeline carries that stores them: at most [Batch], and at most 1 MiB unless
// it is one. More of them may take longer than RedisTimeout. size is of a value, in bytes.
func Carried(n int, size func(i int) int) (some int) {
	for left := 1 << 20; some < min(n, Batch); some++ {
		if left -= size(some); left < 0 && some > 0 {
			break
		}
	}
	return some
}

// Listen listens for wake-ups of key at its node. It returns nil if there is no way to listen.
func (c *Client) Listen(key string, tell func(message string, ok bool)) *wake.Subscription {
	n := c.nodeOf(key)
	switch n.rdb.(type) {
	case *redis.ClusterClient, *redis.Ring: // which of their servers has the key is not known
		return nil
	}
	return n.wakes.Listen(key, tell)
}

// StopListening closes the connections for wake-ups that no waiter needs now.
func (c *Client) StopListening() {
	for n := range c.all {
		n.wakes.CloseIdle()
	}
}

// all yields all nodes.
func (c *Client) all(yield func(n *node) bool) {
	if yield(c.node) {
		c.nodes.of.Range(func(_, n any) bool { return yield(n.(*node)) })
	}
}

// Close leaves all lines. Before, it waits for the commands whose callers have left when their server went away.
func (c *Client) Close() {
	time.Sleep(time.Until(time.Unix(0, c.changes.last.Load()).Add(c.Timeout)))
	for n := range c.all {
		n.wakes.CloseIdle()
		if n.user != nil {
			n.line.Leave(n.user)
		}
	}
}

// Shared returns a value that is equal for all Clients of one user's client. It keeps nothing alive.
func (c *Client) Shared() any { return weak.Make(c.node.server) }

// time asks a node for its time in µs, also without queueing at the gate. 0: it refuses to tell. The script that
// needs the time reports that. It ends before a caller leaves that waits for it, who then knows that it failed.
func (c *Client) time(ctx context.Context, n *node, op, key string) (int64, error) {
	what := Command{Op: op, Key: key, Within: c.least(), Again: Always, Now: true}
	return DoWithin(ctx, c, what, func(ctx context.Context) (int64, error) {
		now, err := n.rdb.Time(ctx).Result()
		if err != nil && !Unreachable(err) {
			return 0, nil
		}
		return now.UnixMicro(), err
	})
}

// look asks a node for its time, or waits for an answer that others have asked for, perhaps with more patience.
func (c *Client) look(ctx context.Context, n *node, what Command) error {
	if err := c.refusal(n); err != nil && what.Spared {
		return err
	}
	g := n.clock.look(func() (int64, error) { return c.time(Detach(ctx), n, what.Op, what.Key) }) // others may join
	bounded, cancel := context.WithTimeout(ctx, what.Within)
	defer cancel()
	if err := c.await(bounded, n, g.over, nil, what.Spared); err != nil {
		return err
	}
	return g.err
}

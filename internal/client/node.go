package client

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// A node is a server as one Client sees it: with its own breaker, so that a dead node affects its own keys only. Only a Cluster has more than one.
type node struct {
	*server
	breaker
	pings pings
}

func newNode(rdb redis.UniversalClient) *node {
	n := &node{server: serverOf(rdb)}
	n.opening.Store(new(make(chan struct{})))
	return n
}

// nodes are those of a Cluster, by the clients that go-redis has for them.
type nodes struct {
	cluster *redis.ClusterClient // nil: there is one node only
	of      sync.Map             // of *redis.Client to *node
	open    atomic.Int64         // breakers
}

// ended is a context that has ended: what is called with it does not ask a server.
var ended = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// nodeOf returns the node that has key: its master, also for reads that the client sends to a replica. Before the first
// answer the client may not know the nodes, and would ask for them; c.node stands for all until then.
func (c *Client) nodeOf(key string) *node {
	if c.nodes.cluster == nil || key == "" || c.node.answered.Load() == 0 {
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
	n, _ := c.nodes.of.LoadOrStore(master, newNode(master))
	return n.(*node)
}

// idle is how long a node is remembered that has not answered anything. What is forgotten begins from nothing.
const idle = 10 * time.Minute

// forgetIdle is called when the Cluster has changed: nodes that have left it are not to stay for ever.
func (n *nodes) forgetIdle() {
	n.of.Range(func(master, known any) bool {
		if s := known.(*node).server; s.silentSince(s.begun) > idle {
			n.of.Delete(master)
		}
		return true
	})
}

// ByNode returns keys in groups, one for each node.
func (c *Client) ByNode(keys []string) [][]string {
	if c.nodes.cluster == nil {
		return [][]string{keys}
	}
	var groups [][]string
	group := make(map[*node]int)
	for _, key := range keys {
		n := c.nodeOf(key)
		i, ok := group[n]
		if !ok {
			i = len(groups)
			group[n] = i
			groups = append(groups, nil)
		}
		groups[i] = append(groups[i], key)
	}
	return groups
}

// pings are shared by the goroutines that ask at the same time. One is sent when the one before is over, so that a server that
// does not answer has one of them at a time.
type pings struct {
	mu   sync.Mutex
	last *ping // that has been sent; protected by mu
	next *ping // that has not, and may still be joined; protected by mu
}

type ping struct {
	over chan struct{} // is closed when it is
	err  error         // set before that
}

// join returns a ping that has not been sent, and the one for whose end it is to wait if the caller has to send it.
func (p *pings) join() (next, before *ping, send bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.next == nil {
		p.next, send = &ping{over: make(chan struct{})}, true
	}
	return p.next, p.last, send
}

func (p *pings) run(next, before *ping, send func() error) {
	if before != nil {
		<-before.over
	}
	p.mu.Lock()
	p.last, p.next = next, nil
	p.mu.Unlock()
	defer close(next.over) // also if a hook of the user's client panics
	next.err = send()
}

// Reachable asks the node of key for an answer now, also while its breaker is open. It returns false only if it has found
// that the node cannot be asked, by a command sent after the call; not if ctx ends first. Callers that ask at the same time
// share a command.
func (c *Client) Reachable(ctx context.Context, key string) bool {
	n := c.nodeOf(key)
	next, before, send := n.pings.join()
	if send {
		c.background(func(<-chan struct{}) { n.pings.run(next, before, func() error { return c.ping(n) }) })
	}
	select {
	case <-next.over:
		return !Unreachable(next.err)
	case <-ctx.Done():
		return true
	}
}

// ping asks a node for an answer. It does not wait in its line, which may be held up by the very silence that it is to
// find out about.
func (c *Client) ping(n *node) error {
	bounded, cancel := context.WithTimeout(context.Background(), c.Timeout)
	ping := call{op: "ping", sent: time.Now()}
	_, err := behind(context.Background(), c, n, ping, bounded, cancel, func(ctx context.Context) (string, error) {
		return n.rdb.Ping(ctx).Result()
	})
	return err
}

package client

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"weak"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/wake"
)

// A node is one server of a Client. Only a Cluster has several, each with its own breaker, so that a dead
// node affects only its own keys.
//
// Each node of a Cluster has a gate and a breaker, found by MasterForKey with a context that has
// ended. MasterForKey asks the servers if the client does not know them yet; with an ended context
// it cannot. Until the first answer one gate and one breaker serve all nodes. A node is forgotten
// when the Cluster has changed and the node has not answered for ten minutes. Reads that a replica
// answers count for its master. See TestCluster_FrozenNode.
type node struct {
	*server
	limit limit
	key   string // one of its keys, or empty if it has all

	client  *Client                // that watches it; nil: it has no background
	watched atomic.Pointer[outage] // the last one

	// In ns since begun:
	doubted   atomic.Int64 // when a ping of doubt was last sent
	overtaken atomic.Int64 // the last answer that came after the sending of a command that failed
}

// newNode returns a node of the server behind rdb. Clients without a background share one, since it has
// nothing that belongs to a Client.
func (c *Client) newNode(rdb redis.UniversalClient, key string) *node {
	s := serverOf(rdb)
	if c.background == nil {
		return s.node
	}
	n := &node{server: s, key: key, client: c}
	n.limit.half = func(since time.Time) { c.doubt(n, since) }
	return n
}

// follow has the Client of a node watch it from now on. It may be silent already.
func (n *node) follow() {
	if n.client == nil {
		return
	}
	n.mu.Lock()
	n.users = append(n.users, weak.Make(n))
	n.mu.Unlock()
	if o := n.outage.Load(); o != nil {
		n.client.watch(n, o, false)
	}
}

// nodes are the nodes of a Cluster, by their clients in go-redis.
type nodes struct {
	cluster *redis.ClusterClient // nil: there is only one node
	of      sync.Map             // *redis.Client to *node
	open    atomic.Int64         // number of open breakers
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
	n, known := c.nodes.of.LoadOrStore(master, c.newNode(master, key))
	if !known {
		n.(*node).follow()
	}
	return n.(*node)
}

// idle is how long a node that does not answer is remembered. A forgotten node starts again from
// zero.
const idle = 10 * time.Minute

// forgetIdle is called when the Cluster has changed, so that nodes that have left it are not kept
// for ever. A node with an open breaker is watched: its probe notices that it has left.
func (n *nodes) forgetIdle() {
	n.of.Range(func(master, known any) bool {
		if s := known.(*node).server; s.silentSince(s.begun) > idle && s.outage.Load() == nil {
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
	c.node.wakes.CloseIdle()
	c.nodes.of.Range(func(_, n any) bool {
		n.(*node).wakes.CloseIdle()
		return true
	})
}

// Shared returns a value that is equal for all Clients of one user's client. It keeps nothing alive.
func (c *Client) Shared() any { return weak.Make(c.node.server) }

// Unanswered reports whether the node of key has not answered a command that was sent after a time.
func (c *Client) Unanswered(key string, after time.Time) bool {
	return c.nodeOf(key).silent(after, c.least())
}

// doubt pings a node that has not answered commands for half of their time. If they are not answered in time
// and the ping is not, the breaker opens, so that a caller waits once, however many caches it asks. The ping
// counts as unanswered after a quarter of the time, until the answer comes. since is when the first of the commands was
// sent. If others were answered after that, it looks again when the last answer may have been the last one, unless
// commands have it look then that were sent later, but before that answer.
func (c *Client) doubt(n *node, since time.Time) {
	if n.using.Load() == 0 || c.away(n) != nil {
		return
	}
	if rest := c.Timeout/2 - n.silentSince(since); rest > c.Timeout/16 {
		latest := n.limit.latest.Load() // nil: only pings were sent
		if latest != nil && (latest.begun.Equal(since) || int64(latest.begun.Sub(n.begun)) > n.answered.Load()) {
			time.AfterFunc(rest, func() { c.doubt(n, since) })
		}
		return
	}
	now, last := time.Since(n.begun), n.doubted.Load()
	asked := last > n.answered.Load() && int64(now)-last < int64(c.Timeout)
	if asked || !n.doubted.CompareAndSwap(last, int64(now)) {
		return
	}
	c.background(func(<-chan struct{}) {
		sent := time.Since(n.begun)
		defer time.AfterFunc(c.Timeout/4, func() { n.noteUnanswered(question{sent, 0}) }).Stop()
		_ = c.ping(context.Background(), n, true)
	})
}

// Reachable asks the node of key for an answer now, even while its breaker is open. It returns false only if the node
// did not answer a command sent after a time: the time of the call, or an earlier time. If ctx ends first, or the
// breaker opens, it returns true. Concurrent callers share a command. A caller that has waited for the command of
// others does not ask while the breaker is open.
func (c *Client) Reachable(ctx context.Context, key string, after time.Time) bool {
	n := c.nodeOf(key)
	err := c.reach(ctx, ctx, n, after, func() error { return c.refusal(n) })
	return ctx.Err() != nil || !Unreachable(err) || errors.Is(err, ErrAway)
}

var errSilent = errors.New("no answer to a ping")

// reach pings a node, unless a ping sent after a time has shown that it does not answer. The callers that have
// waited for a ping to be sent share its outcome. A caller waits for the ping of another until waiting ends, and for its
// own until ctx ends. After the ping of another it sends none if leave returns an error.
func (c *Client) reach(ctx, waiting context.Context, n *node, after time.Time, leave func() error) error {
	if n.silent(after, c.least()) {
		return errSilent
	}
	turn := &flight.Turn[error]{Key: c.Timeout.String()}
	turns := []*flight.Turn[error]{turn}
	n.pings.Arrive(turns)
	defer n.pings.End(turns) // also if a hook of the user's client panics
	waits := !turn.Held()
	if waits {
		if err := n.pings.Await(waiting, turns); err != nil {
			return err
		}
	}
	if turn.Found != nil {
		return *turn.Found
	}
	if n.silent(after, c.least()) { // the ping before, which others may have called after
		return errSilent
	}
	if waits {
		if err := leave(); err != nil {
			return err
		}
	}
	err := c.ping(ctx, n, false)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	turn.Found = &err
	return err
}

// ping asks a node for an answer. It does not queue at the gate, which the silence that it checks
// may have blocked.
func (c *Client) ping(ctx context.Context, n *node, idle bool) error {
	call := call{Command: Command{Op: "ping", Key: n.key}, client: c, node: n, sent: time.Now(), idle: idle}
	bounded, cancel := context.WithTimeout(Detach(ctx), c.Timeout)
	_, err := runAsync(ctx, call, bounded, func(bool) { cancel() }, func(ctx context.Context) (string, error) {
		return n.rdb.Ping(ctx).Result()
	})
	if Unreachable(err) && ctx.Err() == nil && !errors.Is(err, ErrAway) {
		n.noteUnanswered(question{call.sent.Sub(n.begun), c.Timeout})
	}
	return err
}

// time asks a node for its time in µs, also without queueing at the gate. 0: it refuses to tell. The script that
// needs the time reports that. It ends before a caller leaves that waits for it, who then knows that it failed.
func (c *Client) time(ctx context.Context, n *node, what Command) (int64, error) {
	what.Within = c.least()
	return doNow(ctx, c, n, what, func(ctx context.Context) (int64, error) {
		now, err := n.rdb.Time(ctx).Result()
		if err != nil && !Unreachable(err) {
			return 0, nil
		}
		return now.UnixMicro(), err
	})
}

// look asks a node for its time, or waits for an answer that others have asked for, perhaps with more patience.
func (c *Client) look(ctx context.Context, n *node, what Command) error {
	opening := n.opens()
	switch err := c.refusal(n); {
	case err != nil && what.Spared:
		return err
	case err != nil:
		opening = nil
	}
	what.Spared = false // others may join, and wait
	g := n.clock.look(func() (int64, error) { return c.time(Detach(ctx), n, what) })
	bounded, cancel := context.WithTimeout(ctx, what.Within)
	defer cancel()
	for {
		select {
		case <-g.over:
			return g.err
		case <-bounded.Done():
			return bounded.Err()
		case <-opening:
			opening = n.opens()
			if err := c.refusal(n); err != nil {
				return err
			}
		}
	}
}

// DoNow is Do without queueing at the gate, for a rare command on which all callers depend. While
// thousands of commands are queued, it waits for a connection of the pool only.
func DoNow[R any](ctx context.Context, c *Client, op, key string, cmd func(ctx context.Context) (R, error)) (R, error) {
	return doNow(ctx, c, c.nodeOf(key), Command{Op: op, Key: key, Within: c.Timeout}, cmd)
}

func doNow[R any](ctx context.Context, c *Client, n *node, what Command,
	cmd func(ctx context.Context) (R, error)) (R, error) {
	call := call{Command: what, client: c, node: n, sent: time.Now()}
	bounded, cancel := c.bound(ctx, n.limit.next(call.sent, c.Timeout), what.Within)
	return runAsync(ctx, call, bounded, func(bool) { cancel() }, cmd)
}

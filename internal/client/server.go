package client

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"weak"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/line"
	"github.com/singlefill/singlefill/internal/wake"
)

// A server is what all caches and locks of this process that share one client know about the server
// behind it: how many commands can be sent at a time, and whether it answers.
//
// The state of a server is shared through weak pointers. Caches and locks find the gate and the
// line of their client by its address. The registry keeps neither alive. A client that is a
// struct, and no pointer to one, has no address: its caches and locks share nothing. See
// TestBreaker_Shared, TestServer_Shared, TestServer_Forgotten.
type server struct {
	rdb      redis.UniversalClient
	cluster  *redis.ClusterClient // of which it is a node, or nil
	alone    *gate                // of commands that go alone
	together *gate                // of commands that may go with others, if the client is known to have one server
	many     *throttle            // the gate of pipelines of many keys
	line     *line.Line
	wakes    *wake.Listener
	node     *node // of all Clients without a background
	clock    clock
	using    atomic.Int64 // commands that have a connection or wait for one, also if their callers have left
	closed   atomic.Bool  // a ping has found that the user has closed the client
}

// servers are found by the address of the client, which no other client can have while the server
// refers to it. The map keeps neither clients nor unused servers alive.
var servers = struct {
	mu sync.Mutex
	of map[clientAddr]weak.Pointer[server] // protected by mu
}{of: make(map[clientAddr]weak.Pointer[server])}

type clientAddr struct {
	kind reflect.Type
	addr uintptr
}

// serverOf returns the server behind rdb, which may be a node of a Cluster. A client that is not a pointer gets a new
// server for each user, since equal clients cannot be recognized.
func serverOf(rdb redis.UniversalClient, cluster *redis.ClusterClient) *server {
	v := reflect.ValueOf(rdb)
	if v.Kind() != reflect.Pointer {
		return newServer(rdb, cluster)
	}
	servers.mu.Lock()
	defer servers.mu.Unlock()
	at := clientAddr{v.Type(), v.Pointer()}
	if known := servers.of[at].Value(); known != nil {
		return known
	}
	s := newServer(rdb, cluster)
	servers.of[at] = weak.Make(s)
	runtime.AddCleanup(s, forget, at)
	return s
}

func newServer(rdb redis.UniversalClient, cluster *redis.ClusterClient) *server {
	all := connections(rdb)
	few := max(1, all/4)
	s := &server{rdb: rdb, cluster: cluster, clock: clock{begun: time.Now()}}
	s.line = line.New(s)
	s.alone, s.many = &gate{size: uint64(all), line: s.line}, newThrottle(few, s.line)
	s.together = s.alone
	if _, ok := rdb.(*redis.Client); ok {
		// Commands go together only if they certainly go to one server: a server that does not answer
		// would hold up the commands for others. A few connections that carry many commands each cost
		// less than many that carry few.
		s.alone.size = uint64(max(1, all-2*few))
		s.together = &gate{size: uint64(few), most: firstTogether, line: s.line}
	}
	s.wakes = wake.New(rdb)
	s.node = &node{server: s}
	return s
}

func forget(at clientAddr) {
	servers.mu.Lock()
	defer servers.mu.Unlock()
	if servers.of[at].Value() == nil { // and not a server created since
		delete(servers.of, at)
	}
}

// pipelined is how many commands are admitted to a client that pipelines them. More than one or two
// batches gain nothing, and with very many the last ones would run out of time before they are
// sent.
const pipelined = 1000

// connections returns how many commands the client can send at a time: one per connection of its
// pool. For an unknown client it is the default of go-redis.
func connections(rdb redis.UniversalClient) int {
	switch rdb := rdb.(type) {
	case *redis.Client:
		return atMost(rdb.Options().PoolSize, rdb.Options().MaxActiveConns)
	case *redis.ClusterClient:
		return atMost(rdb.Options().PoolSize, rdb.Options().MaxActiveConns)
	case *redis.Ring:
		return atMost(rdb.Options().PoolSize, rdb.Options().MaxActiveConns)
	case *redis.AutoPipeliner:
		return pipelined
	}
	return atMost(0, 0)
}

func atMost(size, active int) int {
	if size <= 0 {
		size = 10 * runtime.GOMAXPROCS(0)
	}
	if active > 0 {
		size = min(size, active)
	}
	return size
}

// Ping asks the server for an answer, for its [line.Line]. It does not queue at the gate, which the silence may have
// blocked. A node of a Cluster that has started again says CLUSTERDOWN for a while, but not to a PING: it is asked for
// a key. A node that has lost the key serves others.
//
// After a black hole all connections are dead. Each ping would take one of them, and then each caller one more. So
// while the server is away, each connection that lies idle is tried by the way, through a clone of the client: a
// connection over which no answer comes leaves the pool when the time is over, whatever the user's options. A
// connection outside of the pool would tell less: whether callers get an answer depends on the pool. See
// TestPing_DeadConnections, TestPool_InUse.
func (s *server) Ping(ctx context.Context, key string, away bool) error {
	if s.cluster != nil {
		if master, err := s.cluster.MasterForKey(ended, key); err == nil && redis.UniversalClient(master) != s.rdb {
			return nil
		}
	}
	if one, ok := s.rdb.(*redis.Client); ok && away {
		end, _ := ctx.Deadline()
		one = one.WithTimeout(max(time.Until(end), time.Millisecond))
		idle := one.PoolStats()
		for range idle.IdleConns {
			go one.Ping(ctx)
		}
		if pipelines := idle.PipelineStats; pipelines != nil { // which have connections of their own
			for range pipelines.IdleConns {
				go one.Pipelined(ctx, func(p redis.Pipeliner) error { return p.Ping(ctx).Err() })
			}
		}
	}
	var err error
	if s.cluster != nil {
		err = s.rdb.PTTL(ctx, key).Err()
	} else {
		err = s.rdb.Ping(ctx).Err()
	}
	switch {
	case errors.Is(err, redis.ErrClosed):
		s.closed.Store(true)
		return fmt.Errorf("%w: %w", line.ErrGone, err)
	case Unreachable(err) && !(s.cluster != nil && Redirected(err)):
		return err
	}
	return nil
}

// Explain says of a command that had no answer how long it has waited, lest its error be taken for the end of its
// caller's context. If other commands of the program use most connections of the pool, it says that.
func (s *server) Explain(err error, within time.Duration) error {
	if !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, redis.ErrPoolTimeout) {
		return err
	}
	if err == context.DeadlineExceeded {
		err = fmt.Errorf("no answer within %v: %w", within, err)
	}
	size, pool := connections(s.rdb), s.rdb.PoolStats()
	if pool == nil { // of a double
		return err
	}
	busy := int(pool.TotalConns) - int(pool.IdleConns)
	others := busy + int(pool.PendingRequests) - int(s.using.Load())
	if busy < size || 2*others <= size {
		return err
	}
	return fmt.Errorf("no connection of the pool was free, since other commands of this program use %d of %d: %w", min(others, size), size, err)
}

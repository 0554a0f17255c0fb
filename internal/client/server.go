package client

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"weak"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/flight"
	"github.com/singlefill/singlefill/internal/wake"
)

// A server is what all caches and locks of this process that share one client know about the server
// behind it: how many commands can be sent at a time, and when it last answered.
//
// The state of a server is shared through weak pointers. Caches and locks find the gate and the
// breaker of their client by its address. The registry keeps neither alive. A client that is a
// struct, and no pointer to one, has no address: its caches and locks share nothing. See
// TestBreaker_Shared, TestServer_Shared, TestServer_Forgotten.
type server struct {
	rdb      redis.UniversalClient
	alone    *gate     // of commands that go alone
	together *gate     // of commands that may go with others, if the client is known to have one server
	many     *throttle // the gate of pipelines of many keys
	wakes    *wake.Listener
	node     *node // of all Clients without a background
	breaker
	pings *flight.Reads[error, *flight.Turn[error]] // by the time that each may take

	using    atomic.Int64 // commands that have a connection or wait for one, also if their callers have left
	clock    clock
	begun    time.Time
	answered atomic.Int64 // time of the last answer, in ns since begun
	moved    atomic.Int64 // when the last command that had passed a gate was answered

	unanswered atomic.Pointer[question] // the last one, or nil

	mu       sync.Mutex
	failures int                  // in a row, of commands sent after the last answer; protected by mu
	since    time.Duration        // when the earliest of them was sent, since begun; protected by mu
	users    []weak.Pointer[node] // of Clients that watch it; protected by mu
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

// serverOf returns the server behind rdb. A client that is not a pointer gets a new server for each
// user, since equal clients cannot be recognized.
func serverOf(rdb redis.UniversalClient) *server {
	v := reflect.ValueOf(rdb)
	if v.Kind() != reflect.Pointer {
		return newServer(rdb)
	}
	servers.mu.Lock()
	defer servers.mu.Unlock()
	at := clientAddr{v.Type(), v.Pointer()}
	if known := servers.of[at].Value(); known != nil {
		return known
	}
	s := newServer(rdb)
	servers.of[at] = weak.Make(s)
	runtime.AddCleanup(s, forget, at)
	return s
}

func newServer(rdb redis.UniversalClient) *server {
	all := connections(rdb)
	now := time.Now()
	few := max(1, all/4)
	s := &server{rdb: rdb, begun: now, clock: clock{begun: now}, alone: &gate{size: uint64(all)}, many: newThrottle(few)}
	s.together = s.alone
	if _, ok := rdb.(*redis.Client); ok {
		// Commands go together only if they certainly go to one server: a server that does not answer
		// would hold up the commands for others. A few connections that carry many commands each cost
		// less than many that carry few.
		s.alone.size = uint64(max(1, all-2*few))
		s.together = &gate{size: uint64(few), most: firstTogether}
	}
	s.wakes, s.pings = wake.New(rdb), flight.NewReads[error, *flight.Turn[error]]()
	s.node = &node{server: s}
	s.opening.Store(new(make(chan struct{})))
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

// explain says of a command that had no answer how long it has waited, lest its error be taken for the end of its
// caller's context. If other commands of the program use most connections of the pool, it says that.
func (s *server) explain(err error, within time.Duration) error {
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

// noteFailure counts a command that was not answered. A command sent before the last answer does
// not count: commands fail in volleys, and the server may have started to answer in between. It
// returns the number of failures in a row, and when the earliest of them was sent.
func (s *server) noteFailure(sent time.Time) (failures int, since time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	answered := time.Duration(s.answered.Load())
	at := sent.Sub(s.begun)
	if at < answered {
		return 0, 0
	}
	if s.failures == 0 || s.since < answered {
		s.failures, s.since = 0, at
	}
	s.failures, s.since = s.failures+1, min(s.since, at)
	return s.failures, s.since
}

// noteAnswer notes that the server has answered at a time since begun.
func (s *server) noteAnswer(at time.Duration) {
	s.answered.Store(int64(at))
	if o := s.outage.Load(); o != nil {
		s.close(o)
	}
}

// watchers returns the nodes of the Clients that watch the server.
func (s *server) watchers() (nodes []*node) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.users = slices.DeleteFunc(s.users, func(u weak.Pointer[node]) bool {
		n := u.Value()
		if n != nil {
			nodes = append(nodes, n)
		}
		return n == nil
	})
	return nodes
}

// A question is a ping that was not answered.
type question struct {
	sent   time.Duration // since server.begun
	waited time.Duration // for an answer; 0: it may still come
}

func (s *server) noteUnanswered(q question) {
	for last := s.unanswered.Load(); last == nil || last.sent <= q.sent; last = s.unanswered.Load() {
		if s.unanswered.CompareAndSwap(last, &q) {
			return
		}
	}
}

// mute reports whether the last ping is unanswered, and so is everything since.
func (s *server) mute() bool {
	q := s.unanswered.Load()
	return q != nil && int64(q.sent) > s.answered.Load()
}

// silent reports whether a ping sent after a time has been unanswered for d, and everything else, too.
func (s *server) silent(after time.Time, d time.Duration) bool {
	q := s.unanswered.Load()
	return q != nil && q.sent > after.Sub(s.begun) && q.waited >= d && s.mute() && time.Since(s.begun)-q.sent >= d
}

// silentSince returns how long no answer has come, seen by a command that waits since then.
func (s *server) silentSince(then time.Time) time.Duration {
	return min(time.Since(then), time.Since(s.begun)-time.Duration(s.answered.Load()))
}

// stuckSince returns how long no command that had passed a gate has been answered, for a command that waits since
// then. A ping passes none: its answer, on a connection that works, would keep those that wait behind others that do
// not.
func (s *server) stuckSince(then time.Time) time.Duration {
	return min(time.Since(then), time.Since(s.begun)-time.Duration(s.moved.Load()))
}

// quiet reports whether other commands are on their way, and none has been answered since a time, so that a
// command that is sent now may have to be given up when the breaker opens.
func (s *server) quiet(since time.Time) bool {
	return s.using.Load() > 0 && s.answered.Load() < int64(since.Sub(s.begun))
}

package client

import (
	"reflect"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"weak"

	"github.com/redis/go-redis/v9"
)

// A server is what all caches and locks of this process that use one client of the user's know together of what is
// behind it: how much it can be sent at a time, and when it last answered.
type server struct {
	rdb  redis.UniversalClient
	gate gate

	begun    time.Time
	answered atomic.Int64 // when the last answer came, in ns since begun

	mu       sync.Mutex
	failures int           // in a row, of commands sent after that; protected by mu
	since    time.Duration // when the first of them was sent, since begun; protected by mu
}

// servers are found by the address of the client, which cannot be another's as long as the server holds it. They keep
// no client alive, nor a server that is not used any more.
var servers = struct {
	mu sync.Mutex
	of map[clientAddr]weak.Pointer[server] // protected by mu
}{of: make(map[clientAddr]weak.Pointer[server])}

type clientAddr struct {
	kind reflect.Type
	addr uintptr
}

// serverOf returns the server behind rdb. A client that is not a pointer has one for each of its users, since nothing
// tells whether two of them are the same.
func serverOf(rdb redis.UniversalClient) *server {
	s := &server{rdb: rdb, begun: time.Now()}
	s.gate.size = uint64(max(1, connections(rdb)))
	v := reflect.ValueOf(rdb)
	if v.Kind() != reflect.Pointer {
		return s
	}
	servers.mu.Lock()
	defer servers.mu.Unlock()
	at := clientAddr{v.Type(), v.Pointer()}
	if known := servers.of[at].Value(); known != nil {
		return known
	}
	servers.of[at] = weak.Make(s)
	runtime.AddCleanup(s, forget, at)
	return s
}

func forget(at clientAddr) {
	servers.mu.Lock()
	defer servers.mu.Unlock()
	if servers.of[at].Value() == nil { // and not another one that has been made since
		delete(servers.of, at)
	}
}

// pipelined is how many commands a client may have at a time that sends them together: more than a batch or two bring
// nothing, and with very many the last of them would run out of time before it is sent.
const pipelined = 1000

// connections returns how many commands the client can send at a time: one for each connection of its pool. Of a client
// that does not tell, it is go-redis' default.
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

func (s *server) noteAnswer() { s.answered.Store(int64(time.Since(s.begun))) }

// noteFailure counts a command that was not answered. What was sent before the last answer proves nothing: commands
// fail in volleys, and the server may have begun to answer in the meantime. It returns how many there are in a row,
// and for how long there has been no answer since the first of them was sent.
func (s *server) noteFailure(sent time.Time) (failures int, silent time.Duration) {
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
	s.failures++
	return s.failures, time.Since(s.begun) - s.since
}

// silentSince returns for how long there has been no answer, as far as a command can tell that waits since then.
func (s *server) silentSince(then time.Time) time.Duration {
	return min(time.Since(then), time.Since(s.begun)-time.Duration(s.answered.Load()))
}

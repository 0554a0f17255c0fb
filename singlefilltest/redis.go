package singlefilltest

import (
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/mini"
)

// Redis returns a client of an empty Redis that belongs to this test: a miniredis in this process.
// Both are closed when the test ends; close caches before, with t.Cleanup or defer. Two caches on
// the client, of one namespace, act as two processes.
//
// Nothing listens: client and server communicate through memory, and keys expire by the clock of the
// test. So both work in a bubble of [testing/synctest], where Redis must be called, and time.Sleep
// ages values there at no cost. The client has the defaults of go-redis, except that it observes the
// deadline of a command (ContextTimeoutEnabled) and never waits for a free connection.
//
// A miniredis shows what a program does. It does not show what a server refuses: it has no ACL, no
// limit of memory, no Cluster and no Sentinel.
func Redis(t testing.TB) *redis.Client {
	t.Helper()
	m, err := mini.Start()
	if err != nil {
		t.Fatalf("singlefilltest: Redis: %v", err)
	}
	s := &fakeServer{t: t, bubble: bubble(), mini: m, conns: make(map[*fakeConn]struct{})}
	// A script calls the hook with the mutex of miniredis locked, so the hook must not wait for anything.
	m.Server().SetPreHook(func(*server.Peer, string, ...string) bool { return s.silences.Load() > 0 })
	options := mini.Options(s.dial)
	options.ContextTimeoutEnabled = true
	rdb := redis.NewClient(options)
	servers.Store(rdb, s)
	t.Cleanup(func() {
		servers.Delete(rdb)
		_ = rdb.Close() // a test may have closed it
		if s.bubble != "" && !anotherIn(s.bubble) {
			settle()
		}
		s.dialling.Lock()
		fault(&s.outages) // a dial would start the miniredis again
		s.dialling.Unlock()
		mini.Close(m)
	})
	return rdb
}

// Silence makes the Redis of rdb hang: it accepts commands and neither executes nor answers them,
// until resume is called. rdb must come from [Redis]; Silence ends the test by t.Fatalf otherwise.
// A second call of resume does nothing. After two faults Redis answers when both are over.
//
// A cache waits for [singlefill.Options.RedisTimeout], 500 ms by default, and then asks the source.
// After a command without an answer it sends no more of them, and resume does not change that at
// once: it asks Redis again after two RedisTimeouts at most. Wait until BreakerOpen of its Stats is
// false, or in a bubble sleep for a second.
func Silence(t testing.TB, rdb *redis.Client) (resume func()) {
	t.Helper()
	s := serverOf(t, "Silence", rdb)
	return fault(&s.silences)
}

// Disconnect makes the Redis of rdb unreachable, as if its process had ended: its connections are
// broken, and new ones are refused, until reconnect is called. The values are still there then.
// Everything else is as for [Silence].
func Disconnect(t testing.TB, rdb *redis.Client) (reconnect func()) {
	t.Helper()
	s := serverOf(t, "Disconnect", rdb)
	reconnect = fault(&s.outages)
	s.disconnect()
	return reconnect
}

// servers has the server of each *redis.Client that Redis has returned to a running test.
var servers sync.Map

// anotherIn reports whether the bubble has a Redis whose test has not ended: caches of it may be used until then.
func anotherIn(bubble string) bool {
	for _, s := range servers.Range {
		if s.(*fakeServer).bubble == bubble {
			return true
		}
	}
	return false
}

func serverOf(t testing.TB, caller string, rdb *redis.Client) *fakeServer {
	t.Helper()
	s, ok := servers.Load(rdb)
	if !ok {
		t.Fatalf("singlefilltest: %s: rdb is %v: only a client that singlefilltest.Redis returned to a running test is allowed", caller, rdb)
	}
	return s.(*fakeServer)
}

// A fakeServer is a miniredis with faults. Each fault that is in force counts.
type fakeServer struct {
	t                 testing.TB
	bubble            string // in which Redis was called
	report            sync.Once
	mini              *miniredis.Miniredis
	silences, outages atomic.Int32

	dialling sync.RWMutex // locked to refuse all later dials

	mu    sync.Mutex             // not locked while miniredis is called
	conns map[*fakeConn]struct{} // protected by mu
}

// fault counts a fault until end is called.
func fault(count *atomic.Int32) (end func()) {
	count.Add(1)
	return sync.OnceFunc(func() { count.Add(-1) })
}

func (s *fakeServer) dial() (net.Conn, error) {
	s.dialling.RLock()
	defer s.dialling.RUnlock()
	switch used := bubble(); {
	case s.outages.Load() > 0:
		return refusedConn{}, nil
	case used != s.bubble:
		// Otherwise the bubble would never come to rest.
		err := fmt.Errorf("singlefilltest: Redis was called in the bubble %q of testing/synctest, and is used in %q: "+
			"call it in the bubble in which the test uses it", s.bubble, used)
		s.report.Do(func() { s.t.Errorf("%v", err) })
		return nil, err
	}
	conn, err := mini.Dial(s.mini)
	if err != nil {
		return nil, err
	}
	c := &fakeConn{conn, s}
	s.mu.Lock()
	s.conns[c] = struct{}{}
	s.mu.Unlock()
	if s.outages.Load() > 0 { // Disconnect may have come too early for this connection
		_ = c.Close()
	}
	return c, nil
}

// A refusedConn fails at its first use. A dial that fails would be logged by go-redis, once for each
// command of a test.
type refusedConn struct{ net.Conn }

var errRefused = &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}

func (refusedConn) Read([]byte) (int, error)         { return 0, errRefused }
func (refusedConn) Write([]byte) (int, error)        { return 0, errRefused }
func (refusedConn) SetReadDeadline(time.Time) error  { return nil }
func (refusedConn) SetWriteDeadline(time.Time) error { return nil }
func (refusedConn) SetDeadline(time.Time) error      { return nil }
func (refusedConn) RemoteAddr() net.Addr             { return nil }
func (refusedConn) Close() error                     { return nil }

// disconnect closes all connections.
func (s *fakeServer) disconnect() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.conns {
		_ = c.Conn.Close() // fails if it is closed already
	}
	clear(s.conns)
}

// A fakeConn is a connection that disconnect can break. It then fails as if its server had gone:
// go-redis sends the command again on another connection.
type fakeConn struct {
	net.Conn
	server *fakeServer
}

func (c *fakeConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	return n, orEOF(err)
}

func (c *fakeConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	return n, orEOF(err)
}

func orEOF(err error) error {
	if errors.Is(err, io.ErrClosedPipe) || errors.Is(err, net.ErrClosed) {
		return io.EOF
	}
	return err
}

// A net.Pipe refuses a deadline after its end; a TCP connection does not.

func (c *fakeConn) SetDeadline(at time.Time) error      { _ = c.Conn.SetDeadline(at); return nil }
func (c *fakeConn) SetReadDeadline(at time.Time) error  { _ = c.Conn.SetReadDeadline(at); return nil }
func (c *fakeConn) SetWriteDeadline(at time.Time) error { _ = c.Conn.SetWriteDeadline(at); return nil }

func (c *fakeConn) Close() error {
	c.server.mu.Lock()
	delete(c.server.conns, c)
	c.server.mu.Unlock()
	return c.Conn.Close()
}

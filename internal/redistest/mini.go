package redistest

import (
	"bytes"
	"context"
	"net"
	"slices"
	"sync"
	"testing"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"
)

// StartMini returns a miniredis whose TTLs follow the clock, and a client of it. Nothing listens:
// client and server communicate through net.Pipe, so that both work inside a synctest bubble, with
// its clock.
func StartMini(t testing.TB) (*miniredis.Miniredis, *redis.Client) {
	m := miniredis.NewMiniRedis()
	m.ClockTTL(true)
	t.Cleanup(func() {
		checkMini(t, m)
		closing.Lock()
		defer closing.Unlock()
		m.Close()
	})
	conn, err := m.Dial() // the first connection makes m.Server() usable
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.Close()
	return m, NewMiniClient(t, m)
}

// NewMiniClient returns another client of m, as a second process would have.
//
// Two settings keep the client inside its synctest bubble. Its address is an IP address, because
// for a name go-redis asks the resolver, whose state all bubbles share. Its pool never makes a
// caller wait, because go-redis waits with timers from a sync.Pool that all bubbles share.
func NewMiniClient(t testing.TB, m *miniredis.Miniredis) *redis.Client {
	opt := quiet("127.0.0.1:6379")
	opt.PoolSize = 1000
	opt.Dialer = func(context.Context, string, string) (net.Conn, error) { return dialMini(m) }
	c := redis.NewClient(opt)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// Mute makes the miniredis refuse everybody who wants to listen, so that waiters only poll.
func Mute(m *miniredis.Miniredis) { m.Server().SetPreHook(Muted) }

// Muted is the hook that Mute sets, for tests with a hook of their own.
func Muted(c *server.Peer, cmd string, _ ...string) bool {
	if cmd != "SSUBSCRIBE" {
		return false
	}
	c.WriteError("NOPERM this user has no permissions to access one of the channels used as arguments")
	return true
}

// closing is locked while a miniredis is closed. A connection for wake-ups may be dialled after the
// end of a test, and a miniredis does not expect both at once.
var closing sync.RWMutex

// dialMini connects to m.
func dialMini(m *miniredis.Miniredis) (net.Conn, error) {
	closing.RLock()
	defer closing.RUnlock()
	conn, err := m.Dial()
	if err != nil {
		return nil, err
	}
	return Buffered(conn), nil
}

// Buffered returns a client's end of a net.Pipe, which has no buffer: a client and a server that
// write at the same time would wait for each other. So from the first command on that makes the
// server write before it has read everything, a subscription or a long pipeline, commands wait in a
// buffer.
func Buffered(conn net.Conn) net.Conn {
	c := &bufferedConn{Conn: conn, out: make(chan []byte, 1000), closed: make(chan struct{})}
	go c.pump()
	return c
}

type bufferedConn struct {
	net.Conn
	buffers bool
	out     chan []byte
	once    sync.Once
	closed  chan struct{}
}

func (c *bufferedConn) Write(b []byte) (int, error) {
	pipeline := len(b) > 4<<10 && bytes.Contains(b, []byte("\r\n*"))
	if c.buffers = c.buffers || pipeline || bytes.Contains(b, []byte("subscribe\r\n")); !c.buffers {
		return c.Conn.Write(b)
	}
	select {
	case c.out <- slices.Clone(b):
		return len(b), nil
	case <-c.closed:
		return 0, net.ErrClosed
	}
}

func (c *bufferedConn) pump() {
	for {
		select {
		case b := <-c.out:
			_, _ = c.Conn.Write(b) // after Close it fails, and so does the client's next read
		case <-c.closed:
			return
		}
	}
}

func (c *bufferedConn) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

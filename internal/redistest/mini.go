package redistest

import (
	"context"
	"net"
	"testing"

	"github.com/alicebob/miniredis/v2"
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
	opt.Dialer = func(context.Context, string, string) (net.Conn, error) { return m.Dial() }
	c := redis.NewClient(opt)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

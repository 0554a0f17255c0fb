package redistest

import (
	"net"
	"testing"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/mini"
)

// StartMini returns a miniredis whose TTLs follow the clock, and a client of it. Nothing listens:
// client and server communicate through net.Pipe, so that both work inside a synctest bubble, with
// its clock.
func StartMini(t testing.TB) (*miniredis.Miniredis, *redis.Client) {
	m, err := mini.Start()
	Must(t, err)
	t.Cleanup(func() {
		checkMini(t, m)
		mini.Close(m)
	})
	return m, NewMiniClient(t, m)
}

// NewMiniClient returns another client of m, as a second process would have.
func NewMiniClient(t testing.TB, m *miniredis.Miniredis, mutate ...func(*redis.Options)) *redis.Client {
	opt := mini.Options(func() (net.Conn, error) { return mini.Dial(m) })
	for _, change := range mutate {
		change(opt)
	}
	c := redis.NewClient(opt)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// Mute makes the miniredis refuse everybody who wants to listen, so that waiters only poll.
func Mute(m *miniredis.Miniredis) { m.Server().SetPreHook(Muted) }

// Muted is the hook that Mute sets, for tests that have another hook.
func Muted(c *server.Peer, cmd string, _ ...string) bool {
	if cmd != "SSUBSCRIBE" {
		return false
	}
	c.WriteError("NOPERM this user has no permissions to access one of the channels used as arguments")
	return true
}

// Package mini embeds a Redis in a test. Client and server communicate through net.Pipe, so that
// both work inside a bubble of testing/synctest, with its clock.
package mini

import (
	"context"
	"net"
	"sync"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// Start returns a miniredis whose TTLs follow the clock.
func Start() (*miniredis.Miniredis, error) {
	m := miniredis.NewMiniRedis()
	m.ClockTTL(true)
	conn, err := m.Dial() // the first connection makes m.Server() usable
	if err != nil {
		return nil, err
	}
	return m, conn.Close()
}

// closing is locked while a miniredis is closed. A connection for wake-ups may be dialled after the
// end of a test, and a miniredis does not expect both at once.
var closing sync.RWMutex

// Dial connects to m.
func Dial(m *miniredis.Miniredis) (net.Conn, error) {
	closing.RLock()
	defer closing.RUnlock()
	conn, err := m.Dial()
	if err != nil {
		return nil, err
	}
	return buffered(conn), nil
}

// Close stops m and closes its connections.
func Close(m *miniredis.Miniredis) {
	closing.Lock()
	defer closing.Unlock()
	m.Close()
}

// Options returns the options of a client that dials by dial.
//
// Two settings keep the client inside its synctest bubble. Its address is an IP address, because
// for a name go-redis asks the resolver, whose state all bubbles share. Its pool never makes a
// caller wait, because go-redis waits with timers from a sync.Pool that all bubbles share.
func Options(dial func() (net.Conn, error)) *redis.Options {
	return &redis.Options{
		Addr:                     "127.0.0.1:6379",
		Dialer:                   func(context.Context, string, string) (net.Conn, error) { return dial() },
		PoolSize:                 1000,
		DisableIdentity:          true,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	}
}

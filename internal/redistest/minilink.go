package redistest

import (
	"context"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/mini"
)

// MiniLink is the network between one client and a miniredis. It counts what the client sends, and
// can lose it. Like the miniredis it works inside a synctest bubble, where a Proxy does not.
type MiniLink struct {
	Mini *miniredis.Miniredis

	mu     sync.Mutex
	hole   bool           // protected by mu
	holeAt string         // protected by mu: the command that opens the hole, in lower case
	sent   map[string]int // protected by mu: by command, in lower case
}

// StartMiniLink returns a miniredis as StartMini does, and a client that reaches it over the link.
func StartMiniLink(t testing.TB) (*MiniLink, *redis.Client) {
	m, _ := StartMini(t)
	l := &MiniLink{Mini: m, sent: make(map[string]int)}
	return l, NewMiniClient(t, m, func(o *redis.Options) {
		o.Dialer = func(context.Context, string, string) (net.Conn, error) {
			conn, err := mini.Dial(m)
			return &miniConn{conn, l}, err
		}
	})
}

// BlackHole makes the link swallow everything that the client sends. Connections stay open, and
// deliver again when the hole is closed.
func (l *MiniLink) BlackHole(on bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.hole, l.holeAt = on, ""
}

// BlackHoleAt opens the black hole when the client sends the next command of that name, which is
// the first to be lost.
func (l *MiniLink) BlackHoleAt(command string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.holeAt = strings.ToLower(command)
}

// Swallows reports whether the black hole is open.
func (l *MiniLink) Swallows() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.hole
}

// Sent returns how many commands the client has sent. Probes are those by which a client sees
// whether its server answers: PING, and HELLO on a new connection.
func (l *MiniLink) Sent() (commands, probes int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for name, n := range l.sent {
		switch name {
		case "ping", "hello":
			probes += n
		default:
			commands += n
		}
	}
	return commands, probes
}

// take counts the commands in b, and reports whether they are to be delivered.
func (l *MiniLink) take(b []byte) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	lines := strings.Split(string(b), "\r\n")
	for i, line := range lines {
		if strings.HasPrefix(line, "*") && i+2 < len(lines) {
			name := strings.ToLower(lines[i+2])
			l.sent[name]++
			l.hole = l.hole || name == l.holeAt
		}
	}
	return !l.hole
}

type miniConn struct {
	net.Conn
	link *MiniLink
}

func (c *miniConn) Write(b []byte) (int, error) {
	if !c.link.take(b) {
		return len(b), nil
	}
	return c.Conn.Write(b)
}

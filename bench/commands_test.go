package bench

import (
	"bytes"
	"context"
	"net"
	"sync/atomic"

	"github.com/redis/go-redis/v9"
)

// commands counts the commands that clients of any library send: it counts the beginnings of
// requests, each of which starts with the number of its strings.
type commands struct{ n atomic.Int64 }

// count makes a go-redis client count its commands, including the commands of its subscriptions.
func (c *commands) count(o *redis.Options) {
	o.Dialer = c.dial
}

func (c *commands) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	return &countedConn{conn, c}, nil
}

type countedConn struct {
	net.Conn
	commands *commands
}

// Write counts lines of the form *<number>. The values of the benchmarks contain none.
func (c *countedConn) Write(b []byte) (int, error) {
	lines := bytes.Count(b, []byte("\r\n*"))
	if len(b) > 0 && b[0] == '*' {
		lines++
	}
	c.commands.n.Add(int64(lines))
	return c.Conn.Write(b)
}

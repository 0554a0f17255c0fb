package bench

import (
	"bytes"
	"context"
	"net"
	"sync/atomic"

	"github.com/redis/go-redis/v9"
)

// commands counts what clients send, whatever library they are of: it looks for the beginnings of requests in what
// is written to their connections, which begins with the number of their strings.
type commands struct{ n atomic.Int64 }

// count makes a client of go-redis count.
func (c *commands) count(o *redis.Options) {
	o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
		return c.dial(ctx, network, addr)
	}
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

// Write counts the lines *<number>. The values of the benchmarks have none.
func (c *countedConn) Write(b []byte) (int, error) {
	lines := bytes.Count(b, []byte("\r\n*"))
	if len(b) > 0 && b[0] == '*' {
		lines++
	}
	c.commands.n.Add(int64(lines))
	return c.Conn.Write(b)
}

package redistest

import (
	"context"
	"net"
	"time"

	"github.com/redis/go-redis/v9"
)

// Distant configures a client each of whose writes takes d, as those to a server at some distance
// do. The client needs a Dialer, or an address.
func Distant(d time.Duration) func(o *redis.Options) {
	return func(o *redis.Options) {
		dial := o.Dialer
		if dial == nil {
			dial = new(net.Dialer).DialContext
		}
		o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
			conn, err := dial(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			return distantConn{conn, d}, nil
		}
	}
}

type distantConn struct {
	net.Conn
	takes time.Duration
}

func (c distantConn) Write(b []byte) (int, error) {
	time.Sleep(c.takes)
	return c.Conn.Write(b)
}

package mini

import (
	"bytes"
	"net"
	"slices"
	"sync"
)

// buffered returns a client's end of a net.Pipe, which has no buffer: a client and a server that
// write at the same time would wait for each other. So from the first command on that makes the
// server write before it has read everything, a subscription or a long pipeline, commands wait in a
// buffer.
func buffered(conn net.Conn) net.Conn {
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
			_, _ = c.Conn.Write(b) // after Close it fails, as the client's next read does
		case <-c.closed:
			return
		}
	}
}

func (c *bufferedConn) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

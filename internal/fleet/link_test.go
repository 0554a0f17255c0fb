package fleet

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/alicebob/miniredis/v2/proto"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// A link is one process' way to the server: everything that its client does. The commands of a dead
// process are lost.
type link struct {
	*server
	dead atomic.Bool
}

func (l *link) client() *redis.Client {
	c := redis.NewClient(&redis.Options{
		Addr: "127.0.0.1:6379", PoolSize: 10, ContextTimeoutEnabled: true, MaxRetries: -1, DisableIdentity: true,
		Dialer: l.dial, ReadBufferSize: 512, WriteBufferSize: 512,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
	c.AddHook(l)
	return c
}

func (l *link) ProcessHook(redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error { return l.process(ctx, cmd) }
}

func (l *link) ProcessPipelineHook(redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error { return l.process(ctx, cmds...) }
}

func (l *link) DialHook(next redis.DialHook) redis.DialHook { return next }

func (l *link) process(ctx context.Context, cmds ...redis.Cmder) (err error) {
	if l.dead.Load() {
		<-ctx.Done()
		err = ctx.Err()
	} else {
		err = l.execute(ctx, cmds...)
	}
	for _, cmd := range cmds {
		if err != nil {
			cmd.SetErr(err)
		}
	}
	return cmds[0].Err()
}

// dial opens a connection to listen. All other commands need none.
func (l *link) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	if l.refuse {
		return nil, errors.New("there are no wake-ups")
	}
	if l.dead.Load() {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	accepted := make(chan struct{})
	l.send(l.connection, func() { close(accepted) })
	select {
	case <-accepted:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if !sleep(ctx, l.trip/2) {
		return nil, ctx.Err()
	}
	return &conn{link: l, pushes: make(chan push, 100), closed: make(chan struct{})}, nil
}

// A conn is a connection on which a process listens. The server writes only pushes to it: answers to
// its subscriptions, and messages.
type conn struct {
	*link
	pushes chan push
	unread []byte
	once   sync.Once
	closed chan struct{}
}

type push struct {
	data    string
	arrival time.Time
}

// Write sends a command to subscribe or unsubscribe.
func (c *conn) Write(b []byte) (int, error) {
	if c.dead.Load() {
		return len(b), nil
	}
	text, err := proto.Read(bufio.NewReader(bytes.NewReader(b)))
	if err != nil {
		return 0, err
	}
	args, err := proto.ReadStrings(text)
	if err != nil {
		return 0, err
	}
	kind, channels := strings.ToLower(args[0]), args[1:]
	c.send(c.plain, func() {
		for _, name := range channels {
			c.forget(name)
			if kind == "ssubscribe" {
				c.listeners[name] = append(c.listeners[name], c)
			}
			c.push(kind, name, proto.Int(1))
		}
	})
	return len(b), nil
}

// forget ends a subscription.
func (c *conn) forget(name string) {
	c.listeners[name] = slices.DeleteFunc(c.listeners[name], func(other *conn) bool { return other == c })
}

// push sends something to the process.
func (c *conn) push(kind, channel, last string) {
	if c.dead.Load() {
		return
	}
	select {
	case c.pushes <- push{proto.Push(proto.String(kind), proto.String(channel), last), time.Now().Add(c.trip / 2)}:
	case <-c.closed:
	}
}

func (c *conn) Read(b []byte) (int, error) {
	if len(c.unread) == 0 {
		select {
		case p := <-c.pushes:
			select {
			case <-time.After(time.Until(p.arrival)):
			case <-c.closed: // while it is in transit
				return 0, net.ErrClosed
			}
			c.unread = []byte(p.data)
		case <-c.closed:
			return 0, net.ErrClosed
		}
	}
	n := copy(b, c.unread)
	c.unread = c.unread[n:]
	return n, nil
}

// Close costs nothing, since opening the connection includes it.
func (c *conn) Close() error {
	c.once.Do(func() { close(c.closed) })
	return nil
}

// gone reports whether the connection has been closed.
func (c *conn) gone() bool {
	select {
	case <-c.closed:
		return true
	default:
		return false
	}
}

func (c *conn) LocalAddr() net.Addr              { return &net.TCPAddr{} }
func (c *conn) RemoteAddr() net.Addr             { return &net.TCPAddr{} }
func (c *conn) SetDeadline(time.Time) error      { return nil }
func (c *conn) SetReadDeadline(time.Time) error  { return nil }
func (c *conn) SetWriteDeadline(time.Time) error { return nil }

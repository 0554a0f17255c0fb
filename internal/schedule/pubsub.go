package schedule

import (
	"fmt"
	"net"
	"slices"
	"strings"

	"github.com/alicebob/miniredis/v2/server"
)

// The World does what Pub/Sub does: the miniredis would send messages at once. All commands go to it
// over one connection, which cannot subscribe for several clients.

// A listener is a connection of a client that may have subscribed channels.
type listener struct {
	process  string
	conn     *clientConn
	far      net.Conn
	channels map[string]bool // guarded by World.mu
}

// subscribe executes commands to subscribe and unsubscribe, and returns the replies.
func (w *World) subscribe(l *listener, commands [][]string) (replies string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, args := range commands {
		if l.channels == nil {
			l.channels = make(map[string]bool)
			w.listens = append(w.listens, l)
		}
		for _, channel := range args[1:] {
			if args[0] == "ssubscribe" {
				l.channels[channel] = true
			} else {
				delete(l.channels, channel)
			}
			replies += push(args[0], channel, fmt.Sprintf(":%d", len(l.channels)))
		}
	}
	return replies
}

func (w *World) forgetListener(l *listener) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.listens = slices.DeleteFunc(w.listens, func(other *listener) bool { return other == l })
}

// push returns a push of RESP3: a kind, a channel, and an encoded number or a message.
func push(kind, channel, last string) string {
	var b strings.Builder
	fmt.Fprintf(&b, ">3\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n", len(kind), kind, len(channel), channel)
	if kind == "smessage" {
		fmt.Fprintf(&b, "$%d\r\n", len(last))
	}
	b.WriteString(last + "\r\n")
	return b.String()
}

// published is called before each command. It answers PUBLISH, which scripts call on a server
// without sharded channels.
func (w *World) published(c *server.Peer, cmd string, args ...string) bool {
	if cmd != "PUBLISH" || len(args) != 2 {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.told = append(w.told, [2]string{args[0], args[1]})
	heard := 0
	for _, l := range w.listens {
		if l.channels[args[0]] {
			heard++
		}
	}
	c.WriteInt(heard)
	return true
}

// publish sends what the last command has published. Each message waits for the scheduler.
func (w *World) publish() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, m := range w.told {
		for _, l := range w.listens {
			if !l.channels[m[0]] {
				continue
			}
			what := w.named(fmt.Sprintf("%q on %s", m[1], m[0]))
			go func() {
				i := &item{process: l.process, kind: message, what: what, gone: l.conn.closed.Load, sever: func() { _ = l.far.Close() }}
				if w.wait(i) {
					_, _ = l.far.Write([]byte(push("smessage", m[0], m[1])))
				}
			}()
		}
	}
	w.told = nil
}

// lose drops a message. The caller holds mu.
func (w *World) lose(i *item) {
	w.explorer.unheard++
	at := slices.Index(w.waiting, i)
	w.waiting = slices.Delete(w.waiting, at, at+1)
	i.goes <- false
}

package schedule

import (
	"bufio"
	"context"
	"io/fs"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/proto"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/wake"
)

// A wire is the connection to the server that carries the commands of all clients.
type wire struct {
	mu      sync.Mutex
	conn    net.Conn
	replies *bufio.Reader
	scripts map[string]script // by hash and by text
}

type script struct{ name, text string }

func newWire(t *testing.T, m *miniredis.Miniredis) *wire {
	conn, err := m.Dial()
	redistest.Must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return &wire{conn: conn, replies: bufio.NewReader(conn), scripts: make(map[string]script)}
}

// execute returns the server's raw replies to n commands.
func (w *wire) execute(commands string, n int) (replies string, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	// The server answers each before it reads the next.
	go func() { _, _ = w.conn.Write([]byte(commands)) }()
	for range n {
		r, err := proto.Read(w.replies)
		if err != nil {
			return "", err
		}
		replies += r
	}
	return replies, nil
}

// Scripts registers scripts: each is named after its file.
func (w *World) Scripts(files fs.FS) {
	names, err := fs.Glob(files, "*.lua")
	redistest.Must(w.t, err)
	for _, name := range names {
		text, err := fs.ReadFile(files, name)
		redistest.Must(w.t, err)
		s := script{strings.TrimSuffix(name, ".lua"), wake.Lua + string(text)}
		w.wire.scripts[redis.NewScript(s.text).Hash()], w.wire.scripts[s.text] = s, s
	}
}

// Client returns a client of a process, whose commands wait for the scheduler.
func (w *World) Client(process string) *redis.Client {
	rdb := redis.NewClient(&redis.Options{
		Addr: "127.0.0.1:6379",
		Dialer: func(context.Context, string, string) (net.Conn, error) {
			near, far := net.Pipe()
			go w.carry(process, far)
			return near, nil
		},
		PoolSize:                 100,
		ContextTimeoutEnabled:    true,
		DisableIdentity:          true,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
	w.t.Cleanup(func() { _ = rdb.Close() })
	wake.Mute(rdb)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.clients = append(w.clients, rdb)
	if w.over {
		_ = rdb.Close()
	}
	return rdb
}

// Admin returns a client whose commands do not wait, for use before and after a schedule.
func (w *World) Admin() *redis.Client { return redistest.NewMiniClient(w.t, w.Server) }

// carry carries commands of a client to the server, and replies back, when the scheduler picks
// them.
func (w *World) carry(process string, far net.Conn) {
	defer far.Close()
	in := bufio.NewReaderSize(far, 1<<16)
	for {
		commands, n, what, err := w.read(process, in)
		if err != nil {
			return
		}
		if what != "" && !w.wait(&item{process: process, kind: request, what: what}) {
			return
		}
		w.tick()
		replies, err := w.wire.execute(commands, n)
		if err != nil {
			return
		}
		if what != "" && !w.answer(process, replies) {
			return
		}
		if _, err := far.Write([]byte(replies)); err != nil {
			return
		}
	}
}

// read reads the commands that a client sent at once, and describes them; a handshake has no
// description, nor has a command that is aside.
func (w *World) read(process string, in *bufio.Reader) (commands string, n int, what string, err error) {
	var shown []string
	for n == 0 || in.Buffered() > 0 {
		raw, err := proto.Read(in)
		if err != nil {
			return "", 0, "", err
		}
		args, err := proto.ReadStrings(raw)
		if err != nil {
			return "", 0, "", err
		}
		n++
		if strings.HasPrefix(args[0], "eval") {
			if s := w.wire.scripts[args[1]]; s.name != "" {
				var b strings.Builder
				_ = proto.Write(&b, append([]string{"eval", s.text}, args[2:]...))
				raw, args = b.String(), append([]string{s.name}, args[2:]...)
			}
		}
		commands += raw
		if args[0] == "hello" || args[0] == "client" || args[0] == "time" { // they change nothing
			continue
		}
		w.nameTokens(process, args)
		if w.Aside == nil || !w.Aside(args) {
			shown = append(shown, w.show(strings.Join(args, " ")))
		}
	}
	return commands, n, strings.Join(shown, "; "), nil
}

// answer reports whether to send replies to the client.
func (w *World) answer(process, replies string) bool {
	w.nameStamps(process, replies)
	if w.Executed != nil {
		w.Executed()
	}
	shown := w.show(replies)
	if w.explorer.plan.Together {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.saw(process, shown)
		return true
	}
	return w.wait(&item{process: process, kind: reply, what: shown})
}

// show quotes bytes, with names in place of random values.
func (w *World) show(s string) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return strconv.Quote(w.named(s))
}

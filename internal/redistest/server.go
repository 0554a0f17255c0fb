package redistest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// A Server is a redis-server that a test started.
type Server struct {
	*proc
	Addr string // 127.0.0.1:port, unchanged by Restart

	bin   string
	args  []string
	dir   string
	log   *tail
	admin *redis.Client
}

// Start starts a redis-server without persistence on its own port and returns when it answers. args
// are further options of redis-server and override the defaults. Without the program the test is
// skipped, or fails if REDIS_REQUIRED=1. REDIS_SERVER names another program than redis-server; if
// it is set but empty, there is no program.
func Start(t testing.TB, args ...string) *Server {
	t.Helper()
	return start(t, plain(args))
}

func start(t testing.TB, argv func(port int, dir string) ([]string, error)) *Server {
	t.Helper()
	s, err := launch(program(t), argv)
	Must(t, err)
	t.Cleanup(func() {
		check(t, s)
		s.stop()
	})
	return s
}

func program(t testing.TB) string {
	t.Helper()
	bin, err := findProgram()
	switch {
	case err == nil:
	case required():
		t.Fatalf("%v: install it (Debian: apt-get install redis-server) or name another by REDIS_SERVER", err)
	default:
		t.Skipf("%v: install it to run this test", err)
	}
	return bin
}

// findProgram returns the path of the redis-server program.
func findProgram() (string, error) {
	name, named := os.LookupEnv("REDIS_SERVER")
	if !named {
		name = "redis-server"
	}
	return exec.LookPath(name)
}

// required reports whether tests must fail without a server.
func required() bool { return os.Getenv("REDIS_REQUIRED") == "1" }

// plain returns the command line of an ordinary server on port in dir.
func plain(args []string) func(port int, dir string) ([]string, error) {
	return func(port int, dir string) ([]string, error) {
		return append([]string{
			"--port", strconv.Itoa(port), "--bind", "127.0.0.1", "--dir", dir,
			"--save", "", "--appendonly", "no", "--enable-debug-command", "yes",
		}, args...), nil
	}
}

// launch tries a few ports: another process may bind a port after it was chosen, and then the
// server ends at once.
func launch(bin string, argv func(port int, dir string) ([]string, error)) (*Server, error) {
	var last error
	for range 5 {
		dir, err := os.MkdirTemp("", "redistest")
		if err != nil {
			return nil, err
		}
		port := freePort()
		args, err := argv(port, dir)
		if err != nil {
			return nil, err
		}
		s := &Server{Addr: loopback(port), bin: bin, args: args, dir: dir, log: new(tail)}
		s.admin = redis.NewClient(quiet(s.Addr))
		if last = s.run(); last == nil {
			return s, nil
		}
		s.stop()
	}
	return nil, last
}

// run starts the process and waits until it serves or has ended.
func (s *Server) run() error {
	cmd := exec.Command(s.bin, s.args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = s.dir, s.log, s.log
	var err error
	if s.proc, err = startProc(cmd); err != nil {
		return err
	}
	ready := false
	poll(awaitLimit, func() bool {
		ready = s.ready()
		return ready || s.ended()
	})
	if !ready {
		s.Kill()
		return fmt.Errorf("redistest: %s does not serve on %s; its log:\n%s", s.bin, s.Addr, s.log)
	}
	return nil
}

// ready sends INFO rather than PING because its answer contains the process id: if another process
// bound the port first, it might answer PING.
func (s *Server) ready() bool {
	conn, err := net.DialTimeout("tcp", s.Addr, time.Second)
	if err != nil {
		return false // dialed first, since go-redis logs every failed dial
	}
	_ = conn.Close()
	info, err := s.admin.Info(context.Background()).Result()
	return err == nil && !strings.Contains(info, "loading:1") &&
		strings.Contains(info, fmt.Sprintf("process_id:%d\r\n", s.Pid()))
}

// stop ends the server for good. It may be called after Kill.
func (s *Server) stop() {
	_ = s.admin.Close()
	if s.proc != nil && s.proc.cmd.Process != nil {
		s.Kill()
	}
	_ = os.RemoveAll(s.dir)
}

// Client returns a client that is closed when the test ends. It has the defaults of go-redis, but
// adds no commands except HELLO.
func (s *Server) Client(t testing.TB, mutate ...func(*redis.Options)) *redis.Client {
	return newClient(t, s.Addr, mutate)
}

func newClient(t testing.TB, addr string, mutate []func(*redis.Options)) *redis.Client {
	opt := quiet(addr)
	for _, m := range mutate {
		m(opt)
	}
	c := redis.NewClient(opt)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// quiet returns options that keep call counts exact: no CLIENT SETINFO, no CLIENT
// MAINT_NOTIFICATIONS.
func quiet(addr string) *redis.Options {
	return &redis.Options{
		Addr:                     addr,
		DisableIdentity:          true,
		MaintNotificationsConfig: maintOff(),
	}
}

func maintOff() *maintnotifications.Config {
	return &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
}

// Admin returns the server's own client, for CONFIG, DEBUG and reading keys.
func (s *Server) Admin() *redis.Client { return s.admin }

// Restart starts the server again on the same port with the same options and directory, after
// killing it if it runs. It is empty unless the options ask for persistence. It retries while
// another process holds the port.
func (s *Server) Restart() {
	s.Kill()
	var err error
	if !poll(awaitLimit, func() bool { err = s.run(); return err == nil }) {
		panic(err)
	}
}

// Calls returns how often the server has executed a command since its start or ResetCalls. cmd is
// in lower case, a subcommand like "script|load". Commands called by scripts count, too.
func (s *Server) Calls(cmd string) int64 { return s.AllCalls()[cmd] }

// AllCalls returns the counts of all commands that were executed.
func (s *Server) AllCalls() map[string]int64 {
	info, err := s.admin.Info(context.Background(), "commandstats").Result()
	if err != nil {
		panic(fmt.Sprintf("redistest: INFO of %s: %v", s.Addr, err))
	}
	calls := make(map[string]int64)
	for line := range strings.Lines(info) {
		name, counts, _ := strings.Cut(line, ":calls=")
		number, _, found := strings.Cut(counts, ",")
		if !found {
			continue // the section's title
		}
		n, err := strconv.ParseInt(number, 10, 64)
		if err != nil {
			panic(fmt.Sprintf("redistest: INFO line %q: %v", line, err))
		}
		calls[strings.TrimPrefix(name, "cmdstat_")] = n
	}
	return calls
}

// KillConnections kills the connections of all clients every 20 ms, until stop. kills counts them.
func (s *Server) KillConnections() (kills *atomic.Int64, stop func()) {
	return again(func() int64 {
		time.Sleep(20 * time.Millisecond)
		return s.admin.ClientKillByFilter(context.Background(), "type", "normal", "skipme", "yes").Val()
	})
}

// FlushScripts makes the server forget all scripts again and again, until stop. flushes counts it.
func (s *Server) FlushScripts() (flushes *atomic.Int64, stop func()) {
	return again(func() int64 {
		if s.admin.ScriptFlush(context.Background()).Err() != nil {
			return 0
		}
		return 1
	})
}

// again adds what do returns to count, until stop.
func again(do func() int64) (count *atomic.Int64, stop func()) {
	count = new(atomic.Int64)
	var over atomic.Bool
	var running sync.WaitGroup
	running.Go(func() {
		for !over.Load() {
			count.Add(do())
		}
	})
	return count, func() { over.Store(true); running.Wait() }
}

// ResetCalls sets all counts to zero.
func (s *Server) ResetCalls() {
	if err := s.admin.ConfigResetStat(context.Background()).Err(); err != nil {
		panic(fmt.Sprintf("redistest: CONFIG RESETSTAT of %s: %v", s.Addr, err))
	}
}

// Ports are below the range that systems use for outgoing connections. There no client of a
// parallel test can take the port of a server that is down for a moment. A cluster node also
// listens on port + 10000, which overlaps with neither range.
const (
	lowestPort  = 10000
	highestPort = 20000
	busOffset   = 10000
)

// freePort returns a port that is free, with its bus port, and that no other test gets while this
// process lives: where a server is down, no other server must answer.
func freePort() int {
	for {
		port := lowestPort + rand.IntN(highestPort-lowestPort)
		if reserve(port) && free(port) && free(port+busOffset) {
			return port
		}
	}
}

func free(port int) bool {
	l, err := net.Listen("tcp", loopback(port))
	if err != nil {
		return false
	}
	return l.Close() == nil
}

func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

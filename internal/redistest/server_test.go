package redistest

import (
	"errors"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// impatient makes a client report the first failure, but not a slow machine.
func impatient(o *redis.Options) {
	o.MaxRetries = -1
	o.DialerRetries = 1
	o.DialTimeout = time.Minute
	o.ReadTimeout = time.Minute
}

// Calls counts the commands of clients and scripts, and nothing else.
func TestServer_Calls(t *testing.T) {
	t.Parallel()
	s := Start(t)
	c := s.Client(t)
	ctx := t.Context()
	for range 3 {
		c.Get(ctx, "k")
	}
	c.Eval(ctx, `return redis.call('GET', KEYS[1])`, []string{"k"})
	c.ScriptLoad(ctx, "return 1")
	if n := s.Calls("get"); n != 4 {
		t.Errorf("%d GETs, not 3 and the one of the script", n)
	}
	if n := s.Calls("script|load"); n != 1 {
		t.Errorf("%d SCRIPT LOADs, not 1", n)
	}
	for _, cmd := range []string{"client|setinfo", "client|maint_notifications"} {
		if n := s.Calls(cmd); n != 0 {
			t.Errorf("the client sent %s %d times", cmd, n)
		}
	}
	s.ResetCalls()
	if n := s.Calls("get"); n != 0 {
		t.Errorf("%d GETs after the reset", n)
	}
}

// A killed server restarts empty.
func TestServer_RestartEmpty(t *testing.T) {
	t.Parallel()
	s := Start(t)
	c := s.Client(t, impatient)
	ctx := t.Context()
	Must(t, c.Set(ctx, "k", "v", 0).Err())
	before := s.Pid()
	s.Kill()
	if err := c.Get(ctx, "k").Err(); err == nil || errors.Is(err, redis.Nil) {
		t.Fatalf("a dead server answered: %v", err)
	}
	s.Restart()
	if s.Pid() == before {
		t.Error("the same process serves after Restart")
	}
	Await(t, "the client finds the key gone", func() bool {
		return errors.Is(c.Get(ctx, "k").Err(), redis.Nil)
	})
}

// A server with persistence keeps its data.
func TestServer_RestartWithData(t *testing.T) {
	t.Parallel()
	s := Start(t, "--appendonly", "yes", "--appendfsync", "always")
	ctx := t.Context()
	Must(t, s.Admin().Set(ctx, "k", "v", 0).Err())
	s.Restart()
	if v, err := s.Admin().Get(ctx, "k").Result(); v != "v" || err != nil {
		t.Fatalf("read %q, %v after Restart", v, err)
	}
}

// A frozen server executes nothing until it is thawed.
func TestServer_Freeze(t *testing.T) {
	t.Parallel()
	s := Start(t)
	c := s.Client(t, impatient)
	Must(t, c.Ping(t.Context()).Err())
	s.Freeze()
	if err := c.WithTimeout(100*time.Millisecond).Set(t.Context(), "k", "late", 0).Err(); !isTimeout(err) {
		t.Fatalf("a frozen server: %v", err)
	}
	s.Thaw()
	Await(t, "the thawed server executes what it was sent", func() bool {
		return c.Get(t.Context(), "k").Val() == "late"
	})
}

func isTimeout(err error) bool {
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout()
}

// A server ends with its test, and its directory is removed.
func TestServer_Cleanup(t *testing.T) {
	t.Parallel()
	var s *Server
	t.Run("owner", func(t *testing.T) { s = Start(t) })
	if s == nil {
		return // the subtest has reported why
	}
	if !s.proc.ended() {
		t.Error("the process runs after its test")
	}
	if _, err := os.Stat(s.dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory after its test: %v", err)
	}
}

// A server that finds its port taken starts on another one.
func TestServer_TakenPort(t *testing.T) {
	t.Parallel()
	taken := Start(t)
	tries := 0
	s, err := launch(program(t), func(port int, dir string) ([]string, error) {
		tries++
		args, err := plain(nil)(port, dir)
		if tries == 1 {
			_, args[1], _ = strings.Cut(taken.Addr, ":")
		}
		return args, err
	})
	Must(t, err)
	defer s.stop()
	if tries != 2 || s.Addr == taken.Addr {
		t.Errorf("started on %s at try %d", s.Addr, tries)
	}
}

// A server that cannot start reports its log.
func TestServer_CannotStart(t *testing.T) {
	t.Parallel()
	_, err := launch(program(t), plain([]string{"--no-such-option", "1"}))
	if err == nil || !strings.Contains(err.Error(), "no-such-option") {
		t.Errorf("error: %v", err)
	}
}

// Shared and SharedCluster return the same servers each time.
func TestShared_Same(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	t.Parallel()
	server, cluster := Shared(t), SharedCluster(t)
	if Shared(t) != server || SharedCluster(t) != cluster {
		t.Error("two shared servers")
	}
}

// A missing server skips the test, or fails it if REDIS_REQUIRED=1.
func TestStart_MissingServer(t *testing.T) {
	for _, name := range []string{"no-such-program", ""} {
		t.Setenv("REDIS_SERVER", name)
		for required, want := range map[string]string{"": "skip", "1": "fatal"} {
			t.Setenv("REDIS_REQUIRED", required)
			r := &record{TB: t}
			r.run(func() { Start(r) })
			if r.verb != want || !strings.Contains(r.text, "install") {
				t.Errorf("REDIS_SERVER=%q, REDIS_REQUIRED=%q: %s %q", name, required, r.verb, r.text)
			}
		}
	}
}

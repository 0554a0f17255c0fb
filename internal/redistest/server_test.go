package redistest

import (
	"errors"
	"os"
	"strings"
	"testing"
)

// A server ends with its test, and its directory is removed.
func TestServer_Cleanup(t *testing.T) {
	t.Parallel()
	var s *Server
	t.Run("owner", func(t *testing.T) { s = Start(t) })
	if s == nil {
		return // the subtest has reported why
	}
	if !s.ended() {
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

package cachetest

import (
	"context"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/wake"
)

// Before is a hook that is called before each command, which fails if do does.
func Before(do func(cmd redis.Cmder) error) redistest.Commands {
	return func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
		if err := do(cmd); err != nil {
			return err
		}
		return next(ctx, cmd)
	}
}

// After is a hook that is called after each command that has succeeded.
func After(do func(cmd redis.Cmder) error) redistest.Commands {
	return func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
		if err := next(ctx, cmd); err != nil {
			return err
		}
		return do(cmd)
	}
}

// Slow is a hook that delays each command.
func Slow(d time.Duration) redistest.Commands {
	return Before(func(redis.Cmder) error { time.Sleep(d); return nil })
}

// An Outage is a hook that keeps the replies of commands from their callers while it is on.
// Commands without a deadline are the test's, and pass.
type Outage struct {
	On      atomic.Bool
	Keeps   func(cmd []string) bool // the replies of these commands; nil: of all
	Arrives func(cmd []string) bool // the server carries out these commands; nil: none
}

func (o *Outage) Hook() redis.Hook {
	return outage{redistest.Commands(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
		return o.lose(ctx, []redis.Cmder{cmd}, func() error { return next(ctx, cmd) })
	}), o}
}

// lose loses the replies of what do sends in one round trip, if one of them is to be lost.
func (o *Outage) lose(ctx context.Context, cmds []redis.Cmder, do func() error) error {
	any := func(of func(cmd []string) bool) bool {
		return slices.ContainsFunc(cmds, func(cmd redis.Cmder) bool { return of(Args(cmd)) })
	}
	_, bounded := ctx.Deadline()
	if !bounded || !o.On.Load() || o.Keeps != nil && !any(o.Keeps) {
		return do()
	}
	if o.Arrives != nil && any(o.Arrives) {
		_ = do()
	}
	<-ctx.Done()
	for _, cmd := range cmds {
		cmd.SetErr(ctx.Err())
	}
	return ctx.Err()
}

type outage struct {
	redistest.Commands
	*Outage
}

func (o outage) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		return o.lose(ctx, cmds, func() error { return next(ctx, cmds) })
	}
}

func Args(cmd redis.Cmder) (args []string) {
	for _, a := range cmd.Args() {
		args = append(args, fmt.Sprint(a))
	}
	return args
}

// WantCalls checks what the server has executed since ResetCalls, except what the test itself
// sends.
func WantCalls(t testing.TB, server *redistest.Server, what string, want map[string]int64) {
	t.Helper()
	got := server.AllCalls()
	for _, own := range []string{"info", "config|resetstat", "hello"} {
		delete(got, own)
	}
	if !maps.Equal(got, want) {
		t.Errorf("%s: commands %v, want %v", what, got, want)
	}
}

// HitsMayBeLate reports whether the test's client may answer from its own cache, for a moment, what
// was true before a write: counts are not exact then.
func HitsMayBeLate(t *testing.T) bool { return strings.Contains(t.Name()+"/", "/csc/") }

// WantCommands checks how many commands a server gets while during runs.
func WantCommands(t *testing.T, m *miniredis.Miniredis, what string, least, most int, during func()) {
	t.Helper()
	n := m.CommandCount()
	during()
	synctest.Wait()
	if n = m.CommandCount() - n; n < least || n > most {
		t.Errorf("%s: %d commands, want %d to %d", what, n, least, most)
	}
}

// Scripts returns the folder of the fill lock's scripts.
func Scripts() fs.FS { return os.DirFS(filepath.Join(redistest.Root(), "internal", "filllock", "lua")) }

// Script matches the commands that run a script of the fill lock, which is named like its file.
func Script(t testing.TB, name string) func(cmd []string) bool {
	t.Helper()
	text, err := fs.ReadFile(Scripts(), name+".lua")
	redistest.Must(t, err)
	return redistest.Runs(wake.Lua + string(text))
}

// LoadScripts makes the server know the scripts, so that each act on the fill lock is one command.
func LoadScripts(t testing.TB, s *redistest.Server) {
	t.Helper()
	scripts := Scripts()
	files, err := fs.Glob(scripts, "*.lua")
	if err != nil || len(files) == 0 {
		t.Fatalf("scripts %q, %v", files, err)
	}
	for _, file := range files {
		text, err := fs.ReadFile(scripts, file)
		if err == nil {
			err = s.Admin().ScriptLoad(t.Context(), wake.Lua+string(text)).Err()
		}
		redistest.Must(t, err)
	}
}

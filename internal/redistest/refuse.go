package redistest

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// Config returns what makes a server refuse commands by a setting, until mend is called, which sets another value.
func Config(setting, refusing, serving string) func(t testing.TB, s *Server) (mend func()) {
	return func(t testing.TB, s *Server) func() {
		t.Helper()
		Do(t, s.admin, "config", "set", setting, refusing)
		return func() { Do(t, s.admin, "config", "set", setting, serving) }
	}
}

// LoseMaster makes a server the replica of a port without a server, until mend is called.
func LoseMaster(t testing.TB, s *Server) (mend func()) {
	t.Helper()
	Do(t, s.admin, "replicaof", "127.0.0.1", 1)
	return func() { Do(t, s.admin, "replicaof", "no", "one") }
}

// FailSaves makes a server fail to save, and so refuse writes with MISCONF, until mend is called.
func FailSaves(t testing.TB, s *Server) (mend func()) {
	t.Helper()
	ctx := context.Background()
	inTheWay := filepath.Join(s.Admin().ConfigGet(ctx, "dir").Val()["dir"], "dump.rdb", "not empty")
	Must(t, os.MkdirAll(inTheWay, 0o700)) // a file cannot replace this directory
	Do(t, s.Admin(), "config", "set", "save", "3600 1")
	Do(t, s.Admin(), "bgsave")
	client := s.Client(t, NoRetry)
	Await(t, "writes are refused", func() bool {
		return redis.HasErrorPrefix(client.Set(ctx, "x", "y", time.Minute).Err(), "MISCONF")
	})
	return func() { Do(t, s.Admin(), "config", "set", "save", "") }
}

// KeepBusy makes a server run a script without end, and so answer BUSY, until mend is called.
func KeepBusy(t testing.TB, s *Server) (mend func()) {
	t.Helper()
	Do(t, s.Admin(), "config", "set", "busy-reply-threshold", "20")
	ended := runLong(t, s, "BUSY", "eval", "while true do end", 0)
	return func() { Do(t, s.Admin(), "script", "kill"); <-ended }
}

// Reload makes a server load its data for some seconds, and so answer LOADING, until loaded returns.
func Reload(t testing.TB, s *Server) (loaded func()) {
	t.Helper()
	Do(t, s.Admin(), "debug", "populate", 10000)
	Do(t, s.Admin(), "save")
	Do(t, s.Admin(), "config", "set", "key-load-delay", "300")
	Do(t, s.Admin(), "config", "set", "loading-process-events-interval-bytes", "1024")
	ended := runLong(t, s, "LOADING", "debug", "reload", "nosave")
	return func() { <-ended }
}

// runLong runs a command, and waits until the server refuses others.
func runLong(t testing.TB, s *Server, refusal string, command ...any) (ended <-chan struct{}) {
	t.Helper()
	done := make(chan struct{})
	runs := s.Client(t, NoRetry, func(o *redis.Options) { o.ReadTimeout = -1 })
	asks := s.Client(t, NoRetry)
	go func() {
		defer close(done)
		runs.Do(context.Background(), command...)
	}()
	Await(t, "the server says "+refusal, func() bool {
		return redis.HasErrorPrefix(asks.Ping(context.Background()).Err(), refusal)
	})
	return done
}

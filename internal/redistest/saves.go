package redistest

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

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

package redistest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// StartReplica starts a replica of master and returns when its first sync is done: a master that
// dies earlier is never replaced. Both servers sync diskless, without the wait of 5 s for more
// replicas.
func StartReplica(t testing.TB, master *Server) *Server {
	t.Helper()
	ctx := context.Background()
	Must(t, master.admin.ConfigSet(ctx, "repl-diskless-sync-delay", "0").Err())
	host, port := master.hostPort()
	replica := Start(t, "--replicaof", host, port, "--repl-diskless-sync-delay", "0")
	Await(t, "the replica has its master's data", func() bool {
		return says(replica.admin.Info(ctx, "replication"), "master_link_status:up")
	})
	return replica
}

// MasterName is the name of the master of StartSentinel.
const MasterName = "mymaster"

// StartSentinel starts a sentinel that alone decides about master, and returns when it knows the
// master's replicas: without them it cannot fail over. It declares a dead master dead after 1 s; a
// replica is promoted about 3 s after the death.
func StartSentinel(t testing.TB, master *Server) *Server {
	t.Helper()
	s := start(t, func(port int, dir string) ([]string, error) { // it needs a file that it can rewrite
		host, masterPort := master.hostPort()
		config := fmt.Sprintf(`port %d
bind 127.0.0.1
dir %s
sentinel monitor %[3]s %s %s 1
sentinel down-after-milliseconds %[3]s 1000
sentinel failover-timeout %[3]s 3000
`, port, dir, MasterName, host, masterPort)
		file := filepath.Join(dir, "sentinel.conf")
		return []string{file, "--sentinel"}, os.WriteFile(file, []byte(config), 0o600)
	})
	ctx := context.Background()
	Await(t, "the sentinel knows the replicas", func() bool {
		info, err := master.admin.Info(ctx, "replication").Result()
		if err != nil {
			return false
		}
		_, replicas, _ := strings.Cut(info, "connected_slaves:")
		replicas, _, _ = strings.Cut(replicas, "\r\n")
		known := s.admin.Info(ctx, "sentinel")
		return says(known, "status=ok") && says(known, "slaves="+replicas+",")
	})
	return s
}

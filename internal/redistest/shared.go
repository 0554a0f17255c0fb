package redistest

import (
	"sync"
	"testing"
	"time"
)

// shared holds the servers that live as long as the test binary. After a failed start the next test
// tries again.
var shared struct {
	serverMu  sync.Mutex
	server    *Server // protected by serverMu
	clusterMu sync.Mutex
	cluster   *Cluster // protected by clusterMu
}

// Shared returns the plain server that all tests of this binary share, started on first use and
// stopped by Main. It is for tests that keep to their own namespace: a test that flushes,
// configures, counts or stops a server needs Start.
func Shared(t testing.TB) *Server {
	t.Helper()
	shared.serverMu.Lock()
	defer shared.serverMu.Unlock()
	if shared.server == nil {
		s, err := launch(program(t), plain(nil))
		Must(t, err)
		shared.server = s
	}
	return shared.server
}

// SharedCluster returns the cluster that all tests of this binary share, for the same kind of tests
// as Shared.
func SharedCluster(t testing.TB) *Cluster {
	t.Helper()
	shared.clusterMu.Lock()
	defer shared.clusterMu.Unlock()
	if shared.cluster == nil {
		c, err := launchCluster(program(t), time.Minute, false)
		Must(t, err)
		shared.cluster = c
	}
	return shared.cluster
}

// stopShared stops the shared servers and returns the leaks on them.
func stopShared() (leaks []string) {
	shared.serverMu.Lock()
	defer shared.serverMu.Unlock()
	shared.clusterMu.Lock()
	defer shared.clusterMu.Unlock()
	if s := shared.server; s != nil {
		leaks = s.leaks("")
		s.stop()
	}
	if c := shared.cluster; c != nil {
		for _, node := range c.all() {
			leaks = append(leaks, node.leaks("")...)
		}
		c.stop()
	}
	shared.server, shared.cluster = nil, nil
	return leaks
}

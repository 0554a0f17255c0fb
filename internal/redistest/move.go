package redistest

import (
	"context"
	"testing"
)

// A Move is a slot of a cluster that is being moved to another node. In between the new node serves
// the keys that Take has moved, the old node serves the others, and neither serves a command with
// keys on both.
type Move struct {
	From, To *Server

	t       testing.TB
	cluster *Cluster
	slot    int64
}

// Move begins to move the slot of key to another node.
func (c *Cluster) Move(t testing.TB, key string) *Move {
	t.Helper()
	m := &Move{From: c.Owner(t, key), t: t, cluster: c}
	m.slot = m.From.admin.ClusterKeySlot(context.Background(), key).Val()
	m.To = c.Nodes[0]
	if m.To == m.From {
		m.To = c.Nodes[1]
	}
	m.do(m.To, "CLUSTER", "SETSLOT", m.slot, "IMPORTING", m.From.clusterID())
	m.do(m.From, "CLUSTER", "SETSLOT", m.slot, "MIGRATING", m.To.clusterID())
	return m
}

// Take moves some of the keys.
func (m *Move) Take(keys ...string) {
	m.t.Helper()
	host, port := m.To.hostPort()
	args := []any{"MIGRATE", host, port, "", 0, 5000, "KEYS"}
	for _, key := range keys {
		args = append(args, key)
	}
	m.do(m.From, args...)
}

// Rest returns the keys that have not been moved.
func (m *Move) Rest() []string {
	m.t.Helper()
	keys, err := m.From.admin.ClusterGetKeysInSlot(context.Background(), int(m.slot), 1000).Result()
	Must(m.t, err)
	return keys
}

// End moves the remaining keys and gives the slot to the new node.
func (m *Move) End() {
	m.t.Helper()
	for rest := m.Rest(); len(rest) > 0; rest = m.Rest() {
		m.Take(rest...)
	}
	to := m.To.clusterID()
	m.do(m.To, "CLUSTER", "SETSLOT", m.slot, "NODE", to)
	for _, node := range m.cluster.Nodes {
		m.do(node, "CLUSTER", "SETSLOT", m.slot, "NODE", to)
	}
}

func (m *Move) do(s *Server, args ...any) {
	m.t.Helper()
	if err := s.admin.Do(context.Background(), args...).Err(); err != nil {
		m.t.Fatalf("%v on %s: %v", args, s.Addr, err)
	}
}

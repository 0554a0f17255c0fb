package redistest

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// A replica gets old and new writes of its master, and refuses writes.
func TestStartReplica_Follows(t *testing.T) {
	t.Parallel()
	master := Start(t)
	ctx := t.Context()
	master.Admin().Set(ctx, "old", "1", 0)
	replica := StartReplica(t, master)
	if v := replica.Admin().Get(ctx, "old").Val(); v != "1" {
		t.Errorf("the replica has %q", v)
	}
	setReplicated(t, master.Admin(), "new", "2")
	if v := replica.Admin().Get(ctx, "new").Val(); v != "2" {
		t.Errorf("the replica has %q", v)
	}
	if err := replica.Admin().Set(ctx, "new", "3", 0).Err(); !redis.IsReadOnlyError(err) {
		t.Errorf("a write to the replica: %v", err)
	}
}

// setReplicated writes and waits on one connection, since WAIT is about the connection's own
// writes.
func setReplicated(t *testing.T, c *redis.Client, key, value string) {
	t.Helper()
	conn := c.Conn()
	defer conn.Close()
	Must(t, conn.Set(t.Context(), key, value, 0).Err())
	if n, err := conn.Wait(t.Context(), 1, 10*time.Second).Result(); n != 1 || err != nil {
		t.Fatalf("%d replicas got the write, %v", n, err)
	}
}

// A sentinel promotes a replica when the master dies.
func TestStartSentinel_Failover(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	t.Parallel()
	master := Start(t)
	replica := StartReplica(t, master)
	sentinel := StartSentinel(t, master)
	c := redis.NewFailoverClient(&redis.FailoverOptions{
		MasterName: MasterName, SentinelAddrs: []string{sentinel.Addr}, MaxRetries: -1,
	})
	defer c.Close()
	ctx := t.Context()
	setReplicated(t, c, "k", "v")
	master.Kill()
	// A sentinel that noticed that the machine stalled for 2 s waits 30 s before it acts.
	if !poll(time.Minute, func() bool { return c.Set(ctx, "k2", "v2", 0).Err() == nil }) {
		t.Fatal("the client does not write to the former replica")
	}
	if v := replica.Admin().Get(ctx, "k").Val() + replica.Admin().Get(ctx, "k2").Val(); v != "vv2" {
		t.Errorf("the new master has %q", v)
	}
}

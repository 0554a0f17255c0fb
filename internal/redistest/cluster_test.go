package redistest

import (
	"fmt"
	"testing"
)

func TestClusterSpreadsKeys(t *testing.T) {
	t.Parallel()
	cluster := StartCluster(t)
	c := cluster.Client(t)
	ctx := t.Context()
	for i := range 60 {
		key := fmt.Sprint("key", i)
		if err := c.Set(ctx, key, i, 0).Err(); err != nil {
			t.Fatal(err)
		}
		if n, err := c.Get(ctx, key).Int(); n != i || err != nil {
			t.Fatalf("read %d, %v, not %d", n, err, i)
		}
	}
	for _, node := range cluster.Nodes {
		if n := node.Calls("set"); n < 5 {
			t.Errorf("node %s got %d of 60 SETs", node.Addr, n)
		}
	}
}

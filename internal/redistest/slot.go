package redistest

import (
	"context"
	"math/rand/v2"
	"testing"
)

// Slot asks a node for the slot of a key, since a mistake about hash tags would be made in a test as
// in the code.
func (c *Cluster) Slot(t testing.TB, key string) int64 {
	t.Helper()
	n, err := c.Nodes[0].admin.ClusterKeySlot(context.Background(), key).Result()
	Must(t, err)
	return n
}

// RandomKeys returns short keys, the same each time, of which many look like hash tags.
func RandomKeys() []string {
	rnd := rand.New(rand.NewPCG(1, 2))
	keys := make([]string, 100)
	for i := range keys {
		b := make([]byte, 1+rnd.IntN(8))
		for j := range b {
			b[j] = "ab{}%:\x00\xff"[rnd.IntN(8)]
		}
		keys[i] = string(b)
	}
	return keys
}

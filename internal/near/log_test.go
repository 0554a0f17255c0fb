package near

import (
	"hash/fnv"
	"testing"
)

// Hash is FNV-1a, in every version: processes tell each other its results.
func TestHash_FNV(t *testing.T) {
	for _, key := range []string{"", "a", "orders:{42}", "orders:{ü}"} {
		h := fnv.New64a()
		_, _ = h.Write([]byte(key))
		if got, want := Hash(key), h.Sum64(); got != want {
			t.Errorf("Hash(%q) = %x, want %x", key, got, want)
		}
	}
}

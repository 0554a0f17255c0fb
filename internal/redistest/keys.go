package redistest

import "math/rand/v2"

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

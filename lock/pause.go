package lock

import (
	"math/rand/v2"
	"time"
)

const (
	// firstPause is the first pause between two tries. It doubles up to maxPause.
	firstPause = 2 * time.Millisecond
	maxPause   = 100 * time.Millisecond

	// listeningPause is the mean time between two commands while no message comes.
	listeningPause = 4 * time.Second

	// waitingLife is how long a waiter that sends nothing counts as one that a release wakes, if
	// there is no other one.
	waitingLife = 3 * listeningPause
)

// vary returns a random time between a half and one and a half of d.
func vary(d time.Duration) time.Duration { return time.Duration(float64(d) * (0.5 + rand.Float64())) }

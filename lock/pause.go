package lock

import (
	"time"

	"github.com/singlefill/singlefill/internal/pause"
)

const (
	// maxPause is the longest pause between two tries if no waiter is ahead. The first one is pause.Min.
	maxPause = 100 * time.Millisecond

	// listeningPause is the mean time between two commands while no message comes.
	listeningPause = 4 * time.Second

	// waitingLife is how long a waiter that sends nothing still counts as listening, so that a
	// release wakes it if there is no other waiter.
	waitingLife = 3 * listeningPause
)

// vary returns a random time between a half and one and a half of d.
func vary(d time.Duration) time.Duration { return pause.Vary(d, 0.5) }

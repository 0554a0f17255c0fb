// Package pause has what a wait for a fill (internal/wait) and a wait for a lock (package lock) have in common. Both
// ask Redis again and again until another process has ended, and ask rarely while a wake-up would tell them.
package pause

import (
	"math/rand/v2"
	"time"
)

const (
	// Min is the shortest pause between two commands of a wait.
	Min = 2 * time.Millisecond

	// Jitter is the part of a pause by which it is longer or shorter at random. A wait for a lock that is
	// told nothing takes more: its waiters know less of each other.
	Jitter = 0.25
)

// Vary returns a time that is longer or shorter than d, at random, by the given part of d at most. So
// processes that ask at the same time drift apart.
func Vary(d time.Duration, part float64) time.Duration {
	return time.Duration(float64(d) * (1 - part + 2*part*rand.Float64()))
}

// WithinLease returns d, but no more than what is left of the holder's lease and some milliseconds: if the
// holder is dead, there is something to get then.
func WithinLease(d, left time.Duration) time.Duration {
	return min(d, left+time.Millisecond+rand.N(4*time.Millisecond))
}

// AfterWakeUps returns the shortest time between two commands when a wake-up comes. It is 0 unless the
// wake-ups before it were useless. These may be late or forged: each doubles the time, up to most.
func AfterWakeUps(useless int, most time.Duration) time.Duration {
	if useless <= 0 {
		return 0
	}
	return min(Min<<min(useless-1, 10), most)
}

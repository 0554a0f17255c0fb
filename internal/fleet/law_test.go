package fleet

import "time"

// What docs/scale.md says, as far as it can be computed. The constants are those of the schedule in wait.go, which
// these have been derived from by hand.
const (
	minPause = 2 * time.Millisecond
	maxPause = 250 * time.Millisecond
	crowd    = 2
	longer   = 1.25 // a pause, by its jitter
	shorter  = 0.75
)

// A law is what a stampede is bound by.
type law struct {
	costs
	waiters int           // processes times keys
	length  time.Duration // the longest one of the loads
	known   bool          // and constant
}

// reply is the longest time until a reply: a waiter has one command under way at a time.
func (l law) reply() time.Duration { return l.trip + time.Duration(l.waiters)*l.script }

// late is the longest time that a waiter waits beyond the load's end: until the value is stored, until the pause is
// over that was begun before, and until the reply.
func (l law) late() time.Duration {
	pause := minPause + time.Millisecond/5 // the end of a load is known to the millisecond
	if !l.known {
		pause = max(minPause, min((l.length+l.reply())/5, maxPause))
	}
	return 2*l.reply() + time.Duration(longer*float64(max(pause, crowd*l.reply())))
}

// polls is how often a process asks at most while a load of that length runs and until it has its value.
func (l law) polls() (n int) {
	for age := time.Duration(0); age < l.length+l.late(); n++ {
		pause := age / 5
		if l.known && age < l.length {
			pause = (l.length - time.Millisecond - age) / 2
		} else if l.known {
			pause = (age - l.length) / 5
		}
		age += time.Duration(shorter * float64(min(max(pause, minPause), maxPause)))
	}
	return n
}

// commands is how many there are at most: a first look and a first question of each, the polls, and those of the
// holders.
func (l law) commands() int { return l.waiters*(2+l.polls()) + hotKeys*(2+int(l.length/(lockTTL/3))) }

// taken is how long after its death at most a holder is replaced.
func (l law) taken() time.Duration { return lockTTL + 5*time.Millisecond + 2*l.reply() }

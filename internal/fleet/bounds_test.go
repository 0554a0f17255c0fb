package fleet

import (
	"time"

	"github.com/singlefill/singlefill/internal/wait"
)

const (
	longer  = 1 + wait.Jitter
	shorter = 1 - wait.Jitter
)

// bounds are the bounds of a stampede, in docs/scale.md, where they can be computed.
type bounds struct {
	costs
	waiters int           // processes times keys
	length  time.Duration // of the longest load
	known   bool          // length is known to the waiters, and constant
	wakeUps bool
}

// reply is the longest time until a reply, since each waiter has one command in flight at a time.
// With wake-ups, all of them may begin to listen at the same time, and a message to each may come
// before.
func (b bounds) reply() time.Duration {
	each := b.script
	if b.wakeUps {
		each += b.message + b.plain + (b.connection+b.plain)/hotKeys
	}
	return b.trip + time.Duration(b.waiters)*each
}

// late is the longest time that a waiter waits after the end of the load: until the value is
// stored, until the pause that had begun before has passed, and until the reply.
func (b bounds) late() time.Duration {
	pause := wait.MinPause + time.Millisecond/5 // the end of a load is known to the millisecond
	if !b.known {
		pause = max(wait.MinPause, min((b.length+b.reply())/5, wait.MaxPause))
	}
	return 2*b.reply() + time.Duration(longer*float64(max(pause, wait.Crowd*b.reply())))
}

// heard is the longest time that a waiter that listens waits after the end of the load: until the
// value is stored, until the message has come, and until the reply.
func (b bounds) heard() time.Duration { return 2*b.reply() + b.trip/2 }

// polls is how often a process asks at most, from the beginning of the load until it has the value.
func (b bounds) polls() (n int) {
	for age := time.Duration(0); age < b.length+b.late(); n++ {
		pause := age / 5
		if b.known && age < b.length {
			pause = (b.length - time.Millisecond - age) / 2
		} else if b.known {
			pause = (age - b.length) / 5
		}
		age += time.Duration(shorter * float64(min(max(pause, wait.MinPause), wait.MaxPause)))
	}
	return n
}

// commands is the largest number of commands: one GET and one first script of each waiter, the
// polls, and the commands of the holders. With wake-ups, each process also opens a connection, says
// HELLO and subscribes to each key, and unsubscribes from it.
func (b bounds) commands() int {
	each := 2 + b.polls()
	if b.wakeUps {
		each += 2/hotKeys + 2
	}
	return b.waiters*each + hotKeys*(2+int(b.length/(lockTTL/3)))
}

// taken is the longest time from a holder's death to its replacement.
func (b bounds) taken() time.Duration { return lockTTL + 5*time.Millisecond + 2*b.reply() }

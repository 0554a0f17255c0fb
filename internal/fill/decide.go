package fill

import "github.com/singlefill/singlefill/internal/filllock"

// A step is what follows from a reply.
type step int

const (
	takeValue   step = iota // end with the value that has arrived
	takeFailure             // end with the failure of the load in another process
	takeLock                // load and store: the fill holds the lock
	askAgain                // ask again at once
	retryNew                // ask again at once, as a new attempt to lock
	waitForLock             // pause, then ask again
	waitForSlot             // queue for a slot, then ask again
	leaveKey                // leave the key to other processes, unless a caller has joined
)

// A view is what decide knows beside the reply.
type view struct {
	wanted   bool // a caller waits
	servable bool // the value found can end the fill
}

// decide returns the step that follows from a reply. It has no effects: it sends nothing, locks
// nothing and reads no clock.
func decide(r filllock.Reply, v view) step {
	switch r.Status {
	case filllock.Hit:
		if v.servable {
			return takeValue
		}
		return askAgain
	case filllock.Locked:
		return takeLock
	case filllock.Failed:
		return takeFailure
	case filllock.Refused:
		return retryNew
	case filllock.Gone:
		if v.wanted {
			return askAgain // as a load
		}
	case filllock.Busy:
		if v.wanted {
			return waitForLock
		}
	case filllock.Free:
		if v.wanted {
			return waitForSlot
		}
	}
	return leaveKey
}

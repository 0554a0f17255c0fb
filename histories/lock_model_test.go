package histories

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"
)

// The ops of a lock's history.
const (
	opAcquire    = "Acquire"
	opTryAcquire = "TryAcquire"
	opRelease    = "Release" // of an acquire
)

// Marks of an acquire.
const (
	markArrived = "arrived" // its first command was answered
	// Though it does not wait, it repeated its command, perhaps since that was not answered.
	markAgain   = "again"
	markLeaving = "leaving" // its context is about to be cancelled
	markRenewed = "renewed" // when the last renewal was sent that the server granted
	markRenewal = "renewal" // when that renewal can have begun at the earliest
)

// A step is what may happen to a lock on the server, at one instant.
type step struct {
	do    string
	who   rune // which acquire
	fence int64
	// may is set if the lease may have been lost by now; or, with a queue, if the waiter may have
	// been taken for dead.
	may bool
}

// The kinds of steps.
const (
	stepArrive  = "arrives"          // joins the queue
	stepGrant   = "is granted"       // after it waited
	stepTry     = "is granted now"   // without waiting
	stepBusy    = "finds it busy"    // held, or with waiters
	stepRelease = "gives it back"    // after holding it to the end
	stepLost    = "has lost it"      // the holder knows; Redis may keep the lease longer
	stepEnd     = "holds it no more" // for any reason
	stepLeave   = "leaves"           // leaves the queue
)

// A lockState has the holders of a lock and its waiters, each a string of acquires.
type lockState struct {
	holders string // sorted
	queue   string
	fence   int64 // of the last grant
}

// lockModel returns the model of a semaphore; a mutex is one of size 1. With fair it has a queue.
func lockModel(size int, fair bool) porcupine.Model {
	return porcupine.Model{
		Init: func() any { return lockState{} },
		Step: func(state, in, _ any) (bool, any) {
			s, x := state.(lockState), in.(step)
			holds, waits := strings.ContainsRune(s.holders, x.who), strings.ContainsRune(s.queue, x.who)
			free := len([]rune(s.holders)) < size
			switch x.do {
			case stepArrive:
				s.queue += string(x.who)
				return true, s
			case stepGrant:
				inTurn := !fair || strings.HasPrefix(s.queue, string(x.who)) || x.may && !waits
				ok := free && inTurn && x.fence > s.fence
				s.queue = without(s.queue, x.who)
				s.holders, s.fence = with(s.holders, x.who), x.fence
				return ok, s
			case stepTry:
				ok := free && s.queue == "" && x.fence > s.fence
				s.holders, s.fence = with(s.holders, x.who), x.fence
				return ok, s
			case stepBusy:
				return !free || s.queue != "", s
			case stepRelease:
				s.holders = without(s.holders, x.who)
				return holds, s
			case stepLost:
				return x.may, s
			case stepEnd:
				s.holders = without(s.holders, x.who)
				return holds, s
			case stepLeave:
				s.queue = without(s.queue, x.who)
				return waits || x.may, s
			}
			panic("unknown step " + x.do)
		},
		DescribeOperation: func(in, _ any) string {
			x := in.(step)
			if x.fence != 0 {
				return fmt.Sprintf("%c %s (%d)", x.who, x.do, x.fence)
			}
			return fmt.Sprintf("%c %s", x.who, x.do)
		},
		DescribeState: func(state any) string {
			s := state.(lockState)
			return fmt.Sprintf("held by [%s], waiting [%s], fence %d", s.holders, s.queue, s.fence)
		},
	}
}

func with(set string, who rune) string {
	runes := append([]rune(set), who)
	slices.Sort(runes)
	return string(runes)
}

func without(set string, who rune) string {
	i := strings.IndexRune(set, who)
	if i < 0 {
		return set
	}
	return set[:i] + set[i+len(string(who)):]
}

// ttls are the times after which the server takes a holder or a waiter for dead.
type ttls struct{ Lease, Waiter time.Duration }

// clockSlack is how much a TTL may differ by rounding to milliseconds, in the process and on the
// server.
const clockSlack = 3 * time.Millisecond

// server returns how soon the server may end a lease after the command that took or renewed it was
// sent.
func (l ttls) server() int64 { return int64(l.Lease - clockSlack) }

// holder returns how soon the holder may give up a lease after it began to ask for it, which it
// does a twentieth early.
func (l ttls) holder() int64 { return int64(l.Lease - l.Lease/20 - clockSlack) }

// silent returns how soon a waiter may be taken for dead after it came, and so may an acquire that
// does not know of its grant.
func (l ttls) silent() int64 { return int64(min(l.Waiter, l.Lease) - clockSlack) }

// asSteps returns the steps that must or may have happened on the server, so that ops ended as they
// did.
func asSteps(ops []op, fair bool, l ttls) (out []porcupine.Operation) {
	type key [2]int
	releases := make(map[key]op)
	unknown := int64(never) // since when there may be a holder or a waiter that no process knows of
	for _, o := range ops {
		switch {
		case o.Name == opRelease:
			releases[key{o.Process, o.Of}] = o
		case o.Result != resultOK && o.Result != resultBusy, o.Marks[markAgain] != 0, o.Begin+min(l.silent(), l.holder()) < o.End:
			// The last case: a lease was granted, but the reply came so late that the process asked again.
			unknown = min(unknown, o.Begin)
		}
	}
	for i, o := range ops {
		if o.Name == opRelease {
			continue
		}
		who := rune('A' + i)
		add := func(do string, begin, end int64, fence int64, may bool) {
			out = append(out, porcupine.Operation{
				ClientId: o.Process, Input: step{do, who, fence, may}, Call: begin, Return: end, Metadata: o.String(),
			})
		}
		waited := int64(never) // since when it may have lost its position in the queue
		if fair && o.Name == opAcquire && o.Marks[markArrived] != 0 {
			add(stepArrive, o.Begin, o.Marks[markArrived], 0, false)
			waited = o.Begin + l.silent()
		}
		switch {
		case o.Result == resultOK:
			loose := waited < o.End
			if loose {
				add(stepLeave, waited, o.End, 0, true)
			}
			do := stepGrant
			if o.Name == opTryAcquire {
				do = stepTry
			}
			add(do, o.Begin, o.End, o.Value, loose)
		case o.Result == resultBusy:
			if o.End < unknown {
				add(stepBusy, o.Begin, o.End, 0, false)
			}
			continue
		default: // it holds nothing, or what it holds only keeps others out
			if waited != never {
				since := waited
				if at := o.Marks[markLeaving]; at != 0 {
					since = min(since, at)
				} else if o.Result != "" {
					since = o.Begin // it failed, and may have left at any time
				}
				add(stepLeave, since, never, 0, false)
			}
			continue
		}

		r, released := releases[key{o.Process, o.ID}]
		if released && r.Result == resultOK {
			add(stepRelease, r.Begin, r.End, 0, false)
			continue
		}
		end := max(o.Begin, o.Marks[markRenewed]) + l.server()
		renewal := max(o.Begin, cmp.Or(o.Marks[markRenewal], o.Marks[markRenewed]))
		if released && r.Result == resultLost {
			add(stepLost, r.Begin, r.End, 0, renewal+l.holder() <= r.End)
		} else if released {
			end = min(end, r.Begin)
		}
		if !released || r.Result == resultLost { // the holder may have lost it, and abandoned it
			end = min(end, renewal+l.server())
		}
		add(stepEnd, end, never, 0, false)
	}
	return out
}

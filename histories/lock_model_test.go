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
	// Though it does not wait, it repeated its command, perhaps since that was not answered.
	markAgain   = "again"
	markRenewed = "renewed" // when the last renewal was sent that the server granted
	markRenewal = "renewal" // when that renewal can have begun at the earliest
)

// A step is what may happen to a lock on the server, at one instant.
type step struct {
	do    string
	who   rune // which acquire
	fence int64
	may   bool // the lease may have been lost by now
}

// The kinds of steps.
const (
	stepGrant   = "is granted"
	stepBusy    = "finds it busy"
	stepRelease = "gives it back"    // after holding it to the end
	stepLost    = "has lost it"      // the holder knows; Redis may keep the lease longer
	stepEnd     = "holds it no more" // for any reason
)

// A lockState has the holders of a lock, a string of acquires.
type lockState struct {
	holders string // sorted
	fence   int64  // of the last grant
}

// lockModel returns the model of a semaphore; a mutex is one of size 1.
func lockModel(size int) porcupine.Model {
	return porcupine.Model{
		Init: func() any { return lockState{} },
		Step: func(state, in, _ any) (bool, any) {
			s, x := state.(lockState), in.(step)
			holds, free := strings.ContainsRune(s.holders, x.who), len([]rune(s.holders)) < size
			switch x.do {
			case stepGrant:
				ok := free && x.fence > s.fence
				s.holders, s.fence = with(s.holders, x.who), x.fence
				return ok, s
			case stepBusy:
				return !free, s
			case stepRelease, stepEnd:
				s.holders = strings.ReplaceAll(s.holders, string(x.who), "")
				return holds, s
			case stepLost:
				return x.may, s
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
			return fmt.Sprintf("held by [%s], fence %d", s.holders, s.fence)
		},
	}
}

func with(set string, who rune) string {
	runes := append([]rune(set), who)
	slices.Sort(runes)
	return string(runes)
}

// clockSlack is how much a TTL may differ by rounding to milliseconds, in the process and on the
// server.
const clockSlack = 3 * time.Millisecond

// asSteps returns the steps that must or may have happened on the server, so that ops ended as they
// did. It does not judge whether a try was right to find the lock busy while others waited: a free place may have been
// reserved for a waiter, or waiters queued for it.
func asSteps(ops []op, ttl time.Duration) (out []porcupine.Operation) {
	server := int64(ttl - clockSlack)          // how soon the server may end a lease after it was sent the command
	holder := int64(ttl - ttl/20 - clockSlack) // how soon the holder may give it up after it began to ask for it
	type key [2]int
	releases := make(map[key]op)
	unknown := int64(never) // since when there may be a holder that no process knows of
	for _, o := range ops {
		switch {
		case o.Name == opRelease:
			releases[key{o.Process, o.Of}] = o
		case o.Result != resultOK && o.Result != resultBusy, o.Marks[markAgain] != 0, o.Begin+holder < o.End:
			// The last case: a lease was granted, but the reply came so late that the process asked again.
			unknown = min(unknown, o.Begin)
		}
	}
	othersWait := func(o op) bool {
		return slices.ContainsFunc(ops, func(w op) bool { return w.Name == opAcquire && w.Begin < o.End && w.End > o.Begin })
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
		switch {
		case o.Result == resultOK:
			add(stepGrant, o.Begin, o.End, o.Value, false)
		case o.Result == resultBusy && o.End < unknown && !othersWait(o):
			add(stepBusy, o.Begin, o.End, 0, false)
			continue
		default: // it holds nothing, or what it holds only keeps others out
			continue
		}

		r, released := releases[key{o.Process, o.ID}]
		if released && r.Result == resultOK {
			add(stepRelease, r.Begin, r.End, 0, false)
			continue
		}
		end := max(o.Begin, o.Marks[markRenewed]) + server
		renewal := max(o.Begin, cmp.Or(o.Marks[markRenewal], o.Marks[markRenewed]))
		if released && r.Result == resultLost {
			add(stepLost, r.Begin, r.End, 0, renewal+holder <= r.End)
		} else if released {
			end = min(end, r.Begin)
		}
		if !released || r.Result == resultLost { // the holder may have lost it, and abandoned it
			end = min(end, renewal+server)
		}
		add(stepEnd, end, never, 0, false)
	}
	return out
}

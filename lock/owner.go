package lock

import (
	"time"

	"github.com/singlefill/singlefill/internal/client"
)

// A target is the lock that commands are about, and how they are sent.
type target struct {
	name   string
	kind   kind
	keys   keys
	client *client.Client
	opts   Options
}

// margin returns how long before its end a holder gives up a lease, so that its context ends before
// another caller can hold it: a twentieth of the TTL, but at least what rounding to milliseconds
// can make of it.
func (t *target) margin() time.Duration { return max(t.opts.TTL/20, 2*time.Millisecond) }

// reservationLife returns for how many ms a reservation outlasts the lease of the holder. A release
// shortens it; a waiter that listens does not ask often enough to prolong a short one. See
// TestWakeUp_Reservation.
//
// A mutex and a semaphore have a reservation, which looks like a queue of one. A waiter asks less
// often the longer it waits; a loop that takes the lock again at once would always be quicker. A
// line that has seen two grants to other processes reserves the next one, and then asks often. A
// real queue would make each hand-over wait for one process. See TestAcquire_IsNotStarvedByALoop
// and TestWakeUp_Reservation.
func (t *target) reservationLife() int64 { return (t.opts.RedisTimeout + 2*maxPause).Milliseconds() }

// An owner is one call of Acquire as the server knows it: by a token that is never used again, so
// that its commands cannot affect the lease of another owner. Each command may arrive twice; the
// second one changes nothing.
type owner struct {
	*target
	token string

	// inTransit tells that a command to acquire was not answered and may still arrive. It does not change
	// once a lease is held.
	inTransit bool
}

// tokenLen is the length of what is random in a token. The name of the holder follows.
const tokenLen = 26

// holderOf returns the name of the holder that has the token, "" for one without a name.
func holderOf(token string) string { return token[min(tokenLen, len(token)):] }

const (
	// fenceLife is how long the last fence is kept. It covers a server's clock that is put back by
	// less than that.
	fenceLife = 24 * time.Hour

	// maxMarks bounds the marks of ended attempts that a name has: those that end in the second half
	// of the life of a new mark, which is a different half for each of the two lives of marks.
	maxMarks = 500

	// maxMarkLife bounds how long a mark lives, apart from the time that a release is retried. A
	// command that arrives later may acquire the lock, which is free again after TTL.
	maxMarkLife = time.Minute
)

// markLife returns how long the mark of the ended attempt lives: a release is retried for
// RedisTimeout and then for TTL. A mark lives twice as long if a command to acquire may still
// arrive. Then neither can push out the other: the marks of releases, and the marks of such
// attempts.
//
// Release and giving up write a mark. A command to acquire that is still in transit would otherwise
// be granted without a caller. The marks of a name are one sorted set of at most 500, ordered by
// the time at which they are forgotten. Marks of attempts with an unanswered command live twice as
// long, so they go last. See TestScripts_RandomSteps and TestRelease_MarksAreBounded.
func (o *owner) markLife() time.Duration {
	life := min(o.opts.TTL, maxMarkLife) + 2*o.opts.RedisTimeout
	if o.inTransit {
		life *= 2
	}
	return life
}

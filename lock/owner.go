package lock

import (
	"strings"
	"time"

	"github.com/singlefill/singlefill/internal/client"
)

// An owner is one call of Acquire as the server knows it: by a token that is never used again, so
// that its commands cannot affect the lease of another owner. Each command may arrive twice; the
// second one changes nothing.
type owner struct {
	*Locker
	token string

	// inTransit tells that a command to acquire was not answered and may still arrive. It does not change
	// once a lease is held.
	inTransit bool
}

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
// arrive. Releases cannot push out such marks then, nor can they push out those of releases.
func (o *owner) markLife() time.Duration {
	life := min(o.opts.TTL, maxMarkLife) + 2*o.opts.RedisTimeout
	if o.inTransit {
		life *= 2
	}
	return life
}

// keys are the Redis keys of one name, all in one slot. The keys of two names never meet: no key of
// a cache begins with a brace, and no two keys of a lock have the same ending.
type keys struct {
	lock, fence, ended, reservation, waiting, queue, alive, details string
}

func keysOf(name string) keys { return keysAt("{" + client.HashTag(name) + "}:lock") }

// keysAt returns the keys that begin with lock, which has a hash tag. They are parts of one string,
// since some programs make a Locker for each lease.
func keysAt(lock string) keys {
	endings := [...]string{"", ":fence", ":ended", ":next", ":waiting", ":queue", ":alive", ":details"}
	rest := strings.Join(endings[:], lock)
	k := [len(endings)]string{lock}
	for i, ending := range endings[1:] {
		n := len(lock) + len(ending)
		k[1+i], rest = rest[:n], rest[n:]
	}
	return keys{
		lock: k[0], fence: k[1], ended: k[2], reservation: k[3], waiting: k[4],
		queue: k[5], alive: k[6], details: k[7],
	}
}

func (k keys) names() []string {
	return []string{k.lock, k.fence, k.ended, k.reservation, k.waiting, k.queue, k.alive, k.details}
}

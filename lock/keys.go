package lock

import (
	"strings"

	"github.com/singlefill/singlefill/internal/client"
)

// keys are the Redis keys of one name, all in one slot. The keys of two names never meet: no key of
// a cache begins with a brace, and no two keys of a lock have the same ending.
//
// The fence of a mutex has another key than the token, kept for a day. The fence begins at the
// clock of the server: it must grow with each grant, also after Redis has lost it. While there is a
// holder, it has the last fence. So a name that is used once costs some 200 bytes for a day, also
// if nothing looks at its fences. A shorter life would give smaller fences: without the key the
// next one is the clock, and the key is all that tells a clock that was put back to before the last
// grant. See TestScripts_RepeatedAndLate and TestScripts_RandomSteps.
//
// The holder's name is the end of its token, and the token stands behind the fence until it is given
// back. So the scripts compare one text, a busy answer has the name without another command, and a
// grant sees that the lease before it ended without a release although the key of that lease is gone.
// A semaphore needs no such note: its set still has the ended leases, for a minute after the last one.
// Waiters and marks have the name, too: 64 bytes at most. See TestOptions_Holder and
// TestTrace_Expired.
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

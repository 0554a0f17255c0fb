package lock

import (
	"strings"

	"github.com/singlefill/singlefill/internal/client"
)

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

package lock

import (
	"crypto/rand"
	"runtime"
	"sync"
	"weak"
)

// A shared is what the Lockers of this process have in common that stand for the same lock. It lives
// as long as one of them.
//
// Programs make a Locker for each request; each would ask by itself, and subscribe to another
// channel. Lockers find what they share through weak pointers. A count of the waiters would do, but
// the waitQueue would end with the last of them: the next wait for a busy lock would subscribe again.
// Lockers with other options ask separately, since one waiter says its options for all. See
// TestShared_ManyLockers and TestShared_Forgotten.
type shared struct {
	waiters waitQueue
	cleanup cleanupQueue
}

// A sharedKey has what such Lockers agree in: everything that a waiter may say or do for another one.
type sharedKey struct {
	client any    // see client.Client.Shared
	lock   string // the key in Redis
	kind   kind
	opts   Options
}

// sharedBy finds a shared that is in use. The map keeps neither it nor its client alive.
var sharedBy = struct {
	mu sync.Mutex                         // no other one is taken with it
	of map[sharedKey]weak.Pointer[shared] // protected by mu
}{of: make(map[sharedKey]weak.Pointer[shared])}

// sharedOf returns what the Locker of a target shares.
func sharedOf(t *target) *shared {
	key := sharedKey{t.client.Shared(), t.keys.lock, t.kind, t.opts}
	key.opts.MaxHold, key.opts.Trace, key.opts.Holder = 0, nil, "" // which is nothing to other waiters
	sharedBy.mu.Lock()
	defer sharedBy.mu.Unlock()
	if known := sharedBy.of[key].Value(); known != nil {
		return known
	}
	s := new(shared)
	s.waiters.id = rand.Text()[:idLen]
	sharedBy.of[key] = weak.Make(s)
	runtime.AddCleanup(s, forgetShared, key)
	return s
}

func forgetShared(key sharedKey) {
	sharedBy.mu.Lock()
	defer sharedBy.mu.Unlock()
	if sharedBy.of[key].Value() == nil { // and not one created since
		delete(sharedBy.of, key)
	}
}

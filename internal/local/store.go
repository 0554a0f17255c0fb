package local

import (
	"hash/maphash"
	"math"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// A store is what a server would have in memory.
type store struct {
	prefix string // of values
	size   int

	mu      sync.Mutex
	values  map[string]*item // the keys that may be evicted
	rest    map[string]*item
	uses    uint64        // of items, which sorts them by their last use
	changes uint64        // of keys
	changed [slots]uint64 // the last change of a key in each slot, as a number of changes
	sweeper *time.Timer   // nil: there is nothing to free
	closed  bool
}

// An item is what a key holds: a text, unless it has fields or members.
type item struct {
	text    string
	fields  map[string]string
	members sorted
	end     time.Time // zero: none
	used    uint64
}

// never is a number of changes that no store reaches.
const never uint64 = math.MaxUint64

func newStore(prefix string, size int) *store {
	return &store{prefix: prefix, size: max(1, size), values: make(map[string]*item), rest: make(map[string]*item)}
}

// now returns the number of changes so far.
func (s *store) now() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changes
}

// do executes a command.
func (s *store) do(args []string) any {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.run(args)
}

// doAll executes commands in one step, unless they are a transaction that began at a number of changes, and one of
// its slots has changed since.
func (s *store) doAll(all [][]string, since uint64) []any {
	s.mu.Lock()
	defer s.mu.Unlock()
	replies := make([]any, len(all))
	fails := all[0][0] == "multi" && s.changedSince(all, since)
	for i, args := range all {
		if replies[i] = error(redis.TxFailedErr); !fails {
			replies[i] = s.run(args)
		}
	}
	return replies
}

// changedSince looks for keys that have ended, too, which is a change.
func (s *store) changedSince(all [][]string, since uint64) bool {
	for _, args := range all {
		if len(args) > 1 {
			s.find(args[1])
			if s.changed[slot(args[1])] > since {
				return true
			}
		}
	}
	return false
}

// slots is how many slots there are. A transaction disturbs others of its slot only.
const slots = 1024

var seed = maphash.MakeSeed()

// slot returns the slot of a key: keys that a Cluster has in one slot share it, and others may.
func slot(key string) int {
	if _, tag, ok := strings.Cut(key, "{"); ok {
		if tag, _, ok = strings.Cut(tag, "}"); ok && tag != "" {
			key = tag
		}
	}
	return int(maphash.String(seed, key) % slots)
}

// table returns the keys among which a key belongs.
func (s *store) table(key string) map[string]*item {
	if s.isValue(key) {
		return s.values
	}
	return s.rest
}

// isValue reports whether a key may be evicted, and counts. The keys that prove that SCAN finds keys do not: see
// package revoke.
func (s *store) isValue(key string) bool {
	rest, ok := strings.CutPrefix(key, s.prefix)
	return ok && strings.HasSuffix(rest, "}") && !strings.HasPrefix(rest, "%check:")
}

// find returns what a key holds, or nil.
func (s *store) find(key string) *item {
	it := s.table(key)[key]
	switch {
	case it == nil:
		return nil
	case it.ended():
		s.remove(key)
		return nil
	}
	s.uses++
	it.used = s.uses
	return it
}

func (it *item) ended() bool { return !it.end.IsZero() && !time.Now().Before(it.end) }

// change returns what a key holds, to be changed. If it holds nothing, that is an empty item, for which a value may
// have to go.
func (s *store) change(key string) *item {
	s.touch(key)
	it := s.find(key)
	if it != nil {
		return it
	}
	table := s.table(key)
	for len(s.values) >= s.size && s.isValue(key) {
		s.evict()
	}
	s.uses++
	it = &item{used: s.uses}
	table[key] = it
	if s.sweeper == nil {
		s.sweeper = time.AfterFunc(sweepEvery, s.sweep)
	}
	return it
}

func (s *store) touch(key string) {
	s.changes++
	s.changed[slot(key)] = s.changes
}

func (s *store) remove(key string) {
	s.touch(key)
	delete(s.table(key), key)
}

// evict removes the value that was not used for longest among a few that a map happens to begin with, as Redis
// does.
func (s *store) evict() {
	var oldest string
	var used uint64
	n := 0
	for key, it := range s.values {
		if n == 0 || it.used < used {
			oldest, used = key, it.used
		}
		if n++; n == 8 {
			break
		}
	}
	s.remove(oldest)
}

// sweepEvery is how often items are freed that have ended.
const sweepEvery = time.Minute

// sweep runs while there are items. Commands do not wait for it for long.
func (s *store) sweep() {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, table := range []map[string]*item{s.values, s.rest} {
		for key, it := range table {
			if it.ended() {
				s.remove(key)
			}
			if n++; n%1000 == 0 {
				s.mu.Unlock()
				s.mu.Lock()
			}
		}
	}
	if s.sweeper = nil; !s.closed && len(s.values)+len(s.rest) > 0 {
		s.sweeper = time.AfterFunc(sweepEvery, s.sweep)
	}
}

// close frees everything.
func (s *store) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	clear(s.values)
	clear(s.rest)
	s.values, s.rest = nil, nil
	if s.sweeper != nil {
		s.sweeper.Stop()
	}
}

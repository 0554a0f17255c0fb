package local

import (
	"hash/maphash"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// An index has the keys whose values have a tag. A key comes and goes in one step with its value. So an invalidation,
// which marks the tag in one step with reading the keys, finds each value that has been stored, and the mark refuses
// each that was loaded before but is stored later.
type index struct {
	sequence atomic.Uint64 // of the last mark
	used     atomic.Int64  // tags that have keys
	shards   [16]shard
}

// tagOverhead is about how many bytes a tag takes beside its keys: see Tagging.bytes.
const tagOverhead = 300

// A shard has some of the tags.
type shard struct {
	mu    sync.Mutex
	keys  map[tag]map[string]struct{}
	marks map[tag]mark
	floor uint64 // the last of the marks that have been dropped
}

// A tag is the name of a tag in a namespace. Caches of several may share a Store.
type tag struct{ space, name string }

// A mark says that a tag was invalidated.
type mark struct {
	number uint64
	end    time.Time
}

// A Tagging is the tags of a value that is about to be stored.
type Tagging struct {
	Space string
	Key   string // as callers know it
	Tags  []string
	Since uint64 // the Sequence before the load
}

// Unproved is in place of a Sequence for a value that was not loaded.
const Unproved = math.MaxUint64

// bytes is about how many bytes the index takes for a value.
func (of *Tagging) bytes() (n int64) {
	if of != nil {
		for _, name := range of.Tags {
			n += int64(len(name) + len(of.Key) + 64)
		}
	}
	return n
}

func (x *index) shard(name string) *shard {
	return &x.shards[maphash.String(seed, name)%uint64(len(x.shards))]
}

// Sequence returns the number of the last mark. It is read before a value is loaded.
func (s *Store) Sequence() uint64 { return s.tags.sequence.Load() }

// Tag gives tags to the value that the step is about to set under a key. It returns false if one of the tags has been
// invalidated since the Sequence was read.
func (t *Step) Tag(key string, of Tagging) bool {
	if len(of.Tags) == 0 {
		return true
	}
	var old *Tagging
	if it := t.find(key); it != nil { // otherwise it leaves its tags now, and not later
		old = it.tagged
	}
	held := of // which is allocated, unlike of without tags
	t.tagged = &held
	if x := &t.store.tags; !x.add(t.tagged) {
		x.remove(t.tagged, old)
		t.tagged = nil
	}
	return t.tagged != nil
}

func (x *index) add(of *Tagging) bool {
	for _, name := range of.Tags {
		if !x.join(tag{of.Space, name}, of.Key, of.Since) {
			return false
		}
	}
	return true
}

func (x *index) join(t tag, key string, since uint64) bool {
	sh := x.shard(t.name)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if sh.floor > since || sh.marks[t].number > since {
		return false
	}
	keys := sh.keys[t]
	if keys == nil {
		if keys = make(map[string]struct{}); sh.keys == nil {
			sh.keys = make(map[tag]map[string]struct{})
		}
		sh.keys[t] = keys
		x.used.Add(1)
	}
	keys[key] = struct{}{}
	return true
}

// remove removes a key from its tags, except for those that it has now.
func (x *index) remove(of, now *Tagging) {
	if of == nil {
		return
	}
	for _, name := range of.Tags {
		if now == nil || !slices.Contains(now.Tags, name) {
			x.leave(tag{of.Space, name}, of.Key)
		}
	}
}

func (x *index) leave(t tag, key string) {
	sh := x.shard(t.name)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	keys := sh.keys[t]
	if delete(keys, key); keys != nil && len(keys) == 0 {
		delete(sh.keys, t)
		x.used.Add(-1)
	}
}

// Mark invalidates tags, for values whose load takes less than life, and returns the keys that have one of them.
func (s *Store) Mark(space string, tags []string, life time.Duration) (keys []string) {
	for _, name := range tags {
		sh, t := s.tags.shard(name), tag{space, name}
		sh.mu.Lock()
		for key := range sh.keys[t] {
			keys = append(keys, key)
		}
		if sh.marks == nil {
			sh.marks = make(map[tag]mark)
		}
		sh.marks[t] = mark{s.tags.sequence.Add(1), time.Now().Add(life)}
		sh.mu.Unlock()
	}
	s.sweepLater()
	return keys
}

// EachTag calls do with each tag of a namespace that a value has, and with the number of its keys.
func (s *Store) EachTag(space string, do func(tag string, keys int64)) {
	for i := range s.tags.shards {
		sh := &s.tags.shards[i]
		sizes := make(map[string]int64)
		sh.mu.Lock()
		for t, keys := range sh.keys {
			if t.space == space {
				sizes[t.name] = int64(len(keys))
			}
		}
		sh.mu.Unlock()
		for name, keys := range sizes {
			do(name, keys)
		}
	}
}

// dropMarks drops marks that have ended, and returns how many are left.
func (x *index) dropMarks() (left int) {
	now := time.Now()
	for i := range x.shards {
		sh := &x.shards[i]
		sh.mu.Lock()
		for t, m := range sh.marks {
			if m.end.Before(now) {
				sh.floor = max(sh.floor, m.number)
				delete(sh.marks, t)
			}
		}
		if len(sh.marks) == 0 {
			sh.marks = nil // a map keeps its largest size
		}
		left += len(sh.marks)
		sh.mu.Unlock()
	}
	return left
}

func (x *index) clear() {
	for i := range x.shards {
		sh := &x.shards[i]
		sh.mu.Lock()
		x.used.Add(-int64(len(sh.keys)))
		sh.keys, sh.marks = nil, nil
		sh.mu.Unlock()
	}
}

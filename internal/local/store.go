package local

import (
	"hash/maphash"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// A Store is what a server would have in memory. Its keys are in stripes, each with a lock: keys that a Cluster has in
// one slot share a stripe.
type Store struct {
	// Lost is called in the step in which a value with tags is evicted. DeleteTag will not find it, so memory may not
	// serve a copy of it any more. It must take no lock.
	Lost func(valueKey string)

	prefix string // of values
	most   Limits

	stripes []stripe      // a power of two
	count   atomic.Int64  // of items that may be evicted
	bytes   atomic.Int64  // of all items
	uses    atomic.Uint64 // of items, which sorts them by their last use
	tags    index
	sweeper atomic.Pointer[time.Timer] // nil: there is nothing to free
	closed  atomic.Bool
}

// Limits are how much a Store keeps. What was not used for longest goes first, as a rule: values, and what failed loads
// have left. A lock that is held stays.
type Limits struct {
	Keys  int
	Bytes int64 // 0: any
}

// Overhead is about how many bytes an item takes beside its key and its text.
const Overhead = 256

// A stripe has keys of some slots. No other lock is taken before its lock, and after it only locks of the index.
type stripe struct {
	mu        sync.Mutex
	items     map[string]*item // nil after close
	evictable []*item          // which are drawn from
	most      int              // items since the map was made
	step      Step             // that has the lock
	_         [64]byte         // to the next stripe, which other processors lock
}

// An item is what a key holds.
type item struct {
	key, text string
	end       time.Time // zero: none
	used      uint64
	bytes     int64
	place     int      // among the evictable of its stripe, from 1; 0: it is not one of them
	tagged    *Tagging // nil: it has no tags
}

func newStore(prefix string, most Limits) *Store {
	n := 1
	for n < 64 && n*64 < most.Keys {
		n *= 2
	}
	s := &Store{Lost: func(string) {}, prefix: prefix, most: Limits{max(1, most.Keys), most.Bytes}, stripes: make([]stripe, n)}
	for i := range s.stripes {
		s.stripes[i].items = make(map[string]*item)
	}
	return s
}

var seed = maphash.MakeSeed()

func (s *Store) stripe(key string) *stripe {
	if _, tag, ok := strings.Cut(key, "{"); ok {
		if tag, _, ok = strings.Cut(tag, "}"); ok && tag != "" {
			key = tag
		}
	}
	return &s.stripes[maphash.String(seed, key)&uint64(len(s.stripes)-1)]
}

// A Step reads and writes keys of one slot, in one step.
type Step struct {
	store  *Store
	stripe *stripe
	now    time.Time // a step takes no time, as a script does not
	tagged *Tagging  // of the value that is set
}

// Begin begins a step, which must End.
func (s *Store) Begin(key string) *Step {
	of := s.stripe(key)
	of.mu.Lock()
	of.step = Step{store: s, stripe: of, now: time.Now()}
	return &of.step
}

// End ends a step, and evicts what has no room any more.
func (t *Step) End() {
	s := t.store
	t.stripe.mu.Unlock()
	for s.full() && s.evict() {
	}
}

// find returns what a key holds, or nil.
func (t *Step) find(key string) *item {
	it := t.stripe.items[key]
	switch {
	case it == nil:
		return nil
	case it.ended(t.now):
		t.remove(it)
		return nil
	}
	it.used = t.store.uses.Add(1)
	return it
}

func (it *item) ended(now time.Time) bool { return !it.end.IsZero() && !now.Before(it.end) }

// put has a key hold a text. A text that has no room by itself is evicted at once.
func (t *Step) put(key, text string, end time.Time, of *Tagging) {
	s, it := t.store, t.find(key)
	bytes := int64(len(key)+len(text)+Overhead) + of.bytes()
	if s.most.Bytes > 0 && bytes > s.most.Bytes || s.closed.Load() {
		if it != nil {
			t.remove(it)
		}
		t.lose(key, of)
		s.tags.remove(of, nil)
		return
	}
	if it == nil {
		it = &item{key: key, used: s.uses.Add(1)}
		t.stripe.items[key] = it
		t.stripe.most = max(t.stripe.most, len(t.stripe.items))
		s.sweepLater()
	}
	s.tags.remove(it.tagged, of)
	it.text, it.end, it.tagged = text, end, of
	t.account(it, bytes, s.evictable(key, text))
}

// account notes how many bytes an item takes now, and whether it may be evicted.
func (t *Step) account(it *item, bytes int64, evictable bool) {
	t.store.bytes.Add(bytes - it.bytes)
	it.bytes = bytes
	all := &t.stripe.evictable
	switch last := len(*all) - 1; {
	case evictable && it.place == 0:
		*all = append(*all, it)
		it.place = len(*all)
		t.store.count.Add(1)
	case !evictable && it.place > 0: // the last one takes its place
		(*all)[it.place-1], (*all)[last].place = (*all)[last], it.place
		(*all)[last], it.place = nil, 0
		*all = (*all)[:last]
		t.store.count.Add(-1)
	}
}

// evictable reports whether a key may be evicted, and counts: a value, or the record of a load that has ended. The keys
// that prove that SCAN finds keys do not: see package revoke.
func (s *Store) evictable(key, text string) bool {
	rest, ok := strings.CutPrefix(key, s.prefix)
	if !ok || strings.HasPrefix(rest, "%check:") {
		return false
	}
	return strings.HasSuffix(rest, "}") || strings.HasSuffix(rest, "}:lock") && !strings.HasPrefix(text, "H")
}

// lose calls Lost for a value with tags.
func (t *Step) lose(key string, of *Tagging) {
	if of != nil {
		t.store.Lost(key)
	}
}

func (t *Step) remove(it *item) {
	t.account(it, 0, false)
	delete(t.stripe.items, it.key)
	if len(t.stripe.items) == 0 && t.stripe.most > 1000 { // a map keeps its largest size
		t.stripe.items, t.stripe.evictable, t.stripe.most = make(map[string]*item), nil, 0
	}
	t.store.tags.remove(it.tagged, nil)
}

func (s *Store) full() bool {
	bytes := s.bytes.Load() + tagOverhead*s.tags.used.Load()
	return s.count.Load() > int64(s.most.Keys) || s.most.Bytes > 0 && bytes > s.most.Bytes
}

// evict removes the item that was not used for longest among a few that it draws, as Redis does. It reports whether
// there was one.
func (s *Store) evict() bool {
	const few = 5
	var oldest *item
	var of *stripe
	var used uint64
	for n, first, i := 0, rand.IntN(len(s.stripes)), 0; i < len(s.stripes) && n < few; i++ {
		st := &s.stripes[(first+i)%len(s.stripes)]
		st.mu.Lock()
		if all := st.evictable; len(all) > 0 {
			at, step := rand.IntN(len(all)), max(1, len(all)/few) // none is drawn twice
			for k := range min(few-n, len(all)) {
				if it := all[(at+k*step)%len(all)]; oldest == nil || it.used < used {
					oldest, of, used = it, st, it.used
				}
				n++
			}
		}
		st.mu.Unlock()
	}
	if oldest == nil {
		return false
	}
	t := Step{store: s, stripe: of}
	of.mu.Lock()
	defer of.mu.Unlock()
	if oldest.place > 0 && oldest.used == used && s.full() { // as before
		t.lose(oldest.key, oldest.tagged)
		t.remove(oldest)
	}
	return true
}

// sweepEvery is how often items are freed that have ended.
const sweepEvery = time.Minute

// sweepLater frees such items until there is none left. No goroutine waits: it would keep a bubble of testing/synctest
// from ending.
func (s *Store) sweepLater() {
	if s.sweeper.Load() != nil {
		return
	}
	timer := time.AfterFunc(sweepEvery, s.sweep)
	if !s.sweeper.CompareAndSwap(nil, timer) {
		timer.Stop()
	}
}

// sweep runs while there are items. Commands do not wait for it for long.
func (s *Store) sweep() {
	s.sweeper.Store(nil) // an item that comes from now on may not be seen
	left := 0
	for i := range s.stripes {
		t, n := Step{store: s, stripe: &s.stripes[i], now: time.Now()}, 0
		t.stripe.mu.Lock()
		for _, it := range t.stripe.items {
			if it.ended(t.now) {
				t.remove(it)
			}
			if n++; n%1000 == 0 {
				t.stripe.mu.Unlock()
				t.stripe.mu.Lock()
			}
		}
		left += len(t.stripe.items)
		t.stripe.mu.Unlock()
	}
	left += s.tags.dropMarks()
	if !s.closed.Load() && left > 0 {
		s.sweepLater()
	}
}

// close frees everything.
func (s *Store) close() {
	s.closed.Store(true)
	for i := range s.stripes {
		st := &s.stripes[i]
		st.mu.Lock()
		for _, it := range st.evictable { // a sweep or an eviction may have seen it
			it.place = 0
		}
		st.items, st.evictable = nil, nil
		st.mu.Unlock()
	}
	s.tags.clear()
	if timer := s.sweeper.Load(); timer != nil {
		timer.Stop()
	}
}

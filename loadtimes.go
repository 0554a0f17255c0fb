package singlefill

import (
	"hash/maphash"
	"slices"
	"sync"
	"time"
)

// An estimate is when a load is likely to end, by how long it has taken: from early to late. The zero estimate
// knows nothing.
type estimate struct{ early, late time.Duration }

// pause returns how long to wait for a load that has taken age so far.
func (e estimate) pause(age time.Duration) time.Duration {
	if age < 0 { // the server's clock has been set back
		return maxPause
	}
	return max((e.early-age)/2, (e.late-e.early)/12, (age-e.late)/5)
}

// A history is how long the last loads have taken. The zero history has seen none.
type history struct {
	last [8]time.Duration
	n    int // all that it has seen
}

func (h history) add(took time.Duration) history {
	h.last[h.n%len(h.last)] = took
	h.n++
	return h
}

// estimate expects what the last loads have been like: their range, or when they are five or more their first
// quasi-range (Mosteller, "On Some Useful 'Inefficient' Statistics", 1946), which leaves out the shortest and the
// longest, and a quarter of it before and after, since the next load may be beyond all of them. So one load that is
// like no other is soon forgotten if it was among the first and does no harm later, while a change of all loads is
// noticed with the second one. If they are too different, it expects nothing.
func (h history) estimate() estimate {
	times := h.last[:min(h.n, len(h.last))]
	slices.Sort(times)
	if len(times) >= 5 {
		times = times[1 : len(times)-1]
	}
	if len(times) == 0 || times[len(times)-1]/3 > times[0] {
		return estimate{}
	}
	shortest, longest := times[0], times[len(times)-1]
	beyond := (longest - shortest) / 4
	return estimate{shortest - beyond, longest + beyond}
}

// A loadTimes is what a process has seen of the time that loads take: those of each of its last keys, and all.
type loadTimes struct {
	mu   sync.Mutex
	keys map[uint64]history // by hash of the key
	all  history
	seed maphash.Seed
}

const remembered = 1000 // keys

func newLoadTimes() *loadTimes {
	return &loadTimes{keys: make(map[uint64]history), seed: maphash.MakeSeed()}
}

// note remembers how long a load has taken; 0: it was none.
func (m *loadTimes) note(key string, took time.Duration) {
	if took == 0 {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	hash := maphash.String(m.seed, key)
	if _, known := m.keys[hash]; !known && len(m.keys) == remembered {
		for some := range m.keys {
			delete(m.keys, some)
			break
		}
	}
	m.keys[hash], m.all = m.keys[hash].add(took), m.all.add(took)
}

// estimate returns what is to be expected of a load of key. before is how long the one took that made the entry
// which is there, 0 if that is not known.
func (m *loadTimes) estimate(key string, before time.Duration) estimate {
	m.mu.Lock()
	defer m.mu.Unlock()
	if h := m.keys[maphash.String(m.seed, key)]; h.n > 0 {
		return h.estimate()
	}
	if before > 0 {
		return estimate{before, before}
	}
	return m.all.estimate()
}

package singlefill

import (
	"hash/maphash"
	"sync"
	"time"
)

// An estimate is a running mean of load times and of how far they are from it, as TCP estimates round trips
// (RFC 6298), but that the first one counts as it is. The zero estimate knows nothing.
type estimate struct{ mean, deviation time.Duration }

func (e estimate) add(d time.Duration) estimate {
	if e.mean == 0 {
		return estimate{mean: d}
	}
	off := d - e.mean
	return estimate{e.mean + off/8, e.deviation + (max(off, -off)-e.deviation)/4}
}

// known reports whether an estimate is one to go by.
func (e estimate) known() bool { return e.mean > 0 && e.deviation <= e.mean/4 }

// pause returns how long to wait for a load that has taken age so far.
func (e estimate) pause(age time.Duration) time.Duration {
	if !e.known() {
		e = estimate{}
	}
	switch early, late := e.mean-2*e.deviation, e.mean+2*e.deviation; {
	case age < 0: // the server's clock has been set back
		return maxPause
	case age < early:
		return e.deviation/3 + (early-age)/2
	case age < late:
		return e.deviation / 3
	default:
		return e.deviation/3 + (age-late)/5
	}
}

// A memory is what a process has seen of the time that loads take: those of each of its last keys, and all.
type memory struct {
	mu   sync.Mutex
	keys map[uint64]estimate // by hash of the key
	all  estimate
	seed maphash.Seed
}

const remembered = 1000 // keys

func newMemory() *memory { return &memory{keys: make(map[uint64]estimate), seed: maphash.MakeSeed()} }

// note remembers how long a load has taken; 0: it was none.
func (m *memory) note(key string, took time.Duration) {
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
func (m *memory) estimate(key string, before time.Duration) estimate {
	m.mu.Lock()
	defer m.mu.Unlock()
	if e := m.keys[maphash.String(m.seed, key)]; e.mean > 0 {
		return e
	}
	if before > 0 {
		return estimate{mean: before}
	}
	return m.all
}

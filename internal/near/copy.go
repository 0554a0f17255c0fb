package near

import (
	"sync/atomic"
	"time"
)

// A Copy is an entry in memory. Its times are the times of the entry, by the clock of the Tier. Once it is kept, only
// RefreshAt changes.
type Copy struct {
	End        time.Duration // kept until then, for times in which neither Redis nor the source answers
	StaleEnd   time.Duration // served until then
	Written    time.Duration
	WrittenAt  int64 // of the entry, as in Redis: Unix time in ms
	FreshUntil int64
	ID         uint64 // of the entry
	number     uint64 // of the value's generation
	stripe     uint32 // of the key
	Bytes      uint32 // of the entry, at least

	// A hit reads what follows, and the value right behind it. All that is in one line of memory, which begins here, if
	// the value has up to 24 bytes: Go puts objects of 128 bytes at multiples of 128.

	checked   atomic.Uint64 // the stripe still had this generation when there were so many changes
	FreshEnd  time.Duration // fresh until then, and served
	RefreshAt atomic.Int64  // when a hit next refreshes the entry
	Value     any           // a pointer; nil: there is none
}

// current reports whether the key has not been invalidated since the value's generation was taken. As
// long as no generation changes, it does not read the stripe, which is in another line of memory for
// each key.
func (t *Tier) current(c *Copy) bool {
	changes := t.changes.Load() // before the stripe, which is changed before it
	if c.checked.Load() == changes {
		return true
	}
	if t.stripe(c.stripe).Load() != c.number {
		return false
	}
	c.checked.Store(changes)
	return true
}

package local

import (
	"sync"
	"sync/atomic"
)

// A turn belongs to one Tx at a time, from its WATCH to its EXEC or UNWATCH. So EXEC knows whose WATCH it is about,
// which go-redis does not tell; and of many transactions at once that watch one key, not all but one fail.
type turn struct {
	mu    sync.Mutex    // locked while the turn belongs to a Tx
	owner atomic.Uint64 // number of that Tx; 0: none
	last  uint64        // number that was given; protected by mu
	since uint64        // changes of the store at the WATCH; protected by mu
}

// begin waits until the turn belongs to a new Tx. It returns the number of the Tx. No Tx takes long, as all that it
// does is commands that return at once. None may begin within another one: they may need the same turn.
func (t *turn) begin(changes func() uint64) (number uint64) {
	t.mu.Lock()
	t.last++
	t.owner.Store(t.last)
	t.since = changes()
	return t.last
}

// end ends the turn of a Tx, if it has not ended.
func (t *turn) end(number uint64) {
	if number != 0 && t.owner.CompareAndSwap(number, 0) {
		t.mu.Unlock()
	}
}

package flight

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/redistest"
)

// A burst of keys leaves maps that take as little memory as those of a few.
func TestMaps_Shrink(t *testing.T) { // not parallel, since it measures memory
	const keys = 100_000
	reads, fills := NewReads[int, *Turn[int]](), NewFills[int](new(Clock))
	var turns []*Turn[int]
	for i := range keys {
		turns = append(turns, &Turn[int]{Key: fmt.Sprint(i)})
	}
	first, others := turns[:keys/2], turns[keys/2:]
	reads.Arrive(first)
	reads.Arrive(others)
	var begun []*Fill[int]
	fills.mu.Lock()
	for _, turn := range turns {
		begun = append(begun, fills.add(&Fill[int]{Key: turn.Key, Refresh: true}))
		fills.rest(begun[len(begun)-1], time.Millisecond)
	}
	fills.mu.Unlock()
	reads.End(first)
	reads.End(others)
	fills.mu.Lock()
	for _, f := range begun {
		fills.forget(f)
	}
	fills.mu.Unlock()
	for resting := keys; resting > 0; time.Sleep(time.Millisecond) {
		fills.mu.Lock()
		resting = len(fills.resting)
		fills.mu.Unlock()
	}
	turns, first, others, begun = nil, nil, nil, nil
	kept := redistest.Heap() // which has the runtime's memory of 100,000 timers that ended at once, too
	runtime.KeepAlive(reads)
	runtime.KeepAlive(fills)
	if reads, fills = nil, nil; kept-redistest.Heap() > 100<<10 {
		t.Errorf("the maps keep %d KiB", (kept-redistest.Heap())>>10)
	}
}

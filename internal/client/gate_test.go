package client

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
)

// A command that gives up when it has been admitted leaves its place to the next one.
func TestGate_GivesUpItsPlace(t *testing.T) {
	t.Parallel()
	g := gate{size: 1}
	g.tryEnter()
	first, next := g.enqueue(parcel{}), g.enqueue(parcel{})
	g.leave(true)
	if !over(first.admitted) || over(next.admitted) {
		t.Error("they are not admitted in order")
	}
	g.giveUp(first)
	if !over(next.admitted) {
		t.Error("the place is lost")
	}
}

// A gate admits no more than its size, and forgets no command, however they come, give up and
// leave.
func TestGate_Crowd(t *testing.T) {
	t.Parallel()
	const size = 3
	g := gate{size: size}
	var inside, most atomic.Int64
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			for j := range 500 {
				if !g.tryEnter() {
					p := g.enqueue(parcel{})
					if (i+j)%3 == 0 {
						g.giveUp(p)
						continue
					}
					<-p.admitted
				}
				for n := inside.Add(1); n > most.Load(); {
					most.Store(n)
				}
				runtime.Gosched()
				inside.Add(-1)
				g.leave(true)
			}
		})
	}
	wg.Wait()
	if most.Load() > size || g.state.Load() != 0 || g.queue.Len() != 0 {
		t.Errorf("%d were inside at a time, want %d at most; in the end the state is %#x, %d wait",
			most.Load(), size, g.state.Load(), g.queue.Len())
	}
}

package client

import (
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
)

// A gate admits commands in the order of their arrival.
func TestGate_Order(t *testing.T) {
	t.Parallel()
	g := gate{size: 2}
	for i := range 3 {
		if entered := g.tryEnter(); entered != (i < 2) {
			t.Fatalf("command %d at a gate of two: %t", i, entered)
		}
	}
	var line []*waiter
	for range 4 {
		line = append(line, g.enqueue(parcel{}))
	}
	open := func() (open []bool) {
		for _, p := range line {
			select {
			case <-p.admitted:
				open = append(open, true)
			default:
				open = append(open, false)
			}
		}
		return open
	}
	g.leave(true)
	if got := open(); !slices.Equal(got, []bool{true, false, false, false}) {
		t.Fatalf("after one has left: %v", got)
	}
	if g.tryEnter() {
		t.Fatal("a newcomer overtakes")
	}
	g.giveUp(line[1]) // while it waits
	g.giveUp(line[0]) // after it was admitted
	if got := open(); !slices.Equal(got, []bool{true, false, true, false}) {
		t.Fatalf("after the first two have given up: %v", got)
	}
	for range 3 {
		g.leave(true)
	}
	if state := g.state.Load(); state != 0 || !open()[3] {
		t.Fatalf("when all have left, the last admitted: %v, the state is %#x", open(), state)
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

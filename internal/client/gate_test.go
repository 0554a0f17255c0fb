package client

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/singlefill/singlefill/internal/line"
)

// A command that gives up when it has been admitted leaves its place to the next one.
func TestGate_GivesUpItsPlace(t *testing.T) {
	t.Parallel()
	g := gate{size: 1}
	g.tryEnter()
	first, next := g.enqueue(parcel{timeout: time.Hour}), g.enqueue(parcel{timeout: time.Hour})
	g.leave(true)
	if !over(first.decided) || over(next.decided) {
		t.Error("they are not admitted in order")
	}
	g.giveUp(first)
	if !over(next.decided) {
		t.Error("the place is lost")
	}
}

// A gate does not give up on a command when the process was held up: an answer may be about to arrive.
func TestGate_HeldUp(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		g := gate{size: 1, line: line.New(nil)}
		g.tryEnter()
		w := g.enqueue(parcel{timeout: timeout})
		begun := time.Now()
		w.begun = begun.Add(-2 * timeout)
		g.mu.Lock()
		g.giveUpOn(1)
		g.mu.Unlock()
		<-w.decided
		if waited := time.Since(begun); !w.stuck || waited != timeout/4 {
			t.Errorf("stuck: %t, %v later, want %v", w.stuck, waited, timeout/4)
		}
	})
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
					p := g.enqueue(parcel{timeout: time.Hour})
					if (i+j)%3 == 0 {
						g.giveUp(p)
						continue
					}
					<-p.decided
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

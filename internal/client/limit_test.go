package client

import (
	"testing"
	"testing/synctest"
	"time"
)

// Commands sent within a sixteenth of the limit share its context.
func TestLimit_Shared(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const d = 16 * time.Second
		var l limit
		within := func(d time.Duration) <-chan struct{} { return l.next(time.Now(), d).ctx.Done() }
		done := func() <-chan struct{} { return within(d) }
		first := done()
		time.Sleep(time.Second - 1)
		if done() != first {
			t.Error("another one within a sixteenth")
		}
		time.Sleep(time.Nanosecond)
		if done() == first {
			t.Error("the same one after a sixteenth")
		}
		shorter := within(time.Second)
		time.Sleep(time.Second)
		synctest.Wait()
		select {
		case <-shorter:
		default:
			t.Error("a command with less time got the limit of another one")
		}
		<-done()
	})
}

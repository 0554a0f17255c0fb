package client

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

type valueKey struct{}

// A limit's context ends in time, has the caller's values, and does not end with the caller.
func TestLimit_Context(t *testing.T) {
	t.Parallel()
	const d = 1600 * time.Millisecond
	synctest.Test(t, func(t *testing.T) {
		var l limit
		var all []context.Context
		for i := range 400 {
			caller, leave := context.WithCancelCause(context.WithValue(t.Context(), valueKey{}, i))
			sent := time.Now()
			var ctx context.Context = commandContext{l.next(sent, d).ctx, caller}
			leave(errors.New("the caller has left"))
			if ctx.Value(valueKey{}) != i || ctx.Err() != nil {
				t.Fatalf("it has value %v and has ended by %v, want %d and not", ctx.Value(valueKey{}), ctx.Err(), i)
			}
			deadline, ok := ctx.Deadline()
			if left := deadline.Sub(sent); !ok || left > d || left < d-d/16 {
				t.Fatalf("it ends in %v, want %v and at most a sixteenth less", left, d)
			}
			all = append(all, ctx)
			time.Sleep(d / 50)
		}
		for _, ctx := range all {
			deadline, _ := ctx.Deadline()
			time.Sleep(time.Until(deadline))
			<-ctx.Done()
			cause := context.Cause(ctx)
			if !errors.Is(ctx.Err(), context.DeadlineExceeded) || cause != context.DeadlineExceeded || time.Now().Before(deadline) {
				t.Fatalf("ended by %v, because %v", ctx.Err(), cause)
			}
		}
	})
}

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

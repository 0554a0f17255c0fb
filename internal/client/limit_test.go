package client

import (
	"context"
	"errors"
	"testing"
	"time"
)

type valueKey struct{}

// A limit's context ends in time, has the caller's values, and does not end with the caller. Commands sent within a
// sixteenth of the time share it, if they have as much time.
func TestLimit(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const d, contexts = 1600 * time.Millisecond, 400
		var l limit
		shared := make(map[<-chan struct{}]int)
		for i := range contexts {
			caller, leave := context.WithCancelCause(context.WithValue(t.Context(), valueKey{}, i))
			sent := time.Now()
			var ctx context.Context = commandContext{l.next(sent, d).ctx, caller}
			leave(errors.New("the caller has left"))
			if ctx.Value(valueKey{}) != i || ctx.Err() != nil {
				t.Fatalf("it has value %v and has ended by %v, want %d and not", ctx.Value(valueKey{}), ctx.Err(), i)
			}
			context.AfterFunc(ctx, func() {
				left := time.Since(sent)
				if cause := context.Cause(ctx); cause != context.DeadlineExceeded || left > d || left < d-d/16 {
					t.Errorf("it has ended after %v by %v, want %v and at most a sixteenth less", left, cause, d)
				}
			})
			shared[ctx.Done()]++
			time.Sleep(d / 64)
		}
		if len(shared) != contexts/4 {
			t.Errorf("%d commands share %d contexts, want four to share one", contexts, len(shared))
		}
		l.next(time.Now(), d)
		if shorter, _ := l.next(time.Now(), d/16).ctx.Deadline(); time.Until(shorter) != d/16 {
			t.Errorf("a command with less time has %v, want %v", time.Until(shorter), d/16)
		}
		time.Sleep(2 * d) // all end
	})
}

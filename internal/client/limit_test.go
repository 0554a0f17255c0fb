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
		var all []context.Context
		shared := make(map[<-chan struct{}]int)
		for i := range contexts {
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

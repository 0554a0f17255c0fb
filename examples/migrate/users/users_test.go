package users

import (
	"context"
	"errors"
	"testing"
)

type forgetter func(ctx context.Context) error

func (f forgetter) User(context.Context, string) (User, error) { return User{}, nil }
func (f forgetter) Forget(ctx context.Context, _ string) error { return f(ctx) }

// Rename asks each cache, whatever the others do and although its caller has gone, and returns the
// errors of all.
func TestRename(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	failed, asked := errors.New("failed"), false
	hangs := forgetter(func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() })
	fails := forgetter(func(context.Context) error { return failed })
	works := forgetter(func(ctx context.Context) error { asked = true; return ctx.Err() })
	err := Rename(ctx, new(DB), "42", "Grace", hangs, fails, works)
	if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, failed) || errors.Is(err, context.Canceled) {
		t.Errorf("Rename = %v, want the deadline of the first cache and the error of the second", err)
	}
	if !asked {
		t.Error("the third cache was not asked")
	}
}

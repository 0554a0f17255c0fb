package client

import (
	"context"
	"sync/atomic"
	"time"
)

// A limit creates contexts that end when a command that is sent now has had its time. A timer for
// each command would be the most expensive part of a hit. So commands that are sent within a
// sixteenth of that time share one context, and the last of them gets a sixteenth less time. See
// TestLimit.
type limit struct {
	latest atomic.Pointer[sharedLimit]
}

type sharedLimit struct {
	ctx   context.Context
	d     time.Duration
	begun time.Time
}

// next returns a limit whose context ends between 15/16 d and d from now.
func (l *limit) next(now time.Time, d time.Duration) *sharedLimit {
	s := l.latest.Load()
	if s == nil || s.d != d || now.Sub(s.begun) >= d/16 {
		ctx, cancel := context.WithTimeout(context.Background(), d)
		context.AfterFunc(ctx, cancel)
		s = &sharedLimit{ctx, d, now}
		l.latest.Store(s)
	}
	return s
}

// A commandContext ends with one context and has the values of another.
type commandContext struct {
	context.Context
	values context.Context
}

// Value hides what package context would use to find the end of the caller's context and its cause.
func (c commandContext) Value(key any) any { return context.WithoutCancel(c.values).Value(key) }

// AfterFunc saves package context a goroutine for each context that is derived from this one.
func (c commandContext) AfterFunc(f func()) (stop func() bool) {
	return context.AfterFunc(c.Context, f)
}

// over reports whether a channel is closed.
func over(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

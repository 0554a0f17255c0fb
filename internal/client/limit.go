package client

import (
	"context"
	"sync/atomic"
	"time"
)

// A limit makes contexts that end when a command sent now has had its time. A timer for each command would be the
// dearest part of a hit, so those that are sent within a sixteenth of that time share one: the last of them gets so
// much less.
type limit struct {
	latest atomic.Pointer[sharedLimit]
}

type sharedLimit struct {
	ctx context.Context
	old time.Time // when another one is due
}

// within returns a context that has the values of ctx, and ends between 15/16 of d and d from now.
func (l *limit) within(ctx context.Context, now time.Time, d time.Duration) context.Context {
	s := l.latest.Load()
	if s == nil || !now.Before(s.old) {
		shared, cancel := context.WithTimeout(context.Background(), d)
		context.AfterFunc(shared, cancel)
		s = &sharedLimit{shared, now.Add(d / 16)}
		l.latest.Store(s)
	}
	return commandContext{s.ctx, ctx}
}

// A commandContext ends with one context and has the values of another.
type commandContext struct {
	context.Context
	values context.Context
}

// Value has to hide what package context looks up to find the end of the caller's context, and its cause.
func (c commandContext) Value(key any) any { return context.WithoutCancel(c.values).Value(key) }

// AfterFunc spares package context a goroutine for each context that is made from this one.
func (c commandContext) AfterFunc(f func()) (stop func() bool) {
	return context.AfterFunc(c.Context, f)
}

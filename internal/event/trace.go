package event

import (
	"context"
	"time"
)

// Trace is what a cache tells its user, in the words of the public Trace: each function may be nil.
type Trace struct {
	Hit, Miss      func(ctx context.Context, key string)
	Stale          func(ctx context.Context, key string, info ValueInfo)
	LoadStart      func(ctx context.Context, key string) context.Context
	LoadDone       func(ctx context.Context, info LoadInfo)
	ShareDone      func(ctx context.Context, info ShareInfo)
	WaitDone       func(ctx context.Context, info WaitInfo)
	AuditDone      func(ctx context.Context, info AuditInfo)
	TagDone        func(ctx context.Context, info TagInfo)
	RedisError     func(ctx context.Context, op string, err error)
	BadValue       func(ctx context.Context, key string, err error)
	NearDropped    func()
	Clearing       func(ctx context.Context, info ClearInfo)
	BreakerChanged func(why error) // nil: it has closed
}

// The structs below have the fields of the public ones, which are described in package singlefill: a user reads
// there. Each but ValueInfo converts to the other.

type ValueInfo struct {
	Stale   bool
	Age     time.Duration
	Expires time.Time
	Err     error
	Entry   uint64 // the ID of the entry; 0: it is in none
}

type LoadInfo struct {
	Key                               string
	Keys                              int
	Duration, Queued                  time.Duration
	Err, StoreErr                     error
	Stored, Fenced, Refresh, Unlocked bool
}

type ShareInfo struct {
	Key      string
	Duration time.Duration
	Load     context.Context
}

type WaitInfo struct {
	Key      string
	Duration time.Duration
	Polls    int
}

type AuditInfo struct {
	Key   string
	Stale bool
	Age   time.Duration
	Near  bool
	Err   error
}

type TagInfo struct {
	Tags             []string
	Expire           bool
	Keys             int
	Rebuilt, Cleared bool
	Err              error
}

type ClearInfo struct {
	Pass                   int
	Scanned, Keys, Removed int64
}

// join returns a Trace that calls the functions of a, and then the functions of b.
func join(a, b *Trace) *Trace {
	t := &Trace{
		Hit:        then(a.Hit, b.Hit),
		Miss:       then(a.Miss, b.Miss),
		Stale:      then2(a.Stale, b.Stale),
		LoadStart:  a.LoadStart,
		LoadDone:   then(a.LoadDone, b.LoadDone),
		ShareDone:  then(a.ShareDone, b.ShareDone),
		WaitDone:   then(a.WaitDone, b.WaitDone),
		AuditDone:  then(a.AuditDone, b.AuditDone),
		TagDone:    then(a.TagDone, b.TagDone),
		RedisError: then2(a.RedisError, b.RedisError),
		BadValue:   then2(a.BadValue, b.BadValue),
		Clearing:   then(a.Clearing, b.Clearing),
	}
	switch {
	case a.LoadStart == nil:
		t.LoadStart = b.LoadStart
	case b.LoadStart != nil:
		t.LoadStart = func(ctx context.Context, key string) context.Context {
			return b.LoadStart(a.LoadStart(ctx, key), key)
		}
	}
	if t.NearDropped = a.NearDropped; a.NearDropped == nil {
		t.NearDropped = b.NearDropped
	} else if b.NearDropped != nil {
		t.NearDropped = func() { a.NearDropped(); b.NearDropped() }
	}
	if t.BreakerChanged = a.BreakerChanged; a.BreakerChanged == nil {
		t.BreakerChanged = b.BreakerChanged
	} else if b.BreakerChanged != nil {
		t.BreakerChanged = func(why error) { a.BreakerChanged(why); b.BreakerChanged(why) }
	}
	return t
}

func then[A any](f, g func(context.Context, A)) func(context.Context, A) {
	switch {
	case f == nil:
		return g
	case g == nil:
		return f
	}
	return func(ctx context.Context, a A) { f(ctx, a); g(ctx, a) }
}

func then2[A, B any](f, g func(context.Context, A, B)) func(context.Context, A, B) {
	switch {
	case f == nil:
		return g
	case g == nil:
		return f
	}
	return func(ctx context.Context, a A, b B) { f(ctx, a, b); g(ctx, a, b) }
}

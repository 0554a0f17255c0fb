package cachetest

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"

	"github.com/singlefill/singlefill"
)

// Log is what a Trace has reported.
type Log struct {
	mu      sync.Mutex
	errors  map[string][]error    // protected by mu: by operation
	breaker []bool                // protected by mu
	loads   []singlefill.LoadInfo // protected by mu
}

func (l *Log) trace() *singlefill.Trace {
	return &singlefill.Trace{
		RedisError: func(_ context.Context, op string, err error) {
			l.mu.Lock()
			defer l.mu.Unlock()
			if l.errors == nil {
				l.errors = make(map[string][]error)
			}
			l.errors[op] = append(l.errors[op], err)
		},
		BreakerChanged: func(open bool) {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.breaker = append(l.breaker, open)
		},
		LoadDone: func(_ context.Context, info singlefill.LoadInfo) {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.loads = append(l.loads, info)
		},
	}
}

// Errors returns what Trace.RedisError has reported, by operation.
func (l *Log) Errors() map[string][]error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return maps.Clone(l.errors)
}

// ErrorCount returns how many errors Trace.RedisError has reported.
func (l *Log) ErrorCount() (n int) {
	for _, errs := range l.Errors() {
		n += len(errs)
	}
	return n
}

// Breaker returns what Trace.BreakerChanged has reported.
func (l *Log) Breaker() []bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.breaker)
}

// Loads returns what Trace.LoadDone has reported.
func (l *Log) Loads() []singlefill.LoadInfo {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.loads)
}

// Events records the calls of a Trace.
type Events struct {
	mu   sync.Mutex
	Seen []string
}

func (e *Events) Add(format string, args ...any) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.Seen = append(e.Seen, fmt.Sprintf(format, args...))
}

// Want compares without regard to the order and forgets.
func (e *Events) Want(t testing.TB, what string, want ...string) {
	t.Helper()
	e.mu.Lock()
	defer e.mu.Unlock()
	slices.Sort(want)
	slices.Sort(e.Seen)
	if !slices.Equal(e.Seen, want) {
		t.Errorf("%s: traced %q, want %q", what, e.Seen, want)
	}
	e.Seen = nil
}

type TraceKey struct{}

func (e *Events) Trace() *singlefill.Trace {
	return &singlefill.Trace{
		Hit:  func(_ context.Context, key string) { e.Add("hit %s", key) },
		Miss: func(_ context.Context, key string) { e.Add("miss %s", key) },
		LoadStart: func(ctx context.Context, key string) context.Context {
			e.Add("start %s", key)
			return context.WithValue(ctx, TraceKey{}, "by LoadStart")
		},
		LoadDone: func(_ context.Context, i singlefill.LoadInfo) {
			e.Add("done %s %v, store error %t, stored %t, fenced %t, unlocked %t", i.Key, i.Err, i.StoreErr != nil, i.Stored, i.Fenced, i.Unlocked)
		},
		WaitDone:       func(_ context.Context, i singlefill.WaitInfo) { e.Add("waited %s, polled %t", i.Key, i.Polls > 0) },
		RedisError:     func(_ context.Context, op string, err error) { e.Add("redis %s", op) },
		BadValue:       func(_ context.Context, key string, err error) { e.Add("bad %s", key) },
		BreakerChanged: func(open bool) { e.Add("breaker %t", open) },
	}
}

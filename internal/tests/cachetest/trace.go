package cachetest

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/singlefill/singlefill"
)

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

package cachetest

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"

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

// HasError reports whether an error of the operation contains one of the texts: servers differ in
// words.
func (l *Log) HasError(op string, texts ...string) bool {
	return slices.ContainsFunc(l.Errors()[op], func(err error) bool {
		return slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(err.Error(), text) })
	})
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

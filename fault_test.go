package singlefill_test

import (
	"context"
	"embed"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// The cache with a source and a log that some tests of this package use. The tests of faults use
// internal/tests/cachetest.

//go:embed internal/fill/lua/*.lua
var fillScripts embed.FS

const (
	impatience = cachetest.Impatient
	patience   = cachetest.Patient

	// faultBound lies between RedisTimeout and the client's own timeouts, which are 5 s and more.
	faultBound = 4 * time.Second
)

var (
	faultExists    = redistest.Exists
	noImmortalKeys = redistest.WantTTLs
	onceOnly       = redistest.NoRetry
	faultAct       = cachetest.Script
)

func faultDo(t testing.TB, admin *redis.Client) func(args ...any) {
	return func(args ...any) {
		t.Helper()
		redistest.Do(t, admin, args...)
	}
}

// A faultSource is what caches load from. It counts the loads, and the most at a time.
type faultSource struct {
	loads, running, most atomic.Int64

	during func(key string) // called by each load, if it is not nil
}

func (s *faultSource) load(_ context.Context, key string) (string, error) {
	s.loads.Add(1)
	n := s.running.Add(1)
	defer s.running.Add(-1)
	for m := s.most.Load(); n > m && !s.most.CompareAndSwap(m, n); m = s.most.Load() {
	}
	if s.during != nil {
		s.during(key)
	}
	return "value of " + key, nil
}

// A faultLog is what a Trace has reported.
type faultLog struct {
	mu     sync.Mutex
	failed map[string][]error // by op
	loads  []singlefill.LoadInfo
}

func (l *faultLog) trace() *singlefill.Trace {
	return &singlefill.Trace{
		RedisError: func(_ context.Context, op string, err error) {
			l.mu.Lock()
			defer l.mu.Unlock()
			if l.failed == nil {
				l.failed = make(map[string][]error)
			}
			l.failed[op] = append(l.failed[op], err)
		},
		LoadDone: func(_ context.Context, info singlefill.LoadInfo) {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.loads = append(l.loads, info)
		},
	}
}

func (l *faultLog) errors() map[string][]error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return maps.Clone(l.failed)
}

func (l *faultLog) count() (n int) {
	for _, errs := range l.errors() {
		n += len(errs)
	}
	return n
}

// said reports whether an error of op contains one of the texts: servers differ in words.
func (l *faultLog) said(op string, texts ...string) bool {
	return slices.ContainsFunc(l.errors()[op], func(err error) bool {
		return slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(err.Error(), text) })
	})
}

func (l *faultLog) done() []singlefill.LoadInfo {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.loads)
}

// A faultCache is a cache with its source and its log.
type faultCache struct {
	*singlefill.Cache[string]
	*faultSource
	log *faultLog
	ns  string
	t   testing.TB
}

func newFaultCache(t testing.TB, rdb redis.UniversalClient, ns string, redisTimeout time.Duration, change ...func(*singlefill.Options[string])) *faultCache {
	t.Helper()
	f := &faultCache{faultSource: &faultSource{}, log: &faultLog{}, ns: ns, t: t}
	opts := singlefill.Options[string]{RedisTimeout: redisTimeout, LockTTL: 10 * time.Second, Trace: f.log.trace()}
	for _, c := range change {
		c(&opts)
	}
	var err error
	if f.Cache, err = singlefill.New(rdb, ns, time.Hour, &opts); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// mustLoad fails the test unless GetOrLoad returns the value of key in time.
func (f *faultCache) mustLoad(key string) {
	f.t.Helper()
	begun := time.Now()
	v, err := f.GetOrLoad(context.Background(), key, f.load)
	if took := time.Since(begun); took > faultBound {
		f.t.Errorf("GetOrLoad(%s) took %v", key, took)
	}
	if err != nil || v != "value of "+key {
		f.t.Fatalf("GetOrLoad(%s) = %q, %v", key, v, err)
	}
}

func (f *faultCache) value(key string) string { return f.ns + ":{" + key + "}" }
func (f *faultCache) lock(key string) string  { return f.value(key) + ":lock" }

// recovers waits until the cache stores values again. It makes only calls for new keys.
func (f *faultCache) recovers() {
	f.t.Helper()
	redistest.Await(f.t, "the breaker is closed", func() bool { return !f.Stats().BreakerOpen })
	n := 0
	redistest.Await(f.t, "values are cached again", func() bool {
		n++
		key := fmt.Sprintf("afterwards-%d", n)
		f.mustLoad(key)
		_, err := f.Get(context.Background(), key)
		return err == nil
	})
}

// settled waits until Trace and Stats know of the end of each load.
func (f *faultCache) settled() {
	f.t.Helper()
	redistest.Await(f.t, "each load is over", func() bool { return int(f.Stats().Loads) == len(f.log.done()) })
}

// lastLoad returns the last report of Trace.LoadDone.
func (f *faultCache) lastLoad() singlefill.LoadInfo {
	f.t.Helper()
	f.settled()
	done := f.log.done()
	if len(done) == 0 {
		f.t.Fatal("there was no load")
	}
	return done[len(done)-1]
}

func (f *faultCache) wantStats(what string, want int64, got func(singlefill.Stats) int64) {
	f.t.Helper()
	f.settled()
	if n := got(f.Stats()); n != want {
		f.t.Errorf("%s: %d, want %d; %+v; errors %v", what, n, want, f.Stats(), f.log.errors())
	}
}

func (f *faultCache) wantLoads(want int64) {
	f.t.Helper()
	if n := f.loads.Load(); n != want {
		f.t.Errorf("%d loads, want %d", n, want)
	}
}

func (f *faultCache) wantNoErrors() {
	f.t.Helper()
	f.settled()
	if n := f.Stats().RedisErrors; n != 0 || f.log.count() != 0 {
		f.t.Errorf("%d errors of Redis were counted, want none: %v", n, f.log.errors())
	}
}

// wantCounted fails the test unless commands have failed, and Trace and Stats agree on how many.
func (f *faultCache) wantCounted() {
	f.t.Helper()
	f.settled()
	if f.log.count() == 0 {
		f.t.Error("Trace reported no error of Redis")
	}
	redistest.Await(f.t, "each error is reported once and counted once", func() bool {
		return int(f.Stats().RedisErrors) == f.log.count()
	})
}

package singlefilltest_test

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/singlefilltest"
)

// newCache returns a cache that is closed at the end of the test.
func newCache(t *testing.T, rdb *redis.Client, opts *singlefill.Options[string]) *singlefill.Cache[string] {
	t.Helper()
	cache, err := singlefill.New(rdb, "cache", time.Hour, opts)
	redistest.Must(t, err)
	t.Cleanup(func() { cache.Close() })
	return cache
}

// check fails the test unless a GetOrLoad of the key k returns want.
func check(t *testing.T, cache *singlefill.Cache[string], load singlefill.Loader[string], want string) {
	t.Helper()
	if v, err := cache.GetOrLoad(t.Context(), "k", load); v != want || err != nil {
		t.Errorf("GetOrLoad: %q, %v; want %q", v, err, want)
	}
}

// serial returns a source whose nth load returns "n".
func serial(t testing.TB) *singlefilltest.Source[string] {
	var source *singlefilltest.Source[string]
	source = singlefilltest.NewSource(t, func(context.Context, string) (string, error) {
		return fmt.Sprint(source.Calls()), nil
	})
	return source
}

// Each call returns another, empty Redis, with separate faults.
func TestRedis_Isolated(t *testing.T) {
	both(t, func(t *testing.T) {
		a, b := singlefilltest.Redis(t), singlefilltest.Redis(t)
		redistest.Must(t, a.Set(t.Context(), "k", "v", 0).Err())
		if n, err := b.DBSize(t.Context()).Result(); n != 0 || err != nil {
			t.Errorf("the other Redis has %d keys, %v", n, err)
		}
		for _, fault := range faults {
			fault.begin(t, b)
			if err := set(t, a, "v", time.Minute); err != nil {
				t.Errorf("%s of the other Redis: %v", fault.name, err)
			}
		}
	})
}

// In a bubble keys and values expire by its clock.
func TestRedis_FakeTime(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		begun := time.Now()
		rdb := singlefilltest.Redis(t)
		source := serial(t)
		cache := newCache(t, rdb, &singlefill.Options[string]{Jitter: -1, EarlyRefresh: -1})
		check(t, cache, source.Load, "1")
		time.Sleep(time.Hour - time.Millisecond)
		check(t, cache, source.Load, "1")
		if n, err := rdb.DBSize(t.Context()).Result(); n != 1 || err != nil {
			t.Errorf("Redis has %d keys, %v", n, err)
		}
		time.Sleep(time.Millisecond)
		if n, err := rdb.Exists(t.Context(), "cache:{k}").Result(); n != 0 || err != nil {
			t.Errorf("Redis has %d keys after their life, %v", n, err)
		}
		check(t, cache, source.Load, "2")
		if took := time.Since(begun); took != time.Hour {
			t.Errorf("it took %v", took)
		}
	})
}

// faults are the two faults, and the error of a command that may take so long.
var faults = []struct {
	name  string
	begin func(testing.TB, *redis.Client) func()
	limit time.Duration
	err   error
}{
	{"Silence", singlefilltest.Silence, 50 * time.Millisecond, context.DeadlineExceeded},
	{"Disconnect", singlefilltest.Disconnect, time.Minute, syscall.ECONNREFUSED},
}

// set sets the key k within d.
func set(t *testing.T, rdb *redis.Client, value string, d time.Duration) error {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	return rdb.Set(ctx, "k", value, 0).Err()
}

// During a fault no command is executed. After it all commands are, and Redis has what it had before.
func TestFaults_Commands(t *testing.T) {
	for _, fault := range faults {
		t.Run(fault.name, func(t *testing.T) {
			both(t, func(t *testing.T) {
				rdb := singlefilltest.Redis(t)
				redistest.Must(t, set(t, rdb, "before", time.Minute))
				end := fault.begin(t, rdb)
				for range 3 {
					if err := set(t, rdb, "during", fault.limit); !errors.Is(err, fault.err) {
						t.Errorf("SET: %v, want %v", err, fault.err)
					}
				}
				end()
				if v, err := rdb.Get(t.Context(), "k").Result(); v != "before" || err != nil {
					t.Errorf("GET: %q, %v", v, err)
				}
				if err := set(t, rdb, "after", time.Minute); err != nil {
					t.Errorf("SET: %v", err)
				}
			})
		})
	}
}

// A cache serves from the source during a fault, also with an open breaker. A second after the fault it
// serves what it had.
func TestFaults_Cache(t *testing.T) {
	t.Parallel()
	for _, fault := range faults {
		t.Run(fault.name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				rdb := singlefilltest.Redis(t)
				cache := newCache(t, rdb, nil)
				source := serial(t)
				check(t, cache, source.Load, "1")
				end := fault.begin(t, rdb)
				check(t, cache, source.Load, "2")
				for !cache.Stats().BreakerOpen {
					check(t, cache, source.Load, fmt.Sprint(source.Calls()+1))
				}
				end()
				time.Sleep(time.Second)
				check(t, cache, source.Load, "1")
				if cache.Stats().BreakerOpen {
					t.Error("the breaker is open")
				}
			})
		})
	}
}

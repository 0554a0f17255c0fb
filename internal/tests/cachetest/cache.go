// Package cachetest has what the tests of the cache in several packages need: a cache that knows
// what its Loader and its Trace have seen, and the scripts of the fill lock.
package cachetest

import (
	"context"
	"fmt"
	"reflect"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

const (
	// Impatient is the RedisTimeout of a cache that is to give up on Redis.
	Impatient = 150 * time.Millisecond

	// Patient is the RedisTimeout of a cache that must not time out on a busy machine.
	Patient = 3 * time.Second

	// loadLimit lies between RedisTimeout and the client's own timeouts, which are 5 s and more: a
	// call that takes longer was bounded by the client.
	loadLimit = 4 * time.Second
)

// Cache is a cache of strings with its source and its log. The value of a key is "value of " and
// the key.
type Cache struct {
	*singlefill.Cache[string]
	*Source
	Log       *Log
	Namespace string

	t testing.TB
}

// New returns a cache that is closed with the test. Its LockTTL is 10 s, and its values live for an
// hour.
func New(t testing.TB, rdb redis.UniversalClient, namespace string, redisTimeout time.Duration,
	change ...func(*singlefill.Options[string])) *Cache {
	t.Helper()
	c := &Cache{Source: &Source{}, Log: &Log{}, Namespace: namespace, t: t}
	opts := singlefill.Options[string]{RedisTimeout: redisTimeout, LockTTL: 10 * time.Second, Trace: c.Log.trace()}
	for _, f := range change {
		f(&opts)
	}
	var err error
	if c.Cache, err = singlefill.New(rdb, namespace, time.Hour, &opts); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// ValueKey returns the Redis key of the value of key.
func (c *Cache) ValueKey(key string) string { return c.Namespace + ":{" + key + "}" }

// LockKey returns the Redis key of the fill lock of key.
func (c *Cache) LockKey(key string) string { return c.ValueKey(key) + ":lock" }

// WantValue calls GetOrLoad, and fails the test if that does not return the value of key.
func (c *Cache) WantValue(key string) {
	c.t.Helper()
	if v, err := c.GetOrLoad(context.Background(), key, c.Load); err != nil || v != valueOf(key) {
		c.t.Errorf("GetOrLoad(%s) = %q, %v", key, v, err)
	}
}

// MustLoad calls GetOrLoad, and ends the test if that does not return the value of key. It fails
// the test if the call takes longer than RedisTimeout explains.
func (c *Cache) MustLoad(key string) {
	c.t.Helper()
	begun := time.Now()
	v, err := c.GetOrLoad(context.Background(), key, c.Load)
	if took := time.Since(begun); took > loadLimit {
		c.t.Errorf("GetOrLoad(%s) took %v", key, took)
	}
	if err != nil || v != valueOf(key) {
		c.t.Fatalf("GetOrLoad(%s) = %q, %v", key, v, err)
	}
}

// WantHit fails the test if Redis does not have the value of key.
func (c *Cache) WantHit(key string) {
	c.t.Helper()
	if v, err := c.Get(context.Background(), key); err != nil || v != valueOf(key) {
		c.t.Errorf("Get(%s) = %q, %v; want a hit", key, v, err)
	}
}

// WantMiss fails the test if Redis has a value of key.
func (c *Cache) WantMiss(key string) {
	c.t.Helper()
	if v, err := c.Get(context.Background(), key); err != singlefill.ErrMiss {
		c.t.Errorf("Get(%s) = %q, %v; want ErrMiss", key, v, err)
	}
}

// AwaitCached calls MustLoad until Redis has the value of key.
func (c *Cache) AwaitCached(key string) {
	c.t.Helper()
	redistest.Await(c.t, "the value is cached", func() bool { return c.caches(key) })
}

// caches calls MustLoad, and reports whether Redis has the value of key.
func (c *Cache) caches(key string) bool {
	c.t.Helper()
	c.MustLoad(key)
	_, err := c.Get(context.Background(), key)
	return err == nil
}

// AwaitRecovery waits until the cache stores values again. It makes only calls for new keys.
func (c *Cache) AwaitRecovery() {
	c.t.Helper()
	redistest.Await(c.t, "the breaker is closed", func() bool { return !c.Stats().BreakerOpen })
	n := 0
	redistest.Await(c.t, "values are cached again", func() bool {
		n++
		return c.caches(fmt.Sprint("afterwards-", n))
	})
}

// AwaitLoads waits until Trace and Stats know of the end of each load, of which callers learn
// earlier.
func (c *Cache) AwaitLoads() {
	c.t.Helper()
	redistest.Await(c.t, "each load is over", func() bool { return int(c.Stats().Loads) == len(c.Log.Loads()) })
}

// LastLoad returns the last report of Trace.LoadDone.
func (c *Cache) LastLoad() singlefill.LoadInfo {
	c.t.Helper()
	c.AwaitLoads()
	loads := c.Log.Loads()
	if len(loads) == 0 {
		c.t.Fatal("there was no load")
	}
	return loads[len(loads)-1]
}

// WantLoads fails the test unless the source has begun so many loads.
func (c *Cache) WantLoads(want int64) {
	c.t.Helper()
	if n := c.Loads.Load(); n != want {
		c.t.Errorf("%d loads, want %d", n, want)
	}
}

// WantStat fails the test unless the field of Stats has the value.
func (c *Cache) WantStat(field string, want int64) {
	c.t.Helper()
	c.AwaitLoads()
	stats := c.Stats()
	if n := reflect.ValueOf(stats).FieldByName(field).Int(); n != want {
		c.t.Errorf("Stats.%s is %d, want %d; %+v; errors %v", field, n, want, stats, c.Log.Errors())
	}
}

// WantNoErrors fails the test if a command has failed.
func (c *Cache) WantNoErrors() {
	c.t.Helper()
	c.AwaitLoads()
	if n := c.Stats().RedisErrors; n != 0 || c.Log.ErrorCount() != 0 {
		c.t.Errorf("Stats.RedisErrors is %d, want 0; Trace reported %v", n, c.Log.Errors())
	}
}

// WantErrors fails the test unless commands fail, and Trace and Stats agree on how many. A command that goes on without
// its caller fails when its time is over.
func (c *Cache) WantErrors() {
	c.t.Helper()
	c.AwaitLoads()
	redistest.Await(c.t, "Trace reports an error of Redis", func() bool { return c.Log.ErrorCount() > 0 })
	redistest.Await(c.t, "each error is reported once and counted once", func() bool {
		return int(c.Stats().RedisErrors) == c.Log.ErrorCount()
	})
}

// Source is what caches load from.
type Source struct {
	Count

	// During is called by each load, if it is not nil.
	During func(key string)
}

// Load is a Loader.
func (s *Source) Load(_ context.Context, key string) (string, error) {
	defer s.Begin()()
	if s.During != nil {
		s.During(key)
	}
	return valueOf(key), nil
}

func valueOf(key string) string { return "value of " + key }

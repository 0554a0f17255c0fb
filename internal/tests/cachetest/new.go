package cachetest

import (
	"cmp"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
)

// Caches. Several in one namespace stand for several processes.

// NewCache returns a cache in a new namespace. See NewCacheIn.
func NewCache[T any](t testing.TB, rdb redis.UniversalClient, opts *singlefill.Options[T]) *singlefill.Cache[T] {
	t.Helper()
	return NewCacheIn(t, rdb, redistest.Namespace(t), opts)
}

// NewCacheIn returns a cache that lives as long as the test. Timeouts that opts leave open are
// longer than a busy machine makes a command take.
func NewCacheIn[T any](t testing.TB, rdb redis.UniversalClient, namespace string,
	opts *singlefill.Options[T]) *singlefill.Cache[T] {
	t.Helper()
	c, err := singlefill.New(rdb, namespace, time.Hour, PatientOptions(opts))
	redistest.Must(t, err)
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return c
}

// NewCaches returns n processes of one namespace, each with its own client.
func NewCaches[T any](t testing.TB, m *miniredis.Miniredis, namespace string, n int,
	opts *singlefill.Options[T]) (caches []*singlefill.Cache[T]) {
	for range n {
		caches = append(caches, NewCacheIn(t, redistest.NewMiniClient(t, m), namespace, opts))
	}
	return caches
}

// Raw are the options of a cache whose values are stored as they are.
var Raw = singlefill.Options[string]{Codec: singlefill.Raw}

func PatientOptions[T any](opts *singlefill.Options[T]) *singlefill.Options[T] {
	var p singlefill.Options[T]
	if opts != nil {
		p = *opts
	}
	p.RedisTimeout = cmp.Or(p.RedisTimeout, 5*time.Second)
	p.LockTTL = cmp.Or(p.LockTTL, 20*time.Second)
	p.LoadTimeout = cmp.Or(p.LoadTimeout, time.Minute)
	return &p
}

// InBubble runs a test with a miniredis in a bubble. Time is fake in it, and stands still while
// anything runs: instants can be compared exactly, and commands take no time unless a test says so.
func InBubble(t *testing.T, run func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client)) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m, rdb := redistest.StartMini(t)
		run(t, m, rdb)
	})
}

// RunInBubble is InBubble as a subtest.
func RunInBubble(t *testing.T, name string, run func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client)) {
	t.Run(name, func(t *testing.T) { InBubble(t, run) })
}

// UserEach is redistest.EachCache and, beside it, a user who may run no scripts. look may do everything.
func UserEach(t *testing.T, run func(t *testing.T, rdb, look redis.UniversalClient)) {
	redistest.EachCache(t, func(t *testing.T, rdb redis.UniversalClient) { run(t, rdb, rdb) })
	t.Run("no scripts", func(t *testing.T) {
		t.Parallel()
		s := redistest.Start(t)
		run(t, s.Client(t, NoScripts(t, s)), s.Admin())
	})
}

// NoScripts makes a user of the server who may run no scripts, and makes a client that user.
func NoScripts(t testing.TB, s *redistest.Server, more ...string) func(*redis.Options) {
	t.Helper()
	return s.User(t, append([]string{"~*", "&*", "+@all", "-@scripting"}, more...)...)
}

// Package cache_test shows the rows of docs/faults.md that are about the cache: its Redis, or the
// way to it, fails. Callers get what the source has within a time that RedisTimeout bounds, the
// trouble is counted, and after it everything is as before. What is measured is logged.
package cache_test

import (
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

func TestMain(m *testing.M) { redistest.Ring(m) }

// breakerLimit is how many failures in a row open the breaker.
const breakerLimit = 5

// start begins a parallel test, with a server and a proxy on the way to it.
func start(t *testing.T) (*redistest.Server, *redistest.Proxy) {
	t.Helper()
	t.Parallel()
	s := redistest.Start(t)
	return s, redistest.NewProxy(t, s.Addr)
}

// newPair returns two caches of one source in one namespace, which stand for two processes.
func newPair(t testing.TB, a, b redis.UniversalClient, redisTimeout time.Duration,
	change ...func(*singlefill.Options[string])) (x, y *cachetest.Cache) {
	t.Helper()
	namespace := redistest.Namespace(t)
	x = cachetest.New(t, a, namespace, redisTimeout, change...)
	y = cachetest.New(t, b, namespace, redisTimeout, change...)
	y.Source = x.Source
	return x, y
}

// wantNoErrors is cachetest.Cache.WantNoErrors for both caches.
func wantNoErrors(a, b *cachetest.Cache) {
	a.WantNoErrors()
	b.WantNoErrors()
}

// stallTimeout is the RedisTimeout of a cache one of whose commands is not answered, while the others
// must be, even on a busy machine.
const stallTimeout = 500 * time.Millisecond

// awaitHit waits until the rule's fault has come about.
func awaitHit(t testing.TB, rule *redistest.Rule) {
	t.Helper()
	redistest.Await(t, "the fault comes about", func() bool { return rule.Fired() > 0 })
}

// lockTTL sets Options.LockTTL.
func lockTTL(d time.Duration) func(*singlefill.Options[string]) {
	return func(o *singlefill.Options[string]) { o.LockTTL = d }
}

// goWait starts a call of c, and returns when it waits for a load in another process.
func goWait(t testing.TB, wg *sync.WaitGroup, c *cachetest.Cache, s *redistest.Server, key string) {
	t.Helper()
	before := s.Calls("pttl") // get_or_lock sends it only when another attempt holds the lock
	wg.Go(func() { c.MustLoad(key) })
	redistest.Await(t, "the call waits for another process", func() bool { return s.Calls("pttl") > before })
}

// retries are clients that do and do not send a command again when its reply is lost.
var retries = map[string]func(*redis.Options){
	"client retries":       func(*redis.Options) {},
	"client sends it once": redistest.NoRetry,
}

package redistest

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill/internal/local"
)

// Each runs a test in parallel on every kind of client that the module supports. The servers are
// shared: run keeps its keys apart by a Namespace, and flushes nothing. A pass on "mini" alone
// proves nothing about scripts and expiry. With -short it runs on "mini" and "single" only.
func Each(t *testing.T, run func(t *testing.T, rdb redis.UniversalClient)) {
	single := func(mutate ...func(*redis.Options)) func(t *testing.T) redis.UniversalClient {
		return func(t *testing.T) redis.UniversalClient { return Shared(t).Client(t, mutate...) }
	}
	kinds := []struct {
		name string
		open func(t *testing.T) redis.UniversalClient
	}{
		{"mini", func(t *testing.T) redis.UniversalClient { _, c := StartMini(t); return c }},
		{"single", single()},
		{"resp2", single(func(o *redis.Options) { o.Protocol, o.ContextTimeoutEnabled = 2, true })},
		{"cluster", func(t *testing.T) redis.UniversalClient { return SharedCluster(t).Client(t) }},
		{"autopipeline", openAutoPipeline},
		{"csc", single(func(o *redis.Options) {
			o.Protocol, o.ClientSideCacheConfig = 3, &redis.ClientSideCacheConfig{}
		})},
	}
	if testing.Short() {
		kinds = kinds[:2]
	}
	for _, kind := range kinds {
		t.Run(kind.name, func(t *testing.T) {
			t.Parallel()
			run(t, kind.open(t))
		})
	}
}

// EachCache is Each and, beside it, the client of NewLocal.
func EachCache(t *testing.T, run func(t *testing.T, rdb redis.UniversalClient)) {
	Each(t, run)
	t.Run("local", func(t *testing.T) {
		t.Parallel()
		rdb, free := local.New("", local.Limits{Keys: 100_000})
		t.Cleanup(func() {
			checkLocal(t, rdb.Client)
			free()
		})
		run(t, rdb)
	})
}

// SkipLocal leaves a test out that EachCache runs on the client of NewLocal.
func SkipLocal(t *testing.T, why string) {
	t.Helper()
	if strings.HasSuffix(t.Name(), "/local") {
		t.Skip(why)
	}
}

func openAutoPipeline(t *testing.T) redis.UniversalClient {
	ap, err := Shared(t).Client(t).AutoPipeline()
	Must(t, err)
	t.Cleanup(func() { _ = ap.Close() })
	return ap
}

var namespaces atomic.Int64

// Namespace returns a name that no other call in this test binary returns. The name of the test
// alone is not unique on a shared server: under -count the second run would find the keys of the
// first.
func Namespace(t testing.TB) string {
	return fmt.Sprintf("%s-%d", t.Name(), namespaces.Add(1))
}

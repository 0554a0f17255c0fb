package redistest

import (
	"fmt"
	"os"
	"reflect"
	"sync/atomic"
	"testing"

	"github.com/redis/go-redis/v9"
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
		{"autopipeline", func(t *testing.T) redis.UniversalClient { return AutoPipeline(t, Shared(t).Client(t)) }},
		{"csc", func(t *testing.T) redis.UniversalClient {
			return Shared(t).Client(t, func(o *redis.Options) { CacheClientSide(t, o) })
		}},
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

// AutoPipeline returns rdb.AutoPipeline(). The test is skipped with a go-redis that does not have it.
func AutoPipeline(t testing.TB, rdb redis.UniversalClient) redis.UniversalClient {
	t.Helper()
	open := reflect.ValueOf(rdb).MethodByName("AutoPipeline")
	needNewClient(t, open, "AutoPipeline")
	results := open.Call(nil)
	err, _ := results[1].Interface().(error)
	Must(t, err)
	ap := results[0].Interface().(redis.UniversalClient)
	t.Cleanup(func() { _ = ap.Close() })
	return ap
}

// CacheClientSide turns client-side caching on. The test is skipped with a go-redis that does not have it.
func CacheClientSide(t testing.TB, o *redis.Options) {
	t.Helper()
	config := reflect.ValueOf(o).Elem().FieldByName("ClientSideCacheConfig")
	needNewClient(t, config, "ClientSideCacheConfig")
	config.Set(reflect.New(config.Type().Elem()))
	o.Protocol = 3
}

// needNewClient skips the test if go-redis has not what. With NEW_GO_REDIS=1 it fails instead.
func needNewClient(t testing.TB, what reflect.Value, name string) {
	t.Helper()
	switch {
	case what.IsValid():
	case os.Getenv("NEW_GO_REDIS") == "1":
		t.Fatalf("go-redis has no %s, and NEW_GO_REDIS=1 is set", name)
	default:
		t.Skipf("go-redis has no %s: scripts/test takes a newer one", name)
	}
}

var namespaces atomic.Int64

// Namespace returns a name that no other call in this test binary returns. The name of the test
// alone is not unique on a shared server: under -count the second run would find the keys of the
// first.
func Namespace(t testing.TB) string {
	return fmt.Sprintf("%s-%d", t.Name(), namespaces.Add(1))
}

package singlefilltest

import (
	"context"
	"errors"
	"testing"

	"github.com/singlefill/singlefill"
)

// MakeStale makes the value that cache has under key stale, as if its life had just ended: the next
// GetOrLoad finds it in the windows [singlefill.Options.StaleWhileRevalidate] and StaleIfError,
// which begin now. Without such windows the next GetOrLoad loads, as after a Delete.
//
// MakeStale ends the test by t.Fatalf if the cache has no value to serve under key, or if Redis does
// not answer. It makes one call of [singlefill.Cache.Get] and one of Expire, which supersedes a load
// in flight. In a bubble of [testing/synctest] time.Sleep does the same for all keys.
func MakeStale[T any](t testing.TB, cache *singlefill.Cache[T], key string) {
	t.Helper()
	ctx := context.Background() // the test's context has ended in t.Cleanup
	if _, err := cache.Get(ctx, key); err != nil && !errors.Is(err, singlefill.ErrNotFound) {
		t.Fatalf("singlefilltest: MakeStale: no value to serve under %q: %v", key, err)
	}
	if err := cache.Expire(ctx, key); err != nil {
		t.Fatalf("singlefilltest: MakeStale: %q: %v", key, err)
	}
}

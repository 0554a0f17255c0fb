package stale_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// FastForward ends keys in Redis, but makes no value stale: readers judge by their own clock. Sleeping
// in the bubble does.
func TestStale_FastForwardAgesNoValue(t *testing.T) {
	t.Parallel()
	for _, sleeps := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			mini, rdb := redistest.StartMini(t)
			c := cachetest.NewCache(t, rdb, &singlefill.Options[string]{StaleWhileRevalidate: 30 * time.Minute})
			redistest.Must(t, c.Set(t.Context(), "k", "v"))
			if sleeps {
				time.Sleep(70 * time.Minute)
			} else {
				mini.FastForward(70 * time.Minute)
			}
			v, info, err := c.GetOrLoadInfo(t.Context(), "k", cachetest.Gives("new"))
			if v != "v" || info.Stale != sleeps || err != nil {
				t.Errorf("%q, %+v, %v; want the old value, stale: %t", v, info, err, sleeps)
			}
		})
	}
}

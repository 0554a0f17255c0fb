package stale_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/singlefilltest"
)

// A shop has prices in a cache for an hour, which may be stale for half an hour. The price of tea was 7
// when the cache loaded it.
type shop struct {
	prices *singlefill.Cache[int]
	source *singlefilltest.Source[int]
}

func newShop(t *testing.T, rdb *redis.Client) shop {
	t.Helper()
	prices, err := singlefill.New(rdb, "prices", time.Hour, &singlefill.Options[int]{StaleWhileRevalidate: 30 * time.Minute})
	redistest.Must(t, err)
	t.Cleanup(func() { prices.Close() })
	price := 7
	s := shop{prices, singlefilltest.NewSource(t, func(context.Context, string) (int, error) { return price, nil })}
	s.check(t, 7, false)
	price = 8
	return s
}

// check fails the test unless the shop has this price of tea.
func (s shop) check(t *testing.T, want int, stale bool) {
	t.Helper()
	price, info, err := s.prices.GetOrLoadInfo(t.Context(), "tea", s.source.Load)
	if price != want || info.Stale != stale || err != nil {
		t.Errorf("%d, %+v, %v; want %d, stale: %v", price, info, err, want, stale)
	}
}

// FastForward ends keys in Redis, but makes no value stale: readers judge by their own clock. Sleeping
// in the bubble does.
func TestStale_FastForwardAgesNoValue(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		mini, rdb := redistest.StartMini(t)
		s := newShop(t, rdb)
		mini.FastForward(70 * time.Minute)
		s.check(t, 7, false)
	})
	synctest.Test(t, func(t *testing.T) {
		_, rdb := redistest.StartMini(t)
		s := newShop(t, rdb)
		time.Sleep(70 * time.Minute)
		s.check(t, 7, true)
	})
}

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

// A cache serves each age of a value from a Redis that is there, silent, or back after an outage that
// opened the breaker.
func TestStale_Outage(t *testing.T) {
	t.Parallel()
	const there, silent, back = "there", "silent", "back"
	for _, test := range []struct {
		value string
		age   time.Duration
		redis string
		want  int
		stale bool
		took  time.Duration
	}{
		{"fresh", 0, there, 7, false, 0},
		{"fresh", 0, silent, 8, false, 500 * time.Millisecond}, // RedisTimeout
		{"fresh", 0, back, 7, false, 0},
		{"stale", time.Hour, there, 7, true, 0},
		{"stale", time.Hour, silent, 8, false, 500 * time.Millisecond},
		{"stale", time.Hour, back, 7, true, 0},
		{"expired", 2 * time.Hour, there, 8, false, 0},
		{"expired", 2 * time.Hour, silent, 8, false, 500 * time.Millisecond},
		{"expired", 2 * time.Hour, back, 8, false, 0},
	} {
		t.Run(test.value+" "+test.redis, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				rdb := singlefilltest.Redis(t)
				s := newShop(t, rdb)
				time.Sleep(test.age)
				if test.redis != there {
					resume := singlefilltest.Silence(t, rdb)
					if test.redis == back {
						for !s.prices.Stats().BreakerOpen {
							s.check(t, 8, false)
						}
						resume()
						time.Sleep(time.Second) // the breaker probes every RedisTimeout
					}
				}
				begun := time.Now()
				s.check(t, test.want, test.stale)
				if took := time.Since(begun); took != test.took {
					t.Errorf("took %v, want %v", took, test.took)
				}
			})
		})
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

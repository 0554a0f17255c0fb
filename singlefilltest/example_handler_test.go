package singlefilltest_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/singlefilltest"
)

// This file shows how to test an HTTP handler.

// A shop is the handler under test. It answers with the price of an item.
type shop struct {
	prices *singlefill.Cache[int]
	load   singlefill.Loader[int] // a query of the database
}

func newShop(rdb redis.UniversalClient, load singlefill.Loader[int]) (shop, error) {
	prices, err := singlefill.New(rdb, "prices", time.Hour, &singlefill.Options[int]{StaleIfError: time.Hour})
	return shop{prices, load}, err
}

func (s shop) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), 5*time.Second)
	defer cancel()
	price, info, err := s.prices.GetOrLoadInfo(ctx, r.URL.Path, s.load)
	switch {
	case errors.Is(err, singlefill.ErrNotFound):
		http.Error(w, "no such item", http.StatusNotFound)
	case err != nil:
		http.Error(w, "try again", http.StatusServiceUnavailable)
	case info.Stale:
		fmt.Fprint(w, price, " (stale)")
	default:
		fmt.Fprint(w, price)
	}
}

// get returns the answer of a handler.
func get(handler http.Handler, path string) string {
	w := httptest.NewRecorder()
	handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
	return w.Body.String()
}

// inShop runs test in a bubble, with a shop that has the price 7 of tea in its cache. The price at the
// source is 8 by now.
func inShop(t *testing.T, test func(t *testing.T, s shop, rdb *redis.Client, source *singlefilltest.Source[int])) {
	synctest.Test(t, func(t *testing.T) {
		rdb := singlefilltest.Redis(t)
		price := 7
		source := singlefilltest.NewSource(t, func(context.Context, string) (int, error) { return price, nil })
		s, err := newShop(rdb, source.Load)
		if err != nil {
			t.Fatal(err)
		}
		defer s.prices.Close()
		if got := get(s, "/tea"); got != "7" {
			t.Fatalf("cold: %q", got)
		}
		price = 8
		test(t, s, rdb, source)
	})
}

// The shop answers from the cache while it can, and from the source while Redis cannot be asked.
func TestShop(t *testing.T) {
	errDown := errors.New("price service is down")
	for _, test := range []struct {
		name   string
		age    time.Duration                          // of the price in the cache
		source error                                  // nil: it answers
		redis  func(testing.TB, *redis.Client) func() // nil: it answers
		want   string
		loads  int // since the shop was opened
	}{
		{"fresh", 0, nil, nil, "7", 1},
		{"stale", time.Hour, nil, nil, "8", 2},
		{"stale, source fails", time.Hour, errDown, nil, "7 (stale)", 2},
		{"expired, source fails", 2 * time.Hour, errDown, nil, "try again\n", 2},
		{"gone", time.Hour, singlefill.ErrNotFound, nil, "no such item\n", 2},
		{"Redis hangs", 0, nil, singlefilltest.Silence, "8", 2},
		{"Redis is down", 0, nil, singlefilltest.Disconnect, "8", 2},
		{"Redis is down, source fails", 0, errDown, singlefilltest.Disconnect, "try again\n", 2},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			inShop(t, func(t *testing.T, s shop, rdb *redis.Client, source *singlefilltest.Source[int]) {
				time.Sleep(test.age)
				source.Fail(test.source)
				if test.redis != nil {
					test.redis(t, rdb)
				}
				if got := get(s, "/tea"); got != test.want {
					t.Errorf("got %q, want %q", got, test.want)
				}
				source.WantLoads(t, "/tea", test.loads)
			})
		})
	}
}

// The package documentation has this test: change both.
func TestShop_Steps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rdb := singlefilltest.Redis(t)
		prices, err := singlefill.New(rdb, "prices", time.Hour, &singlefill.Options[int]{
			StaleIfError: time.Hour,
			Codec:        singlefilltest.Codec(t, nil),
		})
		if err != nil {
			t.Fatal(err)
		}
		defer prices.Close()
		source := singlefilltest.NewSource(t, func(context.Context, string) (int, error) { return 7, nil })
		handler := shop{prices, source.Load}

		check := func(want string, loads int) {
			t.Helper()
			if got := get(handler, "/tea"); got != want {
				t.Errorf("got %q, want %q", got, want)
			}
			source.WantLoads(t, "/tea", loads)
		}
		check("7", 1) // cold: it loads
		check("7", 1) // a hit

		source.Fail(errors.New("price service is down"))
		singlefilltest.MakeStale(t, prices, "/tea")
		check("7 (stale)", 2)

		source.Fail(nil)
		singlefilltest.Silence(t, rdb) // Redis hangs
		check("7", 3)                  // the source serves
	})
}

// A hundred requests for a price that is not in the cache are one query.
func TestShop_Stampede(t *testing.T) {
	inShop(t, func(t *testing.T, s shop, rdb *redis.Client, source *singlefilltest.Source[int]) {
		source.Hold()
		var requests sync.WaitGroup
		for range 100 {
			requests.Go(func() {
				if got := get(s, "/coffee"); got != "8" {
					t.Errorf("got %q", got)
				}
			})
		}
		synctest.Wait() // until all of them wait
		source.Release()
		requests.Wait()
		source.WantLoads(t, "/coffee", 1)
	})
}

package singlefill_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"
	"github.com/singlefill/singlefill"
)

// fakeRedis is a Redis for tests. While silent is set it takes commands, but neither executes nor
// answers them.
type fakeRedis struct {
	mini   *miniredis.Miniredis
	rdb    *redis.Client
	silent atomic.Bool
}

// newFakeRedis returns a server that talks to its client through net.Pipe, so that both also work in
// a bubble of testing/synctest.
func newFakeRedis() *fakeRedis {
	f := &fakeRedis{mini: miniredis.NewMiniRedis()}
	f.mini.ClockTTL(true)       // otherwise no key would expire
	first, err := f.mini.Dial() // starts the server, without a listener
	if err != nil {
		panic(err)
	}
	first.Close()
	f.mini.Server().SetPreHook(func(*server.Peer, string, ...string) bool { return f.silent.Load() })
	f.rdb = redis.NewClient(&redis.Options{
		Addr:                  "127.0.0.1:6379", // an address, since a name would be looked up; nothing is dialled
		Dialer:                func(context.Context, string, string) (net.Conn, error) { return f.mini.Dial() },
		ContextTimeoutEnabled: true,
	})
	return f
}

func (f *fakeRedis) Close() {
	f.rdb.Close() // first: a client that dials would start the server again
	f.mini.Close()
}

// A shop is the handler under test. It answers with the price of an item.
type shop struct {
	prices *singlefill.Cache[int]
	load   singlefill.Loader[int]
}

func (s shop) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), 5*time.Second)
	defer cancel()
	price, info, err := s.prices.GetOrLoadInfo(ctx, r.URL.Path, s.load)
	switch {
	case err != nil:
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
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

// A test silences and revives Redis, and makes values stale. In a bubble of testing/synctest it would
// do the same, and time.Sleep would age the values.
func Example_testing() {
	fake := newFakeRedis()
	defer fake.Close()
	prices, err := singlefill.New(fake.rdb, "prices", time.Hour, &singlefill.Options[int]{StaleIfError: time.Hour})
	if err != nil {
		panic(err)
	}
	defer prices.Close()
	price, down := 7, error(nil)
	handler := shop{prices, func(context.Context, string) (int, error) { return price, down }}

	fmt.Println("cold:", get(handler, "/tea"))
	price = 8
	fmt.Println("hit:", get(handler, "/tea"))
	fake.silent.Store(true)
	fmt.Println("Redis is silent:", get(handler, "/tea"))
	fake.silent.Store(false)
	fmt.Println("Redis is back:", get(handler, "/tea"))

	down = errors.New("price service is down")
	if err := prices.Expire(context.Background(), "/tea"); err != nil { // as if the hour were over
		panic(err)
	}
	fmt.Println("the source is down:", get(handler, "/tea"))
	// Output:
	// cold: 7
	// hit: 7
	// Redis is silent: 8
	// Redis is back: 7
	// the source is down: 7 (stale)
}

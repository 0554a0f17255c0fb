package singlefill_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/singlefill/singlefill"
)

// The handler of Example_testing serves each age of a value from a Redis that is there, silent, or
// back after an outage that opened the breaker.
func TestRecipe_HandlerInAnOutage(t *testing.T) {
	t.Parallel()
	const there, silent, back = "there", "silent", "back"
	for _, test := range []struct {
		value string
		age   time.Duration
		redis string
		want  string
		took  time.Duration
	}{
		{"fresh", 0, there, "7", 0},
		{"fresh", 0, silent, "8", 500 * time.Millisecond}, // RedisTimeout
		{"fresh", 0, back, "7", 0},
		{"stale", time.Hour, there, "7 (stale)", 0},
		{"stale", time.Hour, silent, "8", 500 * time.Millisecond},
		{"stale", time.Hour, back, "7 (stale)", 0},
		{"expired", 2 * time.Hour, there, "8", 0},
		{"expired", 2 * time.Hour, silent, "8", 500 * time.Millisecond},
		{"expired", 2 * time.Hour, back, "8", 0},
	} {
		t.Run(test.value+" "+test.redis, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				fake := newFakeRedis()
				defer fake.Close()
				prices, err := singlefill.New(fake.rdb, "prices", time.Hour, &singlefill.Options[int]{StaleWhileRevalidate: 30 * time.Minute})
				if err != nil {
					t.Fatal(err)
				}
				defer prices.Close()
				price := 7
				handler := shop{prices, func(context.Context, string) (int, error) { return price, nil }}
				if got := get(handler, "/tea"); got != "7" {
					t.Fatalf("cold: %q", got)
				}
				price = 8
				time.Sleep(test.age)

				fake.silent.Store(test.redis != there)
				if test.redis == back {
					for !prices.Stats().BreakerOpen {
						get(handler, "/tea")
					}
					fake.silent.Store(false)
					time.Sleep(time.Second) // the breaker probes every RedisTimeout
				}
				begun := time.Now()
				if got := get(handler, "/tea"); got != test.want {
					t.Errorf("got %q, want %q", got, test.want)
				}
				if took := time.Since(begun); took != test.took {
					t.Errorf("took %v, want %v", took, test.took)
				}
			})
		})
	}
}

// FastForward ends keys in Redis, but makes no value stale: readers judge by their own clock. Sleeping
// in the bubble does.
func TestRecipe_FastForwardAgesNoValue(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name string
		pass func(f *fakeRedis, d time.Duration)
		want string
	}{
		{"FastForward", func(f *fakeRedis, d time.Duration) { f.mini.FastForward(d) }, "7"},
		{"Sleep", func(_ *fakeRedis, d time.Duration) { time.Sleep(d) }, "7 (stale)"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				fake := newFakeRedis()
				defer fake.Close()
				prices, err := singlefill.New(fake.rdb, "prices", time.Hour, &singlefill.Options[int]{StaleWhileRevalidate: time.Hour})
				if err != nil {
					t.Fatal(err)
				}
				defer prices.Close()
				handler := shop{prices, func(context.Context, string) (int, error) { return 7, nil }}
				get(handler, "/tea")
				test.pass(fake, 90*time.Minute)
				if got := get(handler, "/tea"); got != test.want {
					t.Errorf("got %q, want %q", got, test.want)
				}
			})
		})
	}
}

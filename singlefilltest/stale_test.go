package singlefilltest_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/singlefilltest"
)

// A value that has been made stale is served as the windows allow: at once, if the load fails, or not
// at all.
func TestMakeStale(t *testing.T) {
	t.Parallel()
	revalidate := singlefill.Options[string]{StaleWhileRevalidate: time.Hour}
	ifError := singlefill.Options[string]{StaleIfError: time.Hour}
	near := singlefill.Options[string]{StaleIfError: time.Hour, Near: new(singlefill.Near)}
	for _, test := range []struct {
		name   string
		opts   singlefill.Options[string]
		source error
		want   string
		stale  bool
		err    error
	}{
		{"no window", singlefill.Options[string]{}, nil, "2", false, nil},
		{"no window, source down", singlefill.Options[string]{}, errDown, "", false, errDown},
		{"StaleWhileRevalidate", revalidate, nil, "1", true, nil},
		{"StaleWhileRevalidate, source down", revalidate, errDown, "1", true, nil},
		{"StaleIfError", ifError, nil, "2", false, nil},
		{"StaleIfError, source down", ifError, errDown, "1", true, nil},
		{"Near", near, nil, "2", false, nil},
		{"Near, source down", near, errDown, "1", true, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				cache := newCache(t, singlefilltest.Redis(t), &test.opts)
				source := serial(t)
				check(t, cache, source.Load, "1")
				singlefilltest.MakeStale(t, cache, "k")
				source.Fail(test.source)
				v, info, err := cache.GetOrLoadInfo(t.Context(), "k", source.Load)
				if v != test.want || info.Stale != test.stale || err != test.err {
					t.Errorf("GetOrLoad: %q, %+v, %v; want %q, stale: %v, %v", v, info, err, test.want, test.stale, test.err)
				}
				synctest.Wait() // for a refresh
				source.WantLoads(t, "k", 2)
			})
		})
	}
}

// MakeStale takes a remembered ErrNotFound for a value.
func TestMakeStale_NotFound(t *testing.T) {
	both(t, func(t *testing.T) {
		cache := newCache(t, singlefilltest.Redis(t), nil)
		source := singlefilltest.NewSource(t, upper)
		for n := range 2 {
			if _, err := cache.GetOrLoad(t.Context(), "none", source.Load); !errors.Is(err, singlefill.ErrNotFound) {
				t.Errorf("GetOrLoad: %v", err)
			}
			source.WantLoads(t, "none", n+1)
			singlefilltest.MakeStale(t, cache, "none")
		}
	})
}

// MakeStale ends the test if there is nothing to make stale, or if Redis does not answer.
func TestMakeStale_Fails(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		rdb := singlefilltest.Redis(t)
		cache := newCache(t, rdb, nil)
		want := func(want string) {
			t.Helper()
			wantReport(t, "fatal: singlefilltest: MakeStale: "+want, func(t testing.TB) {
				singlefilltest.MakeStale(t, cache, "k")
			})
		}
		want(`no value to serve under "k": ` + singlefill.ErrMiss.Error())
		redistest.Must(t, cache.Set(t.Context(), "k", "v"))
		resume := singlefilltest.Silence(t, rdb)
		want(`no value to serve under "k": singlefill: get: `)
		resume()
		time.Sleep(time.Second) // the breaker closes
		if v, err := cache.Get(t.Context(), "k"); v != "v" || err != nil {
			t.Errorf("Get: %q, %v", v, err)
		}
		singlefilltest.MakeStale(t, cache, "k")
		if _, err := cache.Get(t.Context(), "k"); err != singlefill.ErrMiss {
			t.Errorf("Get: %v", err)
		}
	})
}

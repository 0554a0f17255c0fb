package singlefilltest_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/singlefill/singlefill"
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

// Package singlefilltest helps to test programs that use package singlefill.
//
// A test of a handler or a Loader needs nothing from here: [singlefill.NewLocal] makes a cache that keeps every
// promise, in bubbles of [testing/synctest], too. A test of several processes, or of what happens without Redis, needs
// [Redis].
//
// [Redis] is an empty Redis for one test, without a server. A [Source] stands for the database, and
// counts its loads. Both work in a bubble of [testing/synctest], in which time.Sleep ages values at
// no cost, and synctest.Wait returns when all calls wait:
//
//	synctest.Test(t, func(t *testing.T) {
//		rdb := singlefilltest.Redis(t)
//		prices, err := singlefill.New(rdb, "prices", time.Hour, &singlefill.Options[int]{
//			StaleIfError: time.Hour,
//			Codec:        singlefilltest.Codec(t, nil),
//		})
//		if err != nil {
//			t.Fatal(err)
//		}
//		defer prices.Close()
//		source := singlefilltest.NewSource(t, func(context.Context, string) (int, error) { return 7, nil })
//		handler := shop{prices, source.Load}
//
//		check := func(want string, loads int) {
//			t.Helper()
//			if got := get(handler, "/tea"); got != want {
//				t.Errorf("got %q, want %q", got, want)
//			}
//			source.WantLoads(t, "/tea", loads)
//		}
//		check("7", 1) // cold: it loads
//		check("7", 1) // a hit
//
//		source.Fail(errors.New("price service is down"))
//		singlefilltest.MakeStale(t, prices, "/tea")
//		check("7 (stale)", 2)
//
//		source.Fail(nil)
//		singlefilltest.Silence(t, rdb) // Redis hangs
//		check("7", 3)                  // the source serves
//	})
//
// Here shop is a [net/http.Handler], and get returns the body of its answer. The whole of it, a table
// test and a stampede are in example_handler_test.go of this package.
//
// A test brings a value into the state that it needs:
//
//   - cold: by Delete of the cache.
//   - stale: by [MakeStale], or in a bubble by a sleep for its life.
//   - expired: in a bubble by a sleep for its life and the stale windows.
//
// A life is up to a tenth shorter than the ttl given to New ([singlefill.Options.Jitter]), and a hit
// may refresh a value early ([singlefill.Options.EarlyRefresh]). A test of exact times switches both
// off.
//
// # Lost fields
//
// A codec may lose a part of a value without an error: a field that is not exported or has the tag
// "-", or all fields beside an embedded type with a marshalling method. The loss shows at the first
// hit. [Codec] lets a test find it. A test that stores an Order with a field price then fails with
//
//	singlefilltest: Order.Items[2].price is lost: 42 became 0
package singlefilltest

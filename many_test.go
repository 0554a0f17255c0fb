package singlefill_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"weak"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

// A manySource has a ManyLoader whose answer is "value of key" for each key that it does not lack.
type manySource struct {
	cachetest.Count
	takes time.Duration
	lacks map[string]bool
	err   error

	mu    sync.Mutex
	calls [][]string // the keys of each, sorted
}

func (s *manySource) load(_ context.Context, keys []string) (map[string]string, error) {
	defer s.Begin()()
	s.mu.Lock()
	s.calls = append(s.calls, slices.Sorted(slices.Values(keys)))
	s.mu.Unlock()
	time.Sleep(s.takes)
	values := make(map[string]string)
	for _, key := range keys {
		if !s.lacks[key] {
			values[key] = valueOf(key)
		}
	}
	return values, s.err
}

// wantCalls wants the calls of the ManyLoader since the last one, in the order of their keys.
func (s *manySource) wantCalls(t testing.TB, what string, want ...[]string) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	slices.SortFunc(s.calls, slices.Compare)
	if !slices.EqualFunc(s.calls, want, slices.Equal) {
		t.Errorf("%s: the loader was called with %q, want %q", what, s.calls, want)
	}
	s.calls = nil
}

func valueOf(key string) string { return "value of " + key }

func valuesOf(keys []string) map[string]string {
	values := make(map[string]string)
	for _, key := range keys {
		values[key] = valueOf(key)
	}
	return values
}

// wantMany wants the values of keys, and no others, and no error.
func wantMany(t testing.TB, what string, got map[string]string, err error, keys ...string) {
	t.Helper()
	wantFound(t, what, got, keys...)
	if err != nil {
		t.Errorf("%s: %v", what, err)
	}
}

// wantFound is wantMany for a call with an error.
func wantFound(t testing.TB, what string, got map[string]string, keys ...string) {
	t.Helper()
	if want := valuesOf(keys); !maps.Equal(got, want) {
		t.Errorf("%s: got %q, want %q", what, got, want)
	}
}

// wantManyErrors wants an error for each of keys, and no others.
func wantManyErrors(t testing.TB, what string, err, want error, keys ...string) {
	t.Helper()
	var many *singlefill.ManyError
	if !errors.As(err, &many) || !slices.Equal(slices.Sorted(maps.Keys(many.Errs)), keys) || !errors.Is(err, want) {
		t.Errorf("%s: error %v, want %v for %q", what, err, want, keys)
		return
	}
	for key, err := range many.Errs {
		if !errors.Is(err, want) {
			t.Errorf("%s: %s: %v, want %v", what, key, err, want)
		}
	}
}

// manyKeys returns n keys, in order.
func manyKeys(n int) (keys []string) {
	for i := range n {
		keys = append(keys, fmt.Sprintf("k%04d", i))
	}
	return keys
}

// The loader gets the keys that Redis does not have, once each. What it leaves out does not exist,
// and that is remembered. If it returns ErrNotFound, wrapped too, none of its keys exists.
func TestGetOrLoadMany(t *testing.T) {
	t.Parallel()
	cachetest.UserEach(t, func(t *testing.T, rdb, _ redis.UniversalClient) {
		ctx := t.Context()
		c := cachetest.NewCache(t, rdb, &cachetest.Raw)
		redistest.Must(t, c.Set(ctx, "b", valueOf("b")))
		s := &manySource{lacks: map[string]bool{"none": true}}
		_, cluster := rdb.(*redis.ClusterClient)
		redistest.Await(t, "the client sees b", func() bool { _, err := c.Get(ctx, "b"); return err == nil })
		for round, want := range [][][]string{{{"a", "c", "none"}}, nil} {
			what := fmt.Sprint("call ", round)
			got, err := c.GetOrLoadMany(ctx, []string{"a", "b", "a", "c", "none", "b"}, s.load)
			wantMany(t, what, got, err, "a", "b", "c")
			if len(s.calls) > 1 && cluster { // keys on a master that is slow to answer
				s.calls = [][]string{slices.Sorted(slices.Values(slices.Concat(s.calls...)))}
			}
			s.wantCalls(t, what, want...)
			redistest.Await(t, "the client sees what was stored", func() bool {
				_, err := c.Get(ctx, "none")
				v, _ := c.Get(ctx, "a")
				return err == singlefill.ErrNotFound && v == valueOf("a")
			})
		}
		notFound := fmt.Errorf("shop: %w", singlefill.ErrNotFound)
		got, err := c.GetOrLoadMany(ctx, []string{"d", "e"}, cachetest.FailsMany[string](notFound))
		wantMany(t, "none exists", got, err)
		cachetest.WantGet(t, c, "d", "", singlefill.ErrNotFound)
	})
}

// A call for a hundred keys needs three round trips: to read, to lock and to store. Hits need one.
// No keys need none.
func TestGetOrLoadMany_RoundTrips(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, _ *miniredis.Miniredis, rdb *redis.Client) { // no command is late
		var trips atomic.Int64
		rdb.AddHook(redistest.Trips(func(cmds []redis.Cmder) error {
			if cmds[0].Name() != "hello" {
				trips.Add(1)
			}
			return nil
		}))
		c := cachetest.NewCache(t, rdb, &cachetest.Raw)
		s := new(manySource)
		get := func(keys []string) {
			t.Helper()
			got, err := c.GetOrLoadMany(t.Context(), keys, s.load)
			wantMany(t, "get", got, err, keys...)
		}
		get([]string{"x"}) // the server learns the scripts
		trips.Store(0)
		for _, row := range []struct {
			what  string
			keys  []string
			trips int64
		}{
			{"misses", manyKeys(100), 3},
			{"hits", manyKeys(100), 1},
			{"no keys", nil, 0},
		} {
			get(row.keys)
			if n := trips.Swap(0); n != row.trips {
				t.Errorf("%s: %d round trips, want %d", row.what, n, row.trips)
			}
		}
	})
}

// A failure of the loader is the failure of each of its keys. The other keys are returned.
func TestGetOrLoadMany_Failures(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		what string
		load singlefill.ManyLoader[string]
		want error // by errors.Is
		is   func(err error) bool
	}{
		{"error", (&manySource{err: cachetest.ErrSource}).load, cachetest.ErrSource, nil},
		{"panic", func(context.Context, []string) (map[string]string, error) { panic(cachetest.ErrSource) },
			cachetest.ErrSource, isPanic},
		{"panic with ErrNotFound", func(context.Context, []string) (map[string]string, error) { panic(singlefill.ErrNotFound) }, nil, isPanic},
		{"Goexit", func(context.Context, []string) (map[string]string, error) { runtime.Goexit(); return nil, nil }, nil, isPanic},
	} {
		t.Run(row.what, func(t *testing.T) {
			t.Parallel()
			_, rdb := redistest.StartMini(t)
			c := cachetest.NewCache(t, rdb, &cachetest.Raw)
			redistest.Must(t, c.Set(t.Context(), "had", valueOf("had")))
			got, err := c.GetOrLoadMany(t.Context(), []string{"a", "had", "b"}, row.load)
			wantFound(t, row.what, got, "had")
			if row.want != nil {
				wantManyErrors(t, row.what, err, row.want, "a", "b")
			}
			if row.is != nil && !row.is(err) {
				t.Errorf("error %v, want a PanicError", err)
			}
			s := new(manySource) // a failure is not remembered, and leaves no lock
			got, err = c.GetOrLoadMany(t.Context(), []string{"a", "had", "b"}, s.load)
			wantMany(t, "after that", got, err, "a", "had", "b")
			if stats := c.Stats(); stats.LoadErrors != 2 || row.is != nil && stats.LoadPanics != 2 {
				t.Errorf("%d errors and %d panics, want 2 of 2 keys", stats.LoadErrors, stats.LoadPanics)
			}
		})
	}
}

// A loader that returns a ManyError has failed for its keys only: their callers get its errors unchanged, and those
// in other processes a RemoteError. The other keys are stored.
//
//fault:failed-load
func TestGetOrLoadMany_SomeKeysFail(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		opts := singlefill.Options[string]{Codec: singlefill.Raw, Errors: map[string]error{"down": cachetest.ErrSource}}
		var infos []singlefill.LoadInfo
		traced := opts
		traced.Trace = &singlefill.Trace{LoadDone: func(_ context.Context, i singlefill.LoadInfo) { infos = append(infos, i) }}
		c, elsewhere := cachetest.NewCacheIn(t, rdb, "n", &traced), cachetest.NewCacheIn(t, rdb, "n", &opts)
		failure := fmt.Errorf("row: %w", cachetest.ErrSource)
		call := cachetest.GoGetMany(t.Context(), c, []string{"bad", "both", "gone", "good", "nil", "none"},
			func(_ context.Context, keys []string) (map[string]string, error) {
				time.Sleep(time.Second)
				return map[string]string{"good": valueOf("good"), "both": "v", "nil": valueOf("nil")},
					&singlefill.ManyError{Errs: map[string]error{
						"bad": failure, "both": failure, "gone": fmt.Errorf("row: %w", singlefill.ErrNotFound), "nil": nil,
					}}
			})
		synctest.Wait()
		joined := cachetest.GoGet(t.Context(), c, "bad", cachetest.MustNotLoad[string](t))
		away := cachetest.GoGet(t.Context(), elsewhere, "bad", cachetest.MustNotLoad[string](t))
		got, err := call.Result(t)
		wantFound(t, "the call", got, "good", "nil")
		wantManyErrors(t, "the call", err, failure, "bad", "both")
		joined.WantErr(t, failure)
		_, err = away.Result(t)
		if remote, ok := errors.AsType[*singlefill.RemoteError](err); !ok || !errors.Is(err, cachetest.ErrSource) || remote.Message != failure.Error() {
			t.Errorf("another process got %v, want a RemoteError", err)
		}
		for key, want := range map[string]error{
			"good": nil, "nil": nil, "gone": singlefill.ErrNotFound, "none": singlefill.ErrNotFound,
			"bad": singlefill.ErrMiss, "both": singlefill.ErrMiss,
		} {
			value := ""
			if want == nil {
				value = valueOf(key)
			}
			cachetest.WantGet(t, elsewhere, key, value, want)
		}
		synctest.Wait()
		for _, i := range infos {
			fails := i.Key == "bad" || i.Key == "both"
			if i.Keys != 6 || i.Stored == fails || fails && i.Err != failure {
				t.Errorf("LoadDone was called with %+v", i)
			}
		}
		if s := c.Stats(); s.LoadErrors != 2 || s.LoadsNotFound != 2 || s.Stored != 4 {
			t.Errorf("%d errors, %d not found, %d stored; want 2, 2, 4", s.LoadErrors, s.LoadsNotFound, s.Stored)
		}
	})
}

// A ManyLoader may return what another cache has returned. A ManyError without errors is none. A ManyError that is
// wrapped fails all keys.
//
//fault:failed-load
func TestGetOrLoadMany_ReturnsManyError(t *testing.T) {
	t.Parallel()
	_, rdb := redistest.StartMini(t)
	outer, inner := cachetest.NewCache(t, rdb, &cachetest.Raw), cachetest.NewCache(t, rdb, &cachetest.Raw)
	partly := func(_ context.Context, keys []string) (map[string]string, error) {
		return map[string]string{"a": valueOf("a")}, &singlefill.ManyError{Errs: map[string]error{"b": cachetest.ErrSource}}
	}
	got, err := outer.GetOrLoadMany(t.Context(), []string{"a", "b", "c"}, func(ctx context.Context, keys []string) (map[string]string, error) {
		return inner.GetOrLoadMany(ctx, keys, partly)
	})
	wantFound(t, "nested", got, "a")
	wantManyErrors(t, "nested", err, cachetest.ErrSource, "b")
	if many, ok := errors.AsType[*singlefill.ManyError](err); !ok || many.Errs["b"] != cachetest.ErrSource {
		t.Errorf("error %v, want the one of the inner load itself", err)
	}
	cachetest.WantGet(t, outer, "c", "", singlefill.ErrNotFound)

	for what, none := range map[string]error{"nil": (*singlefill.ManyError)(nil), "empty": new(singlefill.ManyError)} {
		got, err := outer.GetOrLoadMany(t.Context(), []string{what, what + "?"}, func(context.Context, []string) (map[string]string, error) {
			return map[string]string{what: valueOf(what)}, none
		})
		wantMany(t, what, got, err, what)
	}

	wrapped := fmt.Errorf("call: %w", &singlefill.ManyError{Errs: map[string]error{"d": cachetest.ErrSource}})
	got, err = outer.GetOrLoadMany(t.Context(), []string{"d", "e"}, func(context.Context, []string) (map[string]string, error) {
		return map[string]string{"e": valueOf("e")}, wrapped
	})
	wantFound(t, "wrapped", got)
	wantManyErrors(t, "wrapped", err, wrapped, "d", "e")
}

// A loader that passes on a ManyError of another cache has failed: what neither that names nor the map has fails with
// it, and is not remembered as not found. What is known of a key holds: its error, or its value.
//
//fault:other-cache
func TestGetOrLoadMany_ErrorOfAnotherCache(t *testing.T) {
	t.Parallel()
	_, rdb := redistest.StartMini(t)
	orgs := cachetest.NewCache(t, rdb, &cachetest.Raw)
	notFound := fmt.Errorf("org: %w", singlefill.ErrNotFound)
	many := func(err error, keys ...string) *singlefill.ManyError {
		errs := make(map[string]error)
		for _, key := range keys {
			errs[key] = err
		}
		return &singlefill.ManyError{Errs: errs}
	}
	passesOn := func(ids ...string) singlefill.ManyLoader[string] {
		return func(ctx context.Context, _ []string) (map[string]string, error) {
			_, err := orgs.GetOrLoadMany(ctx, ids, cachetest.FailsMany[string](cachetest.ErrSource))
			return nil, err
		}
	}
	gives := func(err error, keys ...string) singlefill.ManyLoader[string] {
		return func(context.Context, []string) (map[string]string, error) { return valuesOf(keys), err }
	}
	all := []string{"1", "2", "3"}
	for what, row := range map[string]struct {
		load   singlefill.ManyLoader[string]
		found  []string
		fails  []string
		absent []string
		want   error // of all that fail
	}{
		"other keys":               {load: passesOn("a", "b"), fails: all, want: cachetest.ErrSource},
		"some keys are equal":      {load: passesOn("1", "b"), fails: all, want: cachetest.ErrSource},
		"all its keys are equal":   {load: passesOn("1", "2"), fails: all, want: cachetest.ErrSource},
		"with values":              {load: gives(many(notFound, "b"), "1", "2"), found: all[:2], fails: all[2:], want: notFound},
		"names a key, and a value": {load: gives(many(cachetest.ErrSource, "1", "b"), "1", "2"), found: all[1:2], fails: []string{"1", "3"}, want: cachetest.ErrSource},
		"a key that has not failed": {load: gives(&singlefill.ManyError{Errs: map[string]error{"1": nil, "b": cachetest.ErrSource}}, "1"),
			found: all[:1], fails: all[1:], want: cachetest.ErrSource},
		"wrapped, with ErrNotFound": {load: gives(fmt.Errorf("orgs: %w", many(notFound, "1"))), fails: all, want: notFound},
		"joined, with ErrNotFound":  {load: gives(errors.Join(many(notFound, "b"), many(cachetest.ErrSource, "c"))), fails: all, want: notFound},
		"the error of a key":        {load: gives(many(many(notFound, "b"), "3"), "1"), found: all[:1], absent: all[1:2], fails: all[2:], want: notFound},
		"ErrNotFound of the keys":   {load: gives(many(notFound, "1", "2"), "3"), found: all[2:], absent: all[:2]},
	} {
		t.Run(what, func(t *testing.T) {
			users := cachetest.NewCache(t, rdb, &cachetest.Raw)
			got, err := users.GetOrLoadMany(t.Context(), all, row.load)
			wantFound(t, what, got, row.found...)
			if len(row.fails) > 0 {
				wantManyErrors(t, what, err, row.want, row.fails...)
			} else if err != nil {
				t.Error(err)
			}
			if t.Failed() { // each key that is not as it should be would be awaited
				return
			}
			for _, key := range row.fails {
				cachetest.WantGet(t, users, key, "", singlefill.ErrMiss)
			}
			for _, key := range row.absent {
				cachetest.WantGet(t, users, key, "", singlefill.ErrNotFound)
			}
			if s := users.Stats(); int(s.LoadErrors) != len(row.fails) || int(s.LoadsNotFound) != len(row.absent) {
				t.Errorf("%d errors, %d not found; want %d, %d", s.LoadErrors, s.LoadsNotFound, len(row.fails), len(row.absent))
			}
			redistest.Must(t, users.Set(t.Context(), "3", "old"))
			err = users.RefreshMany(t.Context(), all, row.load)
			if len(row.fails) > 0 {
				wantManyErrors(t, "RefreshMany", err, row.want, row.fails...)
				cachetest.WantGet(t, users, "3", "old", nil)
			} else if err != nil {
				t.Error(err)
			}
		})
	}
	users, failure := cachetest.NewCache(t, rdb, &cachetest.Raw), many(notFound, "b")
	if _, err := users.GetOrLoad(t.Context(), "1", cachetest.Fails[string](failure)); err != failure {
		t.Errorf("a Loader returned a ManyError: got %v", err)
	}
	cachetest.WantGet(t, users, "1", "", singlefill.ErrMiss)
}

// A loader that returns a key that it was not asked for has made a mistake, such as another spelling: the
// keys that it leaves out fail, and are not remembered as not found. What it was asked for is stored.
//
//fault:failed-load
func TestGetOrLoadMany_StrayKeys(t *testing.T) {
	t.Parallel()
	_, rdb := redistest.StartMini(t)
	for what, load := range map[string]singlefill.ManyLoader[string]{
		"another spelling": func(context.Context, []string) (map[string]string, error) {
			return map[string]string{"asked": valueOf("asked"), "foo": "v", "zoo": "v"}, nil
		},
		"another spelling in its keys": func(_ context.Context, keys []string) (map[string]string, error) {
			for i := range keys {
				keys[i] = strings.ToLower(keys[i])
			}
			return map[string]string{"asked": valueOf("asked"), "foo": "v"}, nil
		},
	} {
		c := cachetest.NewCache(t, rdb, &cachetest.Raw)
		got, err := c.GetOrLoadMany(t.Context(), []string{"Foo", "asked", "none"}, load)
		wantFound(t, what, got, "asked")
		many, ok := errors.AsType[*singlefill.ManyError](err)
		if !ok || len(many.Errs) != 2 {
			t.Fatalf("%s: error %v, want one of each of the other two keys", what, err)
		}
		for _, key := range []string{"Foo", "none"} {
			cachetest.WantErrText(t, key, many.Errs[key], `"foo"`)
			cachetest.WantGet(t, c, key, "", singlefill.ErrMiss)
		}
		cachetest.WantGet(t, c, "asked", valueOf("asked"), nil)
		cachetest.WantGet(t, c, "foo", "", singlefill.ErrMiss)
		redistest.Must(t, c.Delete(t.Context(), "asked"))
		got, err = c.GetOrLoadMany(t.Context(), []string{"asked"}, load)
		wantMany(t, "none is left out", got, err, "asked")
	}
}

func isPanic(err error) bool {
	_, is := errors.AsType[*singlefill.PanicError](err)
	return is
}

// The text of a ManyError has the number of keys and the distinct errors, but no key. It unwraps to the error of each.
func TestManyError(t *testing.T) {
	t.Parallel()
	two := &singlefill.ManyError{Errs: map[string]error{"z": cachetest.ErrSource, "a": singlefill.ErrClosed}}
	many := &singlefill.ManyError{Errs: make(map[string]error)}
	for i := range 9 {
		many.Errs[fmt.Sprint("secret", i)] = fmt.Errorf("error %d", min(i, 4))
	}
	for want, err := range map[string]error{
		"1 key has an error: the source is down":                                        &singlefill.ManyError{Errs: map[string]error{"k": cachetest.ErrSource}},
		"2 keys have errors: 1 × singlefill: cache is closed; 1 × the source is down":   two,
		"9 keys have errors: 5 × error 4; 1 × error 0; 1 × error 1; and 2 other errors": many,
	} {
		if got := err.Error(); got != "singlefill: "+want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	if !errors.Is(two, cachetest.ErrSource) || !errors.Is(two, singlefill.ErrClosed) || errors.Is(two, singlefill.ErrMiss) {
		t.Error("errors.Is does not see the errors of the keys")
	}
}

// Single calls and calls for many keys meet in the same fills, here and in other processes.
func TestGetOrLoadMany_MeetsSingleCalls(t *testing.T) {
	for _, processes := range []int{1, 2} {
		cachetest.RunInBubble(t, fmt.Sprintf("%d processes", processes), func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
			caches := cachetest.NewCaches(t, m, "ns", processes, &cachetest.Raw)
			one, many := caches[0], caches[processes-1]
			single := cachetest.NewSource[string](t)
			s := &manySource{takes: 2 * time.Second}

			first, a := single.Begin(t.Context(), t, one, "a")
			call := cachetest.GoGetMany(t.Context(), many, []string{"a", "b"}, s.load)
			time.Sleep(time.Second)
			second := cachetest.GoGet(t.Context(), one, "b", cachetest.MustNotLoad[string](t))
			time.Sleep(2 * time.Second)
			if len(call.Answer) > 0 {
				t.Error("the call does not wait for the single one")
			}
			a.Give(valueOf("a"))
			call.Want(t, valuesOf([]string{"a", "b"}))
			first.Want(t, valueOf("a"))
			second.Want(t, valueOf("b"))
			s.wantCalls(t, "the call", []string{"b"})
			single.Want(t, 1)
		})
	}
}

// A loader gets MaxBatch keys at most. Its calls run at the same time, if MaxLoads allows.
func TestGetOrLoadMany_MaxBatch(t *testing.T) {
	for _, row := range []struct {
		maxLoads int
		most     int64
	}{{-1, 3}, {2, 2}, {1, 1}} {
		cachetest.RunInBubble(t, fmt.Sprintf("MaxLoads %d", row.maxLoads), func(t *testing.T, _ *miniredis.Miniredis, rdb *redis.Client) {
			c := cachetest.NewCache(t, rdb, &singlefill.Options[string]{Codec: singlefill.Raw, MaxBatch: 4,
				MaxLoads: row.maxLoads})
			s := &manySource{takes: time.Second}
			keys := manyKeys(10)
			got, err := c.GetOrLoadMany(t.Context(), keys, s.load)
			wantMany(t, "the call", got, err, keys...)
			s.wantCalls(t, "the call", keys[:4], keys[4:8], keys[8:])
			if most := s.Most.Load(); most != row.most {
				t.Errorf("%d calls of the loader at once, want %d", most, row.most)
			}
		})
	}
}

// At the end of its context a call returns the values found, and the error of the context for the rest.
// The loads go on.
func TestGetOrLoadMany_Deadline(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, _ *miniredis.Miniredis, rdb *redis.Client) {
		c := cachetest.NewCache(t, rdb, &cachetest.Raw)
		redistest.Must(t, c.Set(t.Context(), "had", valueOf("had")))
		s := &manySource{takes: 10 * time.Second}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		begun := time.Now()
		got, err := c.GetOrLoadMany(ctx, []string{"a", "had", "b"}, s.load)
		cachetest.WantElapsed(t, "the call", begun, time.Second)
		wantFound(t, "the call", got, "had")
		wantManyErrors(t, "the call", err, context.DeadlineExceeded, "a", "b")
		time.Sleep(10 * time.Second)
		got, err = c.GetMany(t.Context(), []string{"a", "b"})
		wantMany(t, "later", got, err, "a", "b")
	})
}

// A Delete, Set or Expire during a load refuses the value of its key only.
func TestGetOrLoadMany_Invalidation(t *testing.T) {
	all := maps.Clone(invalidations)
	all["Clear"] = func(ctx context.Context, c *singlefill.Cache[string], _ string) error { return c.Clear(ctx) }
	for what, invalidate := range all {
		for _, processes := range []int{1, 2} {
			cachetest.RunInBubble(t, fmt.Sprintf("%s, %d processes", what, processes), func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
				caches := cachetest.NewCaches(t, m, "ns", processes, &cachetest.Raw)
				loads, invalidates := caches[0], caches[processes-1]
				s := &manySource{takes: time.Second}
				early := cachetest.GoGetMany(t.Context(), loads, []string{"a", "b"}, s.load)
				time.Sleep(time.Second / 2)
				redistest.Must(t, invalidate(t.Context(), invalidates, "a"))
				late := cachetest.GoGetMany(t.Context(), loads, []string{"a", "b"}, (&manySource{}).load)
				early.Want(t, valuesOf([]string{"a", "b"}))
				_, err := late.Result(t)
				redistest.Must(t, err)
				fenced := int64(1)
				if what == "Clear" {
					fenced = 2
				}
				if n := loads.Stats().Fenced; n != fenced {
					t.Errorf("%d values refused, want %d", n, fenced)
				}
				if v, _ := invalidates.Get(t.Context(), "b"); v != valueOf("b") {
					t.Errorf("b is %q, want the value loaded", v)
				}
			})
		}
	}
}

// Values that are stale are returned at once, and refreshed by one call of the loader behind.
func TestGetOrLoadMany_Refresh(t *testing.T) {
	for _, memory := range []*singlefill.Near{nil, {}} {
		cachetest.RunInBubble(t, fmt.Sprintf("near %v", memory != nil), func(t *testing.T, _ *miniredis.Miniredis, rdb *redis.Client) {
			opts := cachetest.StaleOptions(time.Minute, 0)
			opts.Near = memory
			c := cachetest.NewCache(t, rdb, opts)
			s := new(manySource)
			keys := manyKeys(50)
			for range 3 { // the last one reads from memory
				_, err := c.GetOrLoadMany(t.Context(), keys, s.load)
				redistest.Must(t, err)
				synctest.Wait()
			}
			if hits := c.Stats().NearHits; memory != nil && hits < int64(len(keys)) {
				t.Errorf("%d hits in memory, want all keys of a call", hits)
			}
			s.wantCalls(t, "fresh", keys)
			time.Sleep(cachetest.StaleLife + time.Second)
			s.takes = time.Second
			begun := time.Now()
			got, err := c.GetOrLoadMany(t.Context(), keys, s.load)
			cachetest.WantElapsed(t, "the call", begun, 0)
			wantMany(t, "the call", got, err, keys...)
			time.Sleep(5 * time.Second)
			s.wantCalls(t, "stale", keys)
			if n := c.Stats().Refreshes; n != 50 {
				t.Errorf("%d keys refreshed, want 50", n)
			}
		})
	}
}

// Options.LoadMany refreshes together what calls of both kinds have found, and nothing else.
func TestLoadMany(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, _ *miniredis.Miniredis, rdb *redis.Client) {
		opts := cachetest.StaleOptions(time.Minute, 0)
		together, s := new(manySource), new(manySource)
		opts.LoadMany = together.load
		c := cachetest.NewCache(t, rdb, opts)
		keys := manyKeys(10)
		_, err := c.GetOrLoadMany(t.Context(), keys, s.load)
		redistest.Must(t, err)
		s.wantCalls(t, "missing", keys)
		time.Sleep(cachetest.StaleLife + time.Second)
		for _, some := range [][]string{keys[:4], keys[2:9]} { // with a key that is missing
			_, err := c.GetOrLoadMany(t.Context(), append([]string{some[0] + " missing"}, some...), s.load)
			redistest.Must(t, err)
			time.Sleep(time.Millisecond)
		}
		cachetest.GoGet(t.Context(), c, keys[9], cachetest.MustNotLoad[string](t)).Want(t, valueOf(keys[9]))
		time.Sleep(time.Second)
		together.wantCalls(t, "stale", keys)
		s.wantCalls(t, "missing", []string{keys[0] + " missing"}, []string{keys[2] + " missing"})
		if n := c.Stats().Refreshes; n != 10 {
			t.Errorf("%d keys refreshed, want 10", n)
		}
	})
}

// A ManyLoader may call the cache for other keys: its place serves the nested load. For its own keys
// the call is recursive.
func TestGetOrLoadMany_Nested(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, _ *miniredis.Miniredis, rdb *redis.Client) {
		c := cachetest.NewCache(t, rdb, &singlefill.Options[string]{Codec: singlefill.Raw, MaxLoads: 1})
		inner := new(manySource)
		got, err := c.GetOrLoadMany(t.Context(), []string{"a", "b"}, func(ctx context.Context, keys []string) (map[string]string, error) {
			for what, call := range map[string]func() error{
				"GetOrLoad":     func() error { _, err := c.GetOrLoad(ctx, "b", cachetest.Gives("b")); return err },
				"GetOrLoadMany": func() error { _, err := c.GetOrLoadMany(ctx, []string{"x", "a"}, inner.load); return err },
			} {
				if err := call(); !errors.Is(err, singlefill.ErrRecursive) {
					t.Errorf("%s of a key of the load: %v, want ErrRecursive", what, err)
				}
			}
			nested, err := c.GetOrLoadMany(ctx, []string{"x", "y"}, inner.load)
			wantMany(t, "nested", nested, err, "x", "y")
			return map[string]string{"a": valueOf("a"), "b": valueOf("b")}, nil
		})
		wantMany(t, "the call", got, err, "a", "b")
	})
}

// The context of the loader ends when no caller may have any of its values, and not before.
func TestGetOrLoadMany_Superseded(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, _ *miniredis.Miniredis, rdb *redis.Client) {
		c := cachetest.NewCache(t, rdb, &cachetest.Raw)
		ctx, cancel := context.WithCancel(t.Context())
		var inside context.Context
		call := cachetest.GoGetMany(ctx, c, []string{"a", "b"}, func(ctx context.Context, keys []string) (map[string]string, error) {
			inside = ctx
			<-ctx.Done()
			return nil, ctx.Err()
		})
		synctest.Wait()
		cancel()
		_, _ = call.Result(t)
		for _, key := range []string{"a", "b"} {
			synctest.Wait()
			if inside.Err() != nil {
				t.Errorf("the context has ended before %s was deleted", key)
			}
			redistest.Must(t, c.Delete(t.Context(), key))
		}
		synctest.Wait()
		if inside.Err() == nil {
			t.Error("the load goes on though nobody may have its values")
		}
	})
}

// After a function of Trace has panicked in the middle of a call, every key can be read, and a Delete ends the load,
// since no caller waits for it.
func TestGetOrLoadMany_PanicOfTrace(t *testing.T) {
	for _, panics := range []string{"Hit", "BadValue"} {
		cachetest.RunInBubble(t, panics, func(t *testing.T, _ *miniredis.Miniredis, rdb *redis.Client) {
			var loading atomic.Int64
			var once sync.Once
			boom := func(of string) {
				if of == panics {
					once.Do(func() { panic(of) })
				}
			}
			c := cachetest.NewCacheIn(t, rdb, "ns", &singlefill.Options[string]{Trace: &singlefill.Trace{
				Hit:      func(context.Context, string) { boom("Hit") },
				BadValue: func(context.Context, string, error) { boom("BadValue") },
			}})
			redistest.Must(t, c.Set(t.Context(), "found", "old"))
			redistest.Must(t, rdb.Set(t.Context(), "ns:{bad}", "garbage", time.Hour).Err())
			keys := []string{"bad", "found", "missed"}
			_, err := c.GetOrLoadMany(t.Context(), keys, func(ctx context.Context, _ []string) (map[string]string, error) {
				loading.Add(1)
				defer loading.Add(-1)
				<-ctx.Done()
				return nil, ctx.Err()
			})
			if p, ok := errors.AsType[*singlefill.PanicError](err); !ok || p.Value != panics {
				t.Errorf("the call has returned %v, want a PanicError of %s", err, panics)
			}
			synctest.Wait()
			redistest.Must(t, c.Delete(t.Context(), keys...))
			synctest.Wait()
			if loading.Load() > 0 {
				t.Error("the load goes on though nobody may have its values")
			}
			for _, key := range keys {
				cachetest.GoGet(t.Context(), c, key, cachetest.Gives("next")).Want(t, "next")
			}
		})
	}
}

// While a call tells Trace of its hits, others may load the keys that it misses, and so may a function of Trace.
func TestGetOrLoadMany_TraceThatCalls(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, _ *miniredis.Miniredis, rdb *redis.Client) {
		var c *singlefill.Cache[string]
		c = cachetest.NewCache(t, rdb, &singlefill.Options[string]{Trace: &singlefill.Trace{Hit: func(_ context.Context, key string) {
			if key == "found" {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				if _, err := c.GetOrLoad(ctx, "missed", cachetest.Gives("by Trace")); err != nil {
					t.Errorf("GetOrLoad in Trace: %v", err)
				}
			}
		}}})
		redistest.Must(t, c.Set(t.Context(), "found", valueOf("found")))
		got, err := c.GetOrLoadMany(t.Context(), []string{"found", "missed"}, new(manySource).load)
		redistest.Must(t, err)
		wantFound(t, "the call", got, "found", "missed")
	})
}

// What becomes of a key is decided when its own load ends, or its own StaleAfter is over, however long the other
// keys of the call take.
func TestGetOrLoadMany_SlowNeighbour(t *testing.T) {
	for name, at := range map[string]struct {
		stale time.Duration
		s     *manySource
	}{
		"its load fails":     {0, &manySource{takes: time.Second, err: cachetest.ErrSource}},
		"StaleAfter is over": {time.Second, &manySource{takes: 20 * time.Second}},
	} {
		cachetest.RunInBubble(t, name, func(t *testing.T, _ *miniredis.Miniredis, rdb *redis.Client) {
			o := cachetest.StaleOptions(0, 5*time.Second)
			o.StaleAfter, o.LoadTimeout = at.stale, time.Hour
			c := cachetest.NewCache(t, rdb, o)
			redistest.Must(t, c.Set(t.Context(), "old", valueOf("old")))
			time.Sleep(cachetest.StaleLife + time.Second)
			slow := cachetest.GoGet(t.Context(), c, "slow", cachetest.Takes(20*time.Second, valueOf("slow"), nil))
			synctest.Wait()
			got, err := c.GetOrLoadMany(t.Context(), []string{"old", "slow"}, at.s.load)
			wantMany(t, "the call", got, err, "old", "slow")
			slow.Want(t, valueOf("slow"))
		})
	}
}

// A key that is deleted during its load is loaded again at once, whatever the other keys of the call wait for.
func TestGetOrLoadMany_DeletedKey(t *testing.T) {
	for name, anew := range map[string]bool{"GetOrLoadMany": false, "RefreshMany": true} {
		cachetest.RunInBubble(t, name, func(t *testing.T, _ *miniredis.Miniredis, rdb *redis.Client) {
			c := cachetest.NewCache(t, rdb, &cachetest.Raw)
			s := &manySource{takes: time.Second}
			cachetest.GoGet(t.Context(), c, "slow", cachetest.Takes(20*time.Second, "late", nil))
			cachetest.GoGet(t.Context(), c, "k", cachetest.Takes(3*time.Second, "old", nil))
			synctest.Wait()
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			time.AfterFunc(time.Second, func() { redistest.Must(t, c.Delete(context.Background(), "k")) })
			var err error
			if keys := []string{"slow", "k"}; anew {
				err = c.RefreshMany(ctx, keys, s.load)
			} else {
				var got map[string]string
				got, err = c.GetOrLoadMany(ctx, keys, s.load)
				wantFound(t, "the call", got, "k")
			}
			wantManyErrors(t, "the call", err, context.DeadlineExceeded, "slow")
			s.wantCalls(t, "the call", []string{"k"})
			cachetest.WantGet(t, c, "k", valueOf("k"), nil)
		})
	}
}

// RefreshMany loads all keys together, also those that are fresh. Keys that fail keep their values, and a key that
// the loader leaves out does not exist any more.
func TestRefreshMany(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := cachetest.NewCacheIn(t, rdb, "ns", &singlefill.Options[string]{Codec: singlefill.Raw})
		keys := manyKeys(4)
		redistest.Must(t, c.SetMany(t.Context(), map[string]string{keys[0]: "old", keys[1]: "old", keys[2]: "old"}))
		src := manySource{takes: time.Second, lacks: map[string]bool{keys[2]: true}}
		src.err = &singlefill.ManyError{Errs: map[string]error{keys[1]: cachetest.ErrSource}}
		ended := make(chan error, 1)
		go func() { ended <- c.RefreshMany(t.Context(), append(keys, keys...), src.load) }()
		synctest.Wait()
		single := make(chan error, 1)
		go func() { single <- c.Refresh(t.Context(), keys[0], cachetest.MustNotLoad[string](t)) }()
		synctest.Wait()
		got, err := c.GetMany(t.Context(), keys[:3])
		if err != nil || !maps.Equal(got, map[string]string{keys[0]: "old", keys[1]: "old", keys[2]: "old"}) {
			t.Errorf("during the load: got %q, %v; want the old values", got, err)
		}
		wantManyErrors(t, "the call", <-ended, cachetest.ErrSource, keys[1])
		redistest.Must(t, <-single)
		src.wantCalls(t, "the call", keys)
		for i, want := range []string{valueOf(keys[0]), "old", "", valueOf(keys[3])} {
			v, err := c.Get(t.Context(), keys[i])
			if v != want || (err == singlefill.ErrNotFound) != (want == "") {
				t.Errorf("%s: got %q, %v; want %q", keys[i], v, err, want)
			}
		}
	})
}

// GetMany returns the values that Redis has, without a load. Absence is no error.
func TestGetMany(t *testing.T) {
	t.Parallel()
	redistest.EachCache(t, func(t *testing.T, rdb redis.UniversalClient) {
		ctx := t.Context()
		c := cachetest.NewCache(t, rdb, &cachetest.Raw)
		redistest.Must(t, c.SetMany(ctx, map[string]string{"a": valueOf("a"), "b": valueOf("b")}))
		cachetest.GoGet(ctx, c, "none", cachetest.Fails[string](singlefill.ErrNotFound)).WantErr(t, singlefill.ErrNotFound)
		got, err := c.GetMany(ctx, []string{"a", "missing", "b", "a", "none"})
		wantMany(t, "the call", got, err, "a", "b")
		got, err = c.GetMany(ctx, nil)
		wantMany(t, "no keys", got, err)
		if s := c.Stats(); s.Loads != 1 || s.Hits != 3 || s.Misses != 2 {
			t.Errorf("%d loads, %d hits, %d misses; want 1, 3, 2", s.Loads, s.Hits, s.Misses)
		}
	})
}

// An error of Redis is the error of each key, since these calls have no source to fall back on. Clear returns it, too.
func TestGetMany_RedisAway(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		link, rdb := redistest.StartMiniLink(t)
		c := cachetest.NewCache(t, rdb, &cachetest.Raw)
		link.BlackHole(true)
		got, err := c.GetMany(t.Context(), []string{"a", "b"})
		wantFound(t, "GetMany", got)
		wantManyErrors(t, "GetMany", err, context.DeadlineExceeded, "a", "b")
		err = c.SetMany(t.Context(), map[string]string{"a": "1", "b": "2"})
		wantManyErrors(t, "SetMany", err, context.DeadlineExceeded, "a", "b")
		if err := c.Clear(t.Context()); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Clear: %v, want the end of RedisTimeout", err)
		}
		link.BlackHole(false)
	})
}

// SetMany is Set for each key: it supersedes loads, and follows TTLFunc. Delete removes all keys that it is given, and
// no other.
func TestSetMany(t *testing.T) {
	t.Parallel()
	cachetest.UserEach(t, func(t *testing.T, rdb, look redis.UniversalClient) {
		ctx, ns := t.Context(), redistest.Namespace(t)
		c := cachetest.NewCacheIn(t, rdb, ns, &singlefill.Options[string]{Codec: singlefill.Raw, TTLFunc: func(_ string, v string) time.Duration {
			if v == "not kept" {
				return 0
			}
			return time.Minute
		}})
		s := cachetest.NewSource[string](t)
		call, load := s.Begin(ctx, t, c, "a")
		values := valuesOf(append(manyKeys(300), "a"))
		redistest.Must(t, c.SetMany(ctx, values))
		load.Give("loaded before")
		call.Want(t, "loaded before")
		c2 := cachetest.NewCacheIn(t, rdb, ns, &cachetest.Raw)
		redistest.Await(t, "the load has ended", func() bool { return c.Stats().Loading == 0 && c.Stats().Fenced == 1 })
		keys := slices.Sorted(maps.Keys(values))
		for key := range values {
			if ttl := look.PTTL(ctx, ns+":{"+key+"}").Val(); ttl <= 0 || ttl > time.Minute {
				t.Errorf("%s lives for %v, want a minute", key, ttl)
			}
		}
		got, err := c2.GetMany(ctx, keys)
		wantMany(t, "after SetMany", got, err, keys...)
		redistest.Must(t, c.SetMany(ctx, map[string]string{keys[0]: "not kept"}))
		redistest.Await(t, "the value is gone", func() bool { _, err := c2.Get(ctx, keys[0]); return err == singlefill.ErrMiss })
		deleted := keys[1:299] // several batches, all nodes of a cluster
		redistest.Must(t, c.Delete(ctx, append(deleted[:len(deleted):len(deleted)], "was never there", keys[1])...))
		redistest.Await(t, "most are gone", func() bool {
			got, err = c2.GetMany(ctx, keys)
			return err == nil && len(got) <= len(keys)-299
		})
		wantFound(t, "after Delete", got, keys[299:]...)
	})
}

// A value that cannot be encoded keeps no other one from being stored.
func TestSetMany_BadValue(t *testing.T) {
	t.Parallel()
	_, rdb := redistest.StartMini(t)
	c := cachetest.NewCache[any](t, rdb, &singlefill.Options[any]{Codec: singlefill.JSON})
	err := c.SetMany(t.Context(), map[string]any{"good": "v", "bad": make(chan int)})
	var many *singlefill.ManyError
	if !errors.As(err, &many) || len(many.Errs) != 1 || many.Errs["bad"] == nil {
		t.Errorf("error %v, want one of the bad key", err)
	}
	cachetest.WantGet[any](t, c, "good", "v", nil)
}

// A ManyLoader that never returns costs the keys that it was called for LoadTimeout, which their errors
// name. A key of the same call that has waited for another process is loaded by another call.
func TestGetOrLoadMany_HangingLoader(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		opts := cachetest.Raw
		opts.RedisTimeout, opts.LockTTL, opts.LoadTimeout = time.Second, 5*time.Second, 12*time.Second
		c := cachetest.NewCacheIn(t, rdb, "ns", &opts)
		other := cachetest.NewCaches(t, m, "ns", 1, &cachetest.Raw)[0]
		src := cachetest.NewSource[string](t)
		elsewhere, held := src.Begin(t.Context(), t, other, "waits")
		hang := make(chan struct{})
		hanging := manyKeys(50)
		call := cachetest.GoGetMany(t.Context(), c, append(hanging, "waits"), func(_ context.Context, keys []string) (map[string]string, error) {
			if !slices.Contains(keys, "waits") {
				<-hang
			}
			return map[string]string{"waits": valueOf("waits")}, nil
		})
		time.Sleep(13 * time.Second)
		redistest.Must(t, other.Delete(t.Context(), "waits"))
		got, err := call.Result(t)
		wantFound(t, "the call", got, "waits")
		wantManyErrors(t, "the call", err, context.DeadlineExceeded, hanging...)
		for _, err := range err.(*singlefill.ManyError).Errs {
			if want := "singlefill: the load took longer than LoadTimeout (12s): context deadline exceeded"; err.Error() != want {
				t.Errorf("error %q, want %q", err, want)
			}
		}
		close(hang)
		held.Give("v1")
		elsewhere.Want(t, "v1")
	})
}

// Locks are held until the values are stored, however long encoding and sending them takes: until then no other process
// loads.
func TestGetOrLoadMany_SlowStore(t *testing.T) {
	for name, x := range map[string]struct {
		keys   int
		value  string
		encode time.Duration // of one value
		send   time.Duration // of 1 MB
	}{
		"codec":   {keys: 256, value: "v", encode: 25 * time.Millisecond},
		"network": {keys: 30, value: strings.Repeat("x", 600_000), send: 500 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				opts := &singlefill.Options[string]{
					Codec:   cachetest.BadCodec{Codec: singlefill.Raw, OnMarshal: func(any) error { time.Sleep(x.encode); return nil }},
					LockTTL: 5 * time.Second, LoadTimeout: 30 * time.Second, RedisTimeout: 500 * time.Millisecond,
				}
				here := cachetest.NewCacheIn(t, rdb, "ns", opts)
				there := cachetest.NewCaches(t, m, "ns", 1, opts)[0]
				rdb.AddHook(redistest.Trips(func(cmds []redis.Cmder) error {
					time.Sleep(time.Duration(redistest.Size(cmds)) * x.send / 1_000_000)
					return nil
				}))
				var loads atomic.Int64
				load := cachetest.OneByOne(func(context.Context, string) (string, error) { loads.Add(1); return x.value, nil })
				keys := manyKeys(x.keys)
				var both sync.WaitGroup
				for _, c := range []*singlefill.Cache[string]{here, there} {
					both.Go(func() {
						if _, err := c.GetOrLoadMany(t.Context(), keys, load); err != nil {
							t.Error(err)
						}
					})
					synctest.Wait()
				}
				both.Wait()
				if n := loads.Load(); n != int64(len(keys)) {
					t.Errorf("%d loads of %d keys", n, len(keys))
				}
			})
		})
	}
}

// A load that goes on keeps nothing of the other keys that its call has read.
func TestGetOrLoadMany_ReleasesHits(t *testing.T) {
	t.Parallel()
	_, rdb := redistest.StartMini(t)
	c := cachetest.NewCacheIn[*string](t, rdb, "ns", nil)
	redistest.Must(t, c.Set(t.Context(), "hit", new("v")))
	loads, end := make(chan bool), make(chan bool)
	defer close(end)
	ctx, leave := context.WithCancel(t.Context())
	go func() { <-loads; leave() }()
	found, err := c.GetOrLoadMany(ctx, []string{"hit", "miss"}, func(context.Context, []string) (map[string]*string, error) {
		close(loads)
		<-end
		return nil, nil
	})
	if err == nil || found["hit"] == nil {
		t.Fatalf("got %v, %v; want the hit and an error", found, err)
	}
	hit := weak.Make(found["hit"])
	clear(found)
	redistest.Await(t, "the value is collected while the load runs", func() bool {
		runtime.GC()
		return hit.Value() == nil
	})
}

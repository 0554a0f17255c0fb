// Package stale_test tests what the cache does with values that are stale, or about to be.
package stale_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/redistest"
	"github.com/singlefill/singlefill/internal/tests/cachetest"
)

func TestMain(m *testing.M) { redistest.Main(m) }

// windowKinds are a minute of each window alone.
var windowKinds = []struct {
	name    string
	opts    func() *singlefill.Options[string]
	ifError bool
}{
	{"while revalidate", func() *singlefill.Options[string] { return cachetest.StaleOptions(time.Minute, 0) }, false},
	{"if error", func() *singlefill.Options[string] { return cachetest.StaleOptions(0, time.Minute) }, true},
}

// staleTrace is Events.Trace with what concerns stale values.
func staleTrace(e *cachetest.Events) *singlefill.Trace {
	trace := e.Trace()
	trace.Stale = func(_ context.Context, key string, i singlefill.ValueInfo) {
		e.Add("stale %s %t, %v old, %v", key, i.Stale, i.Age, i.Err)
	}
	trace.LoadDone = func(_ context.Context, i singlefill.LoadInfo) {
		e.Add("done %s %v, stored %t, refresh %t", i.Key, i.Err, i.Stored, i.Refresh)
	}
	return trace
}

// The windows end to the millisecond, even if Redis keeps the entry for longer.
//
// A replica may go on showing what is over.
func TestStale_WindowsToTheMillisecond(t *testing.T) {
	const minute, tick = time.Minute, time.Millisecond
	for _, w := range []struct {
		name     string
		swr, sie time.Duration
	}{
		{"neither", 0, 0},
		{"while revalidate", minute, 0},
		{"if error", 0, minute},
		{"if error the longer", minute, 2 * minute},
		{"if error the shorter", 2 * minute, minute},
		{"a millisecond each", tick, 2 * tick},
	} {
		for _, prolonged := range []bool{false, true} {
			name := fmt.Sprintf("%s, prolonged %t", w.name, prolonged)
			cachetest.RunInBubble(t, name, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				c := cachetest.NewCacheIn(t, rdb, "ns", cachetest.StaleOptions(w.swr, w.sie))
				probes := []time.Duration{-tick, 0, w.swr - tick, w.swr, w.sie - tick, w.sie, 3 * minute}
				slices.Sort(probes)
				probes = slices.Compact(probes)
				begun := time.Now()
				for _, late := range probes {
					key := late.String()
					redistest.Must(t, c.Set(t.Context(), key, "old"))
					if kept := m.TTL("ns:{" + key + "}"); kept != cachetest.StaleLife+max(w.swr, w.sie) {
						t.Errorf("Redis keeps it for %v", kept)
					}
					if prolonged {
						m.SetTTL("ns:{"+key+"}", 24*time.Hour)
					}
				}
				for _, late := range probes {
					time.Sleep(time.Until(begun.Add(cachetest.StaleLife + late)))
					src := &cachetest.TimedSource{Err: cachetest.ErrSource}
					v, err := c.Get(t.Context(), late.String())
					r := cachetest.Ask(t.Context(), c, late.String(), src.Load)
					switch {
					case late < 0:
						r.Want(t, "fresh", cachetest.Answer{Value: "old", Info: singlefill.ValueInfo{Age: cachetest.StaleLife + late}})
						src.WantLoads(t, "fresh", 0)
					case late < w.swr:
						r.WantOld(t, "within StaleWhileRevalidate: "+late.String(), late, nil)
						src.WantLoads(t, "a refresh", 1)
					case late < w.sie:
						r.WantOld(t, "within StaleIfError: "+late.String(), late, cachetest.ErrSource)
						src.WantLoads(t, "within StaleIfError", 1)
					default:
						r.Want(t, "too old: "+late.String(), cachetest.Answer{Err: cachetest.ErrSource})
						src.WantLoads(t, "too old", 1)
					}
					if late < 0 || late < w.swr {
						cachetest.WantValue(t, v, err, "old")
					} else if err != singlefill.ErrMiss {
						t.Errorf("Get %v late: %q, %v; want ErrMiss", late, v, err)
					}
				}
			})
		}
	}
}

// A stale ErrNotFound is served and refreshed like a value.
func TestStale_NotFound(t *testing.T) {
	for _, kind := range windowKinds {
		cachetest.RunInBubble(t, kind.name, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
			opts := kind.opts()
			opts.RetryAfter = -1
			c := cachetest.NewCache(t, rdb, opts)
			cachetest.Ask(t.Context(), c, "k", cachetest.Fails[string](singlefill.ErrNotFound)).Want(t, "loaded", cachetest.Answer{Err: singlefill.ErrNotFound})
			time.Sleep(time.Minute)
			want := cachetest.Answer{Err: singlefill.ErrNotFound, Info: singlefill.ValueInfo{Stale: true, Age: time.Minute}}
			if kind.ifError {
				want.Info.Err = cachetest.ErrSource
			} else if _, err := c.Get(t.Context(), "k"); err != singlefill.ErrNotFound {
				t.Errorf("Get: %v", err)
			}
			cachetest.Ask(t.Context(), c, "k", cachetest.Fails[string](cachetest.ErrSource)).Want(t, "the load fails", want)
			synctest.Wait()
			r := cachetest.Ask(t.Context(), c, "k", cachetest.Gives("appeared"))
			if kind.ifError {
				r.WantFresh(t, "the load succeeds", "appeared")
			} else {
				r.Want(t, "a refresh", want)
			}
			synctest.Wait()
			cachetest.Ask(t.Context(), c, "k", cachetest.MustNotLoad[string](t)).WantFresh(t, "refreshed", "appeared")
		})
	}
}

// A stale value is returned in place of every kind of failure, with the reason.
func TestStaleIfError_EveryFailure(t *testing.T) {
	const late = 10 * time.Second
	for _, test := range []struct {
		name      string
		load      singlefill.Loader[string] // nil: another process is loading
		elsewhere error                     // how that ends
		deadline  time.Duration
		took      time.Duration // negative: that, and up to a poll
		want      error         // the reason itself
		is        func(err error) bool
	}{
		{name: "an error", load: cachetest.Fails[string](cachetest.ErrSource), want: cachetest.ErrSource},
		{name: "an error that looks like the caller's", load: cachetest.Fails[string](context.Canceled), want: context.Canceled},
		{
			name: "a panic", load: func(context.Context, string) (string, error) { panic("boom") },
			is: func(err error) bool {
				var p *singlefill.PanicError
				return errors.As(err, &p) && p.Value == "boom"
			},
		},
		{
			name: "Goexit", load: func(context.Context, string) (string, error) { runtime.Goexit(); return "", nil },
			is: func(err error) bool { return errors.As(err, new(*singlefill.PanicError)) },
		},
		{
			name: "LoadTimeout", load: func(context.Context, string) (string, error) { time.Sleep(30 * time.Minute); return "too late", nil }, took: time.Minute,
			is: func(err error) bool {
				return errors.Is(err, context.DeadlineExceeded) && err != context.DeadlineExceeded
			},
		},
		{
			name: "the caller's deadline", load: (&cachetest.TimedSource{Takes: 10 * time.Second, Value: "new"}).Load, deadline: time.Second, took: time.Second,
			want: context.DeadlineExceeded,
		},
		{
			name: "a failure in another process", elsewhere: cachetest.ErrSource, took: -time.Second,
			is: func(err error) bool {
				var remote *singlefill.RemoteError
				return errors.As(err, &remote) && *remote == singlefill.RemoteError{Namespace: remote.Namespace, Key: "k", Message: cachetest.ErrSource.Error()}
			},
		},
		{
			name: "the caller's deadline while another process loads", deadline: time.Second, took: time.Second,
			want: context.DeadlineExceeded,
		},
	} {
		cachetest.RunInBubble(t, test.name, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
			var e cachetest.Events
			opts := cachetest.StaleOptions(0, 5*time.Minute)
			there := cachetest.NewCaches(t, m, "ns", 1, opts)[0]
			opts.Trace = &singlefill.Trace{Stale: staleTrace(&e).Stale, Miss: e.Trace().Miss, Hit: e.Trace().Hit}
			here := cachetest.NewCaches(t, m, "ns", 1, opts)[0]
			cachetest.SetStale(t, there, "k", "old", late)
			ctx := t.Context()
			if test.load == nil {
				src := cachetest.NewSource[string](t)
				_, load := src.Begin(t.Context(), t, there, "k")
				if test.elsewhere != nil {
					time.AfterFunc(time.Second, func() { load.Fail(test.elsewhere) })
				}
				test.load = cachetest.MustNotLoad[string](t)
			}
			if test.deadline > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, test.deadline)
				defer cancel()
			}
			r := cachetest.Ask(ctx, here, "k", test.load)
			if test.is == nil && r.Info.Err != test.want || test.is != nil && !test.is(r.Info.Err) {
				t.Errorf("the reason is %v", r.Info.Err)
			}
			if over := r.Took + test.took; test.took < 0 && over >= 0 && over < 320*time.Millisecond {
				test.took = r.Took
			}
			r.Want(t, "the call", cachetest.Answer{
				Value: "old", Info: singlefill.ValueInfo{Stale: true, Age: cachetest.StaleLife + late + test.took, Err: r.Info.Err}, Took: test.took,
			})
			e.Want(t, "the call", "miss k", fmt.Sprintf("stale k true, %v old, %v", r.Info.Age, r.Info.Err))
			if s := here.Stats(); s.Stale != 1 || s.StaleOnError != 1 || s.Misses != 1 || s.Hits != 0 || s.Refreshes != 0 {
				t.Errorf("%+v, want one stale value because of an error", s)
			}
			time.Sleep(time.Hour) // the load that was left behind is over
		})
	}
}

// A caller that waits for a refresh gets the stale value if the refresh fails, and its own copy: it does
// not share the value with the reader that began the refresh.
//
// The refresh began within StaleWhileRevalidate and runs on into the time when callers wait for it.
func TestStaleIfError_FailedRefresh(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		value := map[string]int{"a": 1}
		opts := singlefill.Options[map[string]int]{StaleWhileRevalidate: time.Second, StaleIfError: time.Minute}
		c := cachetest.OldCache(t, rdb, opts, value, 900*time.Millisecond)
		reader, info, err := c.GetOrLoadInfo(t.Context(), "k", cachetest.Takes(time.Second, value, cachetest.ErrSource))
		if err != nil || cachetest.Of(info) != (singlefill.ValueInfo{Stale: true, Age: 1900 * time.Millisecond}) {
			t.Fatalf("the reader that begins it got %v, %+v, %v", reader, info, err)
		}
		time.Sleep(200 * time.Millisecond)
		begun := time.Now()
		waiter, info, err := c.GetOrLoadInfo(t.Context(), "k", cachetest.MustNotLoad[map[string]int](t))
		cachetest.WantElapsed(t, "the caller that waits has its answer", begun, 800*time.Millisecond)
		want := singlefill.ValueInfo{Stale: true, Age: 2900 * time.Millisecond, Err: cachetest.ErrSource}
		if err != nil || cachetest.Of(info) != want {
			t.Fatalf("the caller that waits got %v, %+v, %v, want %+v", waiter, info, err, want)
		}
		reader["a"] = 2
		if !maps.Equal(waiter, value) {
			t.Error("two callers have one map")
		}
	})
}

// A cancelled caller gets no stale value, and the load goes on.
func TestStaleIfError_CancelledCaller(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := cachetest.NewCache(t, rdb, cachetest.StaleOptions(0, time.Minute))
		cachetest.SetStale(t, c, "k", "old", 0)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		r := cachetest.Ask(ctx, c, "k", (&cachetest.TimedSource{Takes: 10 * time.Second, Value: "new"}).Load)
		r.Want(t, "cancelled", cachetest.Answer{Err: context.Canceled, Took: time.Second})
		if s := c.Stats(); s.Stale != 0 || s.StaleOnError != 0 {
			t.Errorf("%+v, want nothing stale", s)
		}
		time.Sleep(9 * time.Second)
		synctest.Wait()
		cachetest.Ask(t.Context(), c, "k", cachetest.MustNotLoad[string](t)).WantFresh(t, "the load has gone on", "new")
	})
}

// A stale value is not served past its window, however long the load takes.
func TestStaleIfError_LoadPastTheWindow(t *testing.T) {
	const left, tick = time.Second, time.Millisecond // when the load begins
	for _, test := range []struct {
		name string
		ends time.Duration // the load, or the caller's patience, before the window's end
	}{{"just before the end", tick}, {"at the end", 0}, {"after the end", -time.Second}} {
		for _, deadline := range []bool{false, true} {
			name := fmt.Sprintf("%s, deadline %t", test.name, deadline)
			cachetest.RunInBubble(t, name, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				c := cachetest.NewCacheIn(t, rdb, "ns", cachetest.StaleOptions(0, time.Minute))
				cachetest.SetStale(t, c, "k", "old", time.Minute-left)
				m.SetTTL("ns:{k}", 24*time.Hour)
				src := &cachetest.TimedSource{Takes: left - test.ends, Err: cachetest.ErrSource}
				failure, ctx := cachetest.ErrSource, t.Context()
				if deadline {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, src.Takes)
					defer cancel()
					src.Takes += time.Second
					failure = context.DeadlineExceeded
				}
				want := cachetest.Answer{Err: failure, Took: left - test.ends}
				if test.ends > 0 {
					want = cachetest.Answer{
						Value: "old", Took: want.Took,
						Info: singlefill.ValueInfo{Stale: true, Age: cachetest.StaleLife + time.Minute - test.ends, Err: failure},
					}
				}
				cachetest.Ask(ctx, c, "k", src.Load).Want(t, test.name, want)
			})
		}
	}
}

// A deleted value is not served to callers that arrive after the Delete, even if Redis stops
// answering then.
//
// A fill of the deleted value waits for a slot at that time, and nothing can be proved any more.
func TestStaleIfError_DeletedValue(t *testing.T) {
	for name, opts := range map[string]singlefill.Options[string]{
		"of a load":    {StaleIfError: time.Minute},
		"of a refresh": {StaleWhileRevalidate: time.Minute},
	} {
		cachetest.RunInBubble(t, name, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
			opts.MaxLoads = 1
			c := cachetest.OldCache(t, rdb, opts, "old", time.Second)
			slow := cachetest.NewSource[string](t)
			other, busy := slow.Begin(t.Context(), t, c, "other")
			before := cachetest.GoAsk(t.Context(), c, "k", cachetest.Fails[string](cachetest.ErrSource))
			synctest.Wait()
			redistest.Must(t, c.Delete(t.Context(), "k"))
			m.SetError("LOADING dataset")
			after := cachetest.GoAsk(t.Context(), c, "k", cachetest.Fails[string](cachetest.ErrSource))
			time.Sleep(5 * time.Second)
			busy.Give("")
			if a := <-after; a.Err == nil {
				t.Errorf("the caller after the Delete got %+v", a)
			}
			<-before
			other.Want(t, "")
		})
	}
}

// Expires is the end of a value's life, whichever way it came. It is in the past for a stale one.
func TestInfo_Expires(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		const life, window = cachetest.StaleLife, time.Hour
		for name, near := range map[string]*singlefill.Near{"Redis": nil, "Near": {}} {
			opts := singlefill.Options[string]{
				Jitter: -1, EarlyRefresh: -1, StaleWhileRevalidate: window / 2, StaleIfError: window, NotFoundTTL: life, Near: near,
			}
			c, other := cachetest.NewCacheIn(t, rdb, name, &opts), cachetest.NewCacheIn(t, rdb, name, &opts)
			expires := func(c *singlefill.Cache[string], key string, load singlefill.Loader[string], want time.Time) {
				t.Helper()
				_, info, err := c.GetOrLoadInfo(t.Context(), key, load)
				if !info.Expires.Equal(want) || err != nil && err != singlefill.ErrNotFound {
					t.Errorf("%s: %s expires %v from now, %v, want %v", name, key, time.Until(info.Expires), err, time.Until(want))
				}
			}
			time.Sleep(time.Second - time.Duration(time.Now().Nanosecond())) // an entry has milliseconds
			end := time.Now().Add(life)
			for range 3 {
				expires(c, "k", cachetest.Gives("v"), end)
				expires(c, "none", cachetest.Fails[string](singlefill.ErrNotFound), end)
				time.Sleep(time.Second)
			}
			expires(other, "k", cachetest.MustNotLoad[string](t), end)
			time.Sleep(life)
			fails := cachetest.Fails[string](cachetest.ErrSource)
			expires(c, "k", fails, end) // served, and refreshed behind
			synctest.Wait()
			expires(c, "k", fails, end)
			time.Sleep(window / 2)
			expires(other, "k", fails, end) // in place of the error

			redistest.Must(t, c.Set(t.Context(), "k", "v"))
			expires(c, "k", fails, time.Now().Add(life))
			redistest.Must(t, other.Expire(t.Context(), "k"))
			expired := time.Now()
			time.Sleep(10 * time.Second)
			_, info, err := c.GetOrLoadInfo(t.Context(), "k", func(ctx context.Context, key string) (string, error) {
				if _, old, ok := singlefill.Previous[string](ctx, key); !ok || !old.Expires.Equal(expired) {
					t.Errorf("%s: Previous expired %v ago, %t", name, time.Since(old.Expires), ok)
				}
				return "v", nil
			})
			if !info.Stale || !info.Expires.Equal(expired) || err != nil {
				t.Errorf("%s: an expired value: %+v, %v", name, info, err)
			}
			cachetest.PutEntry(t, rdb, name, "ahead", entry.Entry{ // by a clock that is ahead
				NotFound: true, Expired: true, WrittenAt: time.Now(), FreshUntil: time.Now().Add(time.Hour),
			}, time.Hour)
			expires(c, "ahead", fails, time.Now())
			expires(c, "ahead", fails, time.Now())
		}
	})
}

// A caller that waits for another process gets the stale value that the key holds when the load
// fails.
func TestStaleIfError_KeyChangesDuringTheWait(t *testing.T) {
	cachetest.InBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		fleet := cachetest.NewCaches(t, m, "ns", 2, cachetest.StaleOptions(0, time.Minute))
		here, there := fleet[0], fleet[1]
		src := cachetest.NewSource[string](t)
		begin := func() (*cachetest.HeldLoad[string], <-chan cachetest.Answer) {
			_, load := src.Begin(t.Context(), t, there, "k")
			waits := cachetest.GoAsk(t.Context(), here, "k", src.Load)
			time.Sleep(time.Second)
			return load, waits
		}
		load, waits := begin() // of nothing
		cachetest.PutEntry(t, rdb, "ns", "k", entry.Entry{FreshUntil: time.Now(), WrittenAt: time.Now(), Payload: []byte("spare")}, time.Hour)
		time.Sleep(time.Second)
		load.Fail(cachetest.ErrSource)
		r := cachetest.Receive(t, "a reply", waits)
		if !r.Info.Stale || r.Info.Err == nil || r.Value != "spare" || r.Err != nil {
			t.Errorf("a stale value has come: got %+v, want it, and no sooner than at the failure", r)
		}

		cachetest.SetStale(t, there, "k", "old", 0)
		load, waits = begin()
		redistest.Must(t, rdb.Del(t.Context(), "ns:{k}").Err())
		time.Sleep(time.Second)
		load.Fail(cachetest.ErrSource)
		if r := cachetest.Receive(t, "a reply", waits); r.Err == nil || r.Info != (singlefill.ValueInfo{}) {
			t.Errorf("the stale value has gone: got %+v, want the failure", r)
		}
	})
}

// within is how long the caches of these tests wait when they have an old value.
const within = 50 * time.Millisecond

// inSlowSource runs a test with a cache that has an expired value "old" under "k".
func inSlowSource(t *testing.T, run func(t *testing.T, c *singlefill.Cache[string], rdb *redis.Client)) {
	cachetest.InBubble(t, func(t *testing.T, _ *miniredis.Miniredis, rdb *redis.Client) {
		opts := singlefill.Options[string]{StaleIfError: time.Hour, StaleAfter: within}
		run(t, cachetest.OldCache(t, rdb, opts, "old", time.Second), rdb)
	})
}

// wantOldAfter calls GetOrLoad and checks that it returns the old value after d.
func wantOldAfter(t *testing.T, c *singlefill.Cache[string], d time.Duration, load singlefill.Loader[string]) {
	t.Helper()
	begun := time.Now()
	v, info, err := c.GetOrLoadInfo(t.Context(), "k", load)
	if v != "old" || err != nil || !info.Stale || info.Err != context.DeadlineExceeded {
		t.Errorf("%q, %+v, %v; want the old value, and that StaleAfter is the reason", v, info, err)
	}
	cachetest.WantElapsed(t, "GetOrLoad returned", begun, d)
}

// With an old value at hand, callers of a source that hangs wait until the load is StaleAfter old.
// The load goes on, and its value is served when it has arrived.
func TestStaleAfter_SlowSource(t *testing.T) {
	inSlowSource(t, func(t *testing.T, c *singlefill.Cache[string], _ *redis.Client) {
		slow := cachetest.Takes(10*time.Second, "new", nil)
		wantOldAfter(t, c, within, slow)
		wantOldAfter(t, c, 0, cachetest.MustNotLoad[string](t)) // the load has been in flight for StaleAfter
		time.Sleep(20 * time.Millisecond)
		var callers sync.WaitGroup
		for range 100 {
			callers.Go(func() { wantOldAfter(t, c, 0, cachetest.MustNotLoad[string](t)) })
		}
		callers.Wait()
		time.Sleep(10 * time.Second)
		v, info, err := c.GetOrLoadInfo(t.Context(), "k", cachetest.MustNotLoad[string](t))
		if v != "new" || info.Stale || err != nil {
			t.Errorf("after the load: %q, %+v, %v", v, info, err)
		}
		if s := c.Stats(); s.Loads != 1 || s.StaleOnError != 102 {
			t.Errorf("%d loads, %d stale values; want 1, 102", s.Loads, s.StaleOnError)
		}
	})
}

// A load that ends within StaleAfter is waited for, whether it succeeds or fails. Without an old value, or
// with one beyond StaleIfError, callers wait for any load.
func TestStaleAfter_Waits(t *testing.T) {
	boom := errors.New("boom")
	for name, test := range map[string]struct {
		key    string
		passes time.Duration // before the call
		takes  time.Duration
		value  string
		err    error
		want   string
	}{
		"value": {"k", 0, within / 2, "new", nil, "new"}, "error": {"k", 0, within / 2, "", boom, "old"},
		"no old value": {"cold", 0, 10 * time.Second, "new", nil, "new"}, "too old": {"k", 2 * time.Hour, 10 * time.Second, "new", nil, "new"},
	} {
		t.Run(name, func(t *testing.T) {
			inSlowSource(t, func(t *testing.T, c *singlefill.Cache[string], _ *redis.Client) {
				time.Sleep(test.passes)
				v, info, err := c.GetOrLoadInfo(t.Context(), test.key, cachetest.Takes(test.takes, test.value, test.err))
				if v != test.want || err != nil || info.Err != test.err || info.Stale != (test.want == "old") {
					t.Errorf("%q, %+v, %v; want %q", v, info, err, test.want)
				}
			})
		})
	}
}

// A caller that waits for a load in another process gets the old value after StaleAfter, too.
func TestStaleAfter_OtherProcess(t *testing.T) {
	inSlowSource(t, func(t *testing.T, c *singlefill.Cache[string], rdb *redis.Client) {
		other := cachetest.NewCacheIn(t, rdb, "ns", &singlefill.Options[string]{StaleIfError: time.Hour})
		var loading sync.WaitGroup
		loading.Go(func() {
			_, _ = other.GetOrLoad(t.Context(), "k", cachetest.Takes(10*time.Second, "new", nil))
		})
		synctest.Wait()
		wantOldAfter(t, c, within, cachetest.MustNotLoad[string](t))
		loading.Wait()
	})
}

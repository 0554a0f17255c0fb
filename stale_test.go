package singlefill_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/singlefill/singlefill"
	"github.com/singlefill/singlefill/internal/entry"
	"github.com/singlefill/singlefill/internal/redistest"
)

// staleLife is the life of every entry, unless a test says otherwise.
const staleLife = time.Hour

// staleOptions are two windows of a Raw cache of which nothing is random.
func staleOptions(whileRevalidate, ifError time.Duration) *singlefill.Options[string] {
	return &singlefill.Options[string]{
		Codec: singlefill.Raw, Jitter: -1, EarlyRefresh: -1, StaleWhileRevalidate: whileRevalidate, StaleIfError: ifError,
	}
}

// windowKinds are a minute of each window alone.
var windowKinds = []struct {
	name    string
	opts    func() *singlefill.Options[string]
	ifError bool
}{
	{"while revalidate", func() *singlefill.Options[string] { return staleOptions(time.Minute, 0) }, false},
	{"if error", func() *singlefill.Options[string] { return staleOptions(0, time.Minute) }, true},
}

// setStale stores a value and returns when it has been stale for late.
func setStale(t testing.TB, c *singlefill.Cache[string], key, value string, late time.Duration) {
	t.Helper()
	if err := c.Set(t.Context(), key, value); err != nil {
		t.Fatal(err)
	}
	time.Sleep(staleLife + late)
}

// oldCache returns a cache whose values live for a second. Its key k has been stale for late.
func oldCache[T any](t *testing.T, rdb *redis.Client, opts singlefill.Options[T], value T, late time.Duration) *singlefill.Cache[T] {
	t.Helper()
	opts.Jitter = -1
	c, err := singlefill.New(rdb, "ns", time.Second, &opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if err := c.Set(t.Context(), "k", value); err != nil {
		t.Fatal(err)
	}
	time.Sleep(time.Second + late)
	return c
}

// wantOld wants the value that setStale stored, at once, stale for late; err is the reason.
func (a answer) wantOld(t testing.TB, what string, late time.Duration, err error) {
	t.Helper()
	a.want(t, what, answer{value: "old", info: singlefill.ValueInfo{Stale: true, Age: staleLife + late, Err: err}})
}

// wantRemote is wantOld with the failure of another process.
func (a answer) wantRemote(t testing.TB, what string, late time.Duration, text string) {
	t.Helper()
	var remote *singlefill.RemoteError
	if !errors.As(a.info.Err, &remote) || remote.Message != text {
		t.Errorf("%s: the reason is %v, want a RemoteError %q", what, a.info.Err, text)
	}
	a.wantOld(t, what, late, a.info.Err)
}

// wantFresh wants a value that was stored at this instant, at once.
func (a answer) wantFresh(t testing.TB, what, value string) {
	t.Helper()
	a.want(t, what, answer{value: value})
}

// staleTrace is events.trace with what concerns stale values.
func staleTrace(e *events) *singlefill.Trace {
	trace := e.trace()
	trace.Stale = func(_ context.Context, key string, i singlefill.ValueInfo) {
		e.add("stale %s %t, %v old, %v", key, i.Stale, i.Age, i.Err)
	}
	trace.LoadDone = func(_ context.Context, i singlefill.LoadInfo) {
		e.add("done %s %v, stored %t, refresh %t", i.Key, i.Err, i.Stored, i.Refresh)
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
			t.Run(fmt.Sprintf("%s, prolonged %t", w.name, prolonged), func(t *testing.T) {
				inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
					ns := redistest.Namespace(t)
					c := newCacheIn(t, rdb, ns, staleOptions(w.swr, w.sie))
					probes := []time.Duration{-tick, 0, w.swr - tick, w.swr, w.sie - tick, w.sie, 3 * minute}
					slices.Sort(probes)
					probes = slices.Compact(probes)
					begun := time.Now()
					for _, late := range probes {
						key := late.String()
						if err := c.Set(t.Context(), key, "old"); err != nil {
							t.Fatal(err)
						}
						if kept := m.TTL(ns + ":{" + key + "}"); kept != staleLife+max(w.swr, w.sie) {
							t.Errorf("Redis keeps it for %v", kept)
						}
						if prolonged {
							m.SetTTL(ns+":{"+key+"}", 24*time.Hour)
						}
					}
					for _, late := range probes {
						time.Sleep(time.Until(begun.Add(staleLife + late)))
						src := &countedSource{err: errSource}
						v, err := c.Get(t.Context(), late.String())
						r := ask(t.Context(), c, late.String(), src.load)
						switch {
						case late < 0:
							r.want(t, "fresh", answer{value: "old", info: singlefill.ValueInfo{Age: staleLife + late}})
							src.wantLoads(t, "fresh", 0)
						case late < w.swr:
							r.wantOld(t, "within StaleWhileRevalidate: "+late.String(), late, nil)
							src.wantLoads(t, "a refresh", 1)
						case late < w.sie:
							r.wantOld(t, "within StaleIfError: "+late.String(), late, errSource)
							src.wantLoads(t, "within StaleIfError", 1)
						default:
							r.want(t, "too old: "+late.String(), answer{err: errSource})
							src.wantLoads(t, "too old", 1)
						}
						if late < 0 || late < w.swr {
							wantValue(t, v, err, "old")
						} else if err != singlefill.ErrMiss {
							t.Errorf("Get %v late: %q, %v; want ErrMiss", late, v, err)
						}
					}
				})
			})
		}
	}
}

// The windows of an entry begin when its own life ends.
func TestStale_WindowsFollowEachLife(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ns := redistest.Namespace(t)
		opts := staleOptions(time.Minute, 2*time.Minute)
		opts.TTLFunc = func(key, _ string) time.Duration {
			if key == "own life" {
				return 10 * time.Minute
			}
			return staleLife
		}
		opts.Jitter = 0.5
		c := newCacheIn(t, rdb, ns, opts)
		const keys = 200
		lives := make(map[time.Duration]bool)
		for i := range keys {
			key := fmt.Sprint(i)
			ask(t.Context(), c, key, gives("old"))
			life := m.TTL(ns+":{"+key+"}") - 2*time.Minute
			if lives[life] = true; life <= staleLife/2 || life > staleLife {
				t.Errorf("a life of %v, want from half an hour to an hour", life)
			}
		}
		if len(lives) < keys/2 {
			t.Errorf("%d keys have only %d different lives", keys, len(lives))
		}
		for _, key := range []string{"own life", "k"} {
			ask(t.Context(), c, key, gives("old"))
			life := m.TTL(ns+":{"+key+"}") - 2*time.Minute
			if key == "own life" && (life <= 5*time.Minute || life > 10*time.Minute) {
				t.Errorf("a life of %v, want from 5 to 10 minutes", life)
			}
			begun := time.Now()
			for _, late := range []time.Duration{-time.Millisecond, 0, 2*time.Minute - time.Millisecond, 2 * time.Minute} {
				time.Sleep(time.Until(begun.Add(life + late)))
				want := answer{value: "old", info: singlefill.ValueInfo{Age: life + late, Stale: late >= 0}}
				switch late {
				case 2*time.Minute - time.Millisecond:
					want.info.Err = errSource
				case 2 * time.Minute:
					want = answer{err: errSource}
				}
				if late == 0 { // no refresh: that would be another life
					v, err := c.Get(t.Context(), key)
					wantValue(t, v, err, "old")
					continue
				}
				ask(t.Context(), c, key, fails[string](errSource)).want(t, fmt.Sprint(key, " ", late, " late"), want)
			}
		}
	})
}

// Redis keeps an entry for its life and the longer window.
func TestStale_TTLInRedis(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		for _, w := range []struct{ swr, sie time.Duration }{{time.Minute, 0}, {0, time.Minute}, {time.Second, time.Minute}, {time.Minute, time.Second}} {
			ns := redistest.Namespace(t)
			opts := staleOptions(w.swr, w.sie)
			opts.TTLFunc = func(key string, _ string) time.Duration {
				switch key {
				case "short":
					return time.Millisecond
				case "for ever":
					return math.MaxInt64
				}
				return staleLife
			}
			c := newCacheIn(t, rdb, ns, opts)
			for key, life := range map[string]time.Duration{
				"set": staleLife, "loaded": staleLife, "none": time.Minute, "short": time.Millisecond, "for ever": math.MaxInt64 - time.Minute,
			} {
				switch key {
				case "set":
					_ = c.Set(t.Context(), key, "v")
				case "none":
					_, _ = c.GetOrLoad(t.Context(), key, fails[string](singlefill.ErrNotFound))
				default:
					_, _ = c.GetOrLoad(t.Context(), key, gives("v"))
				}
				if kept := m.TTL(ns + ":{" + key + "}"); kept != (life + time.Minute).Truncate(time.Millisecond) {
					t.Errorf("%s: kept for %v, want %v and a minute", key, kept, life)
				}
			}
		}
	})
}

// A stale ErrNotFound is served and refreshed like a value.
func TestStale_NotFound(t *testing.T) {
	for _, kind := range windowKinds {
		t.Run(kind.name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				opts := kind.opts()
				opts.RetryAfter = -1
				c := newCache(t, rdb, opts)
				ask(t.Context(), c, "k", fails[string](singlefill.ErrNotFound)).want(t, "loaded", answer{err: singlefill.ErrNotFound})
				time.Sleep(time.Minute)
				want := answer{err: singlefill.ErrNotFound, info: singlefill.ValueInfo{Stale: true, Age: time.Minute}}
				if kind.ifError {
					want.info.Err = errSource
				} else if _, err := c.Get(t.Context(), "k"); err != singlefill.ErrNotFound {
					t.Errorf("Get: %v", err)
				}
				ask(t.Context(), c, "k", fails[string](errSource)).want(t, "the load fails", want)
				synctest.Wait()
				r := ask(t.Context(), c, "k", gives("appeared"))
				if kind.ifError {
					r.wantFresh(t, "the load succeeds", "appeared")
				} else {
					r.want(t, "a refresh", want)
				}
				synctest.Wait()
				ask(t.Context(), c, "k", mustNotLoad[string](t)).wantFresh(t, "refreshed", "appeared")
			})
		})
	}
}

// Empty values are served stale like any other.
func TestStale_EmptyValues(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		testEmptyServedStale(t, newCache(t, rdb, staleOptions(staleLife, 0)), "")
		testEmptyServedStale(t, newCache(t, rdb, &singlefill.Options[string]{StaleWhileRevalidate: staleLife}), "")
		testEmptyServedStale[*int](t, newCache(t, rdb, &singlefill.Options[*int]{StaleWhileRevalidate: staleLife}), nil)
		testEmptyServedStale[[]byte](t, newCache(t, rdb, &singlefill.Options[[]byte]{StaleWhileRevalidate: staleLife}), nil)
		testEmptyServedStale[any](t, newCache(t, rdb, &singlefill.Options[any]{StaleWhileRevalidate: staleLife}), nil)
	})
}

func testEmptyServedStale[T any](t *testing.T, c *singlefill.Cache[T], empty T) {
	loads := 0
	load := func(context.Context, string) (T, error) { loads++; return empty, nil }
	for n := 1; n <= 2; n++ {
		v, info, err := c.GetOrLoadInfo(t.Context(), "k", load)
		wantValue(t, v, err, empty)
		synctest.Wait()
		if info.Stale != (n == 2) || loads != n {
			t.Errorf("%T: %+v and %d loads", empty, info, loads)
		}
		time.Sleep(staleLife)
	}
}

// A stale value that cannot be decoded is a miss.
func TestStale_ValueThatCannotBeDecoded(t *testing.T) {
	for _, kind := range windowKinds {
		t.Run(kind.name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				ns := redistest.Namespace(t)
				opts := kind.opts()
				opts.Codec = nil // MsgPack
				c := newCacheIn(t, rdb, ns, opts)
				data, err := entry.Entry{FreshUntil: time.Now(), WrittenAt: time.Now(), Payload: []byte{0xc1}}.Encode()
				if err != nil {
					t.Fatal(err)
				}
				if err := rdb.Set(t.Context(), ns+":{k}", data, time.Minute).Err(); err != nil {
					t.Fatal(err)
				}
				src := &countedSource{err: errSource, takes: time.Second}
				for n := range int64(2) { // no RetryAfter: there is nothing to serve
					ask(t.Context(), c, "k", src.load).want(t, "the load fails", answer{err: errSource, took: src.takes})
					src.wantLoads(t, "nothing to serve", n+1)
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
				defer cancel()
				ask(ctx, c, "k", src.load).want(t, "a deadline", answer{err: context.DeadlineExceeded, took: time.Millisecond})
				time.Sleep(src.takes)
				synctest.Wait()
				ask(t.Context(), c, "k", gives("new")).wantFresh(t, "the load succeeds", "new")
				if s := c.Stats(); s.BadValues != 4 || s.Stale != 0 || s.Refreshes != 0 || s.Misses != 3 {
					t.Errorf("%+v, want four bad values, and three calls answered by a load", s)
				}
			})
		})
	}
}

// A caller that arrives after a Delete gets no value from before it, neither stale nor loaded.
func TestDelete_StaleValue(t *testing.T) {
	for _, kind := range windowKinds {
		for _, fail := range []error{nil, errSource} {
			t.Run(fmt.Sprintf("%s, the load fails: %v", kind.name, fail), func(t *testing.T) {
				inBubble(t, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
					fleet := newCaches(t, m, redistest.Namespace(t), 2, kind.opts())
					here, there := fleet[0], fleet[1]
					src := newSource[string](t)
					setStale(t, here, "k", "old", 0)
					first := goAsk(t.Context(), here, "k", src.load)
					load := src.next(t)
					if err := there.Delete(t.Context(), "k"); err != nil {
						t.Fatal(err)
					}
					ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
					defer cancel()
					// This process looks at its lock after 10 ms, and does not know of the Delete before.
					ask(ctx, here, "k", gives("new")).want(t, "a later caller that leaves", answer{
						err: context.DeadlineExceeded, took: 5 * time.Millisecond,
					})
					later := goAsk(t.Context(), here, "k", gives("new"))
					synctest.Wait()
					load.ends <- ending[string]{value: "older", err: fail}
					receive(t, "a reply", later).wantFresh(t, "a later caller that stays", "new")
					if r := receive(t, "a reply", first); r.err != nil || r.value == "new" {
						t.Errorf("the caller before it got %+v", r)
					}
				})
			})
		}
	}
}

// A stale value is returned in place of every kind of failure, with the reason.
func TestStaleIfError_EveryFailure(t *testing.T) {
	const late = 10 * time.Second
	elsewhere := func(t *testing.T, there *singlefill.Cache[string], end error) {
		src := newSource[string](t)
		goGet(t.Context(), there, "k", src.load)
		load := src.next(t)
		if end != nil {
			time.AfterFunc(time.Second, func() { load.fail(end) })
		}
	}
	for _, test := range []struct {
		name      string
		load      singlefill.Loader[string] // nil: another process is loading
		elsewhere error                     // how that ends
		deadline  time.Duration
		took      time.Duration // negative: that, and up to a poll
		is        func(err error) bool
	}{
		{name: "an error", load: fails[string](errSource), is: func(err error) bool { return err == errSource }},
		{name: "an error that looks like the caller's", load: fails[string](context.Canceled), is: func(err error) bool { return err == context.Canceled }},
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
			name: "the caller's deadline", load: (&countedSource{takes: 10 * time.Second, value: "new"}).load, deadline: time.Second, took: time.Second,
			is: func(err error) bool { return err == context.DeadlineExceeded },
		},
		{
			name: "a failure in another process", elsewhere: errSource, took: -time.Second,
			is: func(err error) bool {
				var remote *singlefill.RemoteError
				return errors.As(err, &remote) && *remote == singlefill.RemoteError{Key: "k", Message: errSource.Error()}
			},
		},
		{
			name: "the caller's deadline while another process loads", deadline: time.Second, took: time.Second,
			is: func(err error) bool { return err == context.DeadlineExceeded },
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, m *miniredis.Miniredis, _ *redis.Client) {
				var e events
				ns := redistest.Namespace(t)
				opts := staleOptions(0, 5*time.Minute)
				there := newCaches(t, m, ns, 1, opts)[0]
				opts.Trace = &singlefill.Trace{Stale: staleTrace(&e).Stale, Miss: e.trace().Miss, Hit: e.trace().Hit}
				here := newCaches(t, m, ns, 1, opts)[0]
				setStale(t, there, "k", "old", late)
				ctx := t.Context()
				if test.load == nil {
					elsewhere(t, there, test.elsewhere)
					test.load = mustNotLoad[string](t)
				}
				if test.deadline > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, test.deadline)
					defer cancel()
				}
				r := ask(ctx, here, "k", test.load)
				if !test.is(r.info.Err) {
					t.Errorf("the reason is %v", r.info.Err)
				}
				if over := r.took + test.took; test.took < 0 && over >= 0 && over < 320*time.Millisecond {
					test.took = r.took
				}
				r.want(t, "the call", answer{
					value: "old", info: singlefill.ValueInfo{Stale: true, Age: staleLife + late + test.took, Err: r.info.Err}, took: test.took,
				})
				e.want(t, "the call", "miss k", fmt.Sprintf("stale k true, %v old, %v", r.info.Age, r.info.Err))
				if s := here.Stats(); s.Stale != 1 || s.StaleOnError != 1 || s.Misses != 1 || s.Hits != 0 || s.Refreshes != 0 {
					t.Errorf("%+v, want one stale value because of an error", s)
				}
				time.Sleep(time.Hour) // the load that was left behind is over
			})
		})
	}
}

// A caller that waits for a refresh gets the stale value if the refresh fails.
//
// The refresh began within StaleWhileRevalidate and runs on into the time when callers wait for it.
func TestStaleIfError_FailedRefresh(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := newCache(t, rdb, staleOptions(time.Minute, time.Hour))
		src := newSource[string](t)
		setStale(t, c, "k", "old", 59*time.Second)
		ask(t.Context(), c, "k", src.load).wantOld(t, "the reader that begins it", 59*time.Second, nil)
		load := src.next(t)
		time.Sleep(time.Second)
		waits := goAsk(t.Context(), c, "k", src.load)
		time.Sleep(10 * time.Second)
		load.fail(errSource)
		receive(t, "a reply", waits).want(t, "the caller that waits", answer{
			value: "old", took: 10 * time.Second,
			info: singlefill.ValueInfo{Stale: true, Age: staleLife + 70*time.Second, Err: errSource},
		})
		src.want(t, 1)
	})
}

// A value that was fresh when its refresh began is stale when it is served for the refresh's
// failure.
func TestStaleIfError_FreshAtTheBeginning(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := oldCache(t, rdb, singlefill.Options[string]{EarlyRefresh: 1e9, StaleIfError: time.Minute}, "", 0)
		<-goAsk(t.Context(), c, "k", takes(10*time.Millisecond, "old", nil))
		time.Sleep(900 * time.Millisecond)
		<-goAsk(t.Context(), c, "k", takes(2*time.Second, "", errSource)) // a hit, and an early refresh
		time.Sleep(200 * time.Millisecond)
		a := <-goAsk(t.Context(), c, "k", mustNotLoad[string](t))
		if a.value != "old" || a.err != nil || !a.info.Stale || a.info.Err != errSource {
			t.Errorf("answered %+v", a)
		}
		if s := c.Stats(); s.StaleOnError != 1 || s.Stale != 1 {
			t.Errorf("%d stale, %d of them on an error, want 1 and 1", s.Stale, s.StaleOnError)
		}
	})
}

// A RemoteError does not say that another process failed: within RetryAfter it may be an earlier
// failure of this one.
func TestStaleIfError_EarlierFailureHere(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := oldCache(t, rdb, singlefill.Options[string]{StaleIfError: time.Minute}, "old", time.Second)
		<-goAsk(t.Context(), c, "k", fails[string](errSource))
		a := <-goAsk(t.Context(), c, "k", mustNotLoad[string](t)) // within RetryAfter
		var remote *singlefill.RemoteError
		if !errors.As(a.info.Err, &remote) || remote.Message != errSource.Error() || strings.Contains(a.info.Err.Error(), "process") {
			t.Errorf("the old value is served because of %v", a.info.Err)
		}
	})
}

// A caller that waits for another process gets the stale value that the key holds when the load
// fails.
func TestStaleIfError_KeyChangesDuringTheWait(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		ns := redistest.Namespace(t)
		fleet := newCaches(t, m, ns, 2, staleOptions(0, time.Minute))
		here, there := fleet[0], fleet[1]
		src := newSource[string](t)
		begin := func() (*loading[string], <-chan answer) {
			goGet(t.Context(), there, "k", src.load)
			load := src.next(t)
			waits := goAsk(t.Context(), here, "k", src.load)
			time.Sleep(time.Second)
			return load, waits
		}
		load, waits := begin() // of nothing
		data, err := entry.Entry{FreshUntil: time.Now(), WrittenAt: time.Now(), Payload: []byte("spare")}.Encode()
		if err != nil {
			t.Fatal(err)
		}
		if err := rdb.Set(t.Context(), ns+":{k}", data, time.Hour).Err(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		load.fail(errSource)
		r := receive(t, "a reply", waits)
		if !r.info.Stale || r.info.Err == nil || r.value != "spare" || r.err != nil {
			t.Errorf("a stale value has come: got %+v, want it, and no sooner than at the failure", r)
		}

		setStale(t, there, "k", "old", 0)
		load, waits = begin()
		if err := rdb.Del(t.Context(), ns+":{k}").Err(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		load.fail(errSource)
		if r := receive(t, "a reply", waits); r.err == nil || r.info != (singlefill.ValueInfo{}) {
			t.Errorf("the stale value has gone: got %+v, want the failure", r)
		}
	})
}

// Callers own the stale values they get.
func TestStaleIfError_CallersOwnTheirValues(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := newCache(t, rdb, &singlefill.Options[[]string]{Jitter: -1, StaleIfError: time.Minute})
		if err := c.Set(t.Context(), "k", []string{"old"}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(staleLife)
		src := newSource[[]string](t)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		herd := []*call[[]string]{goGet(ctx, c, "k", src.load)}
		load := src.next(t)
		for range 3 {
			herd = append(herd, goGet(t.Context(), c, "k", src.load))
		}
		time.Sleep(2 * time.Second)
		load.fail(errSource)
		for _, a := range herd {
			v, err := a.result(t)
			if wantValue(t, v, err, []string{"old"}); len(v) > 0 {
				v[0] = "mine"
			}
		}
	})
}

// A caller that waits for a refresh does not share the stale value with the reader that began the
// refresh.
func TestStaleIfError_ValueIsCopied(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		value := map[string]int{"a": 1}
		c := oldCache(t, rdb, singlefill.Options[map[string]int]{StaleWhileRevalidate: time.Second, StaleIfError: time.Minute}, value, 900*time.Millisecond)
		reader, _, err := c.GetOrLoadInfo(t.Context(), "k", takes(time.Second, value, errSource)) // begins the refresh
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(200 * time.Millisecond)
		waiter, info, err := c.GetOrLoadInfo(t.Context(), "k", mustNotLoad[map[string]int](t)) // waits for it
		if err != nil || info.Err != errSource {
			t.Fatalf("got %v, %+v, %v", waiter, info, err)
		}
		reader["a"] = 2
		if !maps.Equal(waiter, value) {
			t.Error("two callers have one map")
		}
	})
}

// A cancelled caller gets no stale value, and the load goes on.
func TestStaleIfError_CancelledCaller(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := newCache(t, rdb, staleOptions(0, time.Minute))
		setStale(t, c, "k", "old", 0)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		r := ask(ctx, c, "k", (&countedSource{takes: 10 * time.Second, value: "new"}).load)
		r.want(t, "cancelled", answer{err: context.Canceled, took: time.Second})
		if s := c.Stats(); s.Stale != 0 || s.StaleOnError != 0 {
			t.Errorf("%+v, want nothing stale", s)
		}
		time.Sleep(9 * time.Second)
		synctest.Wait()
		ask(t.Context(), c, "k", mustNotLoad[string](t)).wantFresh(t, "the load has gone on", "new")
	})
}

// Callers get the stale value at their deadline, and the load goes on.
func TestStaleIfError_Deadline(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		fleet := newCaches(t, m, redistest.Namespace(t), 2, staleOptions(0, time.Minute))
		src := newSource[string](t)
		setStale(t, fleet[0], "k", "old", 0)
		lived := time.Now()
		staleHerd(t, "the caller that began it", fleet[0], src.load, 1, lived)
		load := src.next(t)
		for range 5 {
			staleHerd(t, "callers that wait for another process", fleet[1], src.load, 20, lived)
		}
		time.Sleep(time.Until(lived.Add(10 * time.Second)))
		load.give("new")
		synctest.Wait()
		for _, c := range fleet {
			ask(t.Context(), c, "k", src.load).wantFresh(t, "the load is over", "new")
			if s := c.Stats(); s.Stale != s.StaleOnError || s.Stale < 1 {
				t.Errorf("%+v, want each stale value counted", s)
			}
		}
		src.want(t, 1)
	})
}

// A caller that joins a running load gets the stale value at its deadline.
func TestStaleIfError_DeadlineOfAJoiner(t *testing.T) {
	for _, test := range []struct {
		name     string
		swr, sie time.Duration
		late     time.Duration // the load begins
	}{
		{"for a load", 0, time.Minute, 0},
		{"for a refresh begun behind a stale value", time.Minute, time.Hour, time.Minute - time.Second},
	} {
		t.Run(test.name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				c := newCache(t, rdb, staleOptions(test.swr, test.sie))
				src := newSource[string](t)
				setStale(t, c, "k", "old", 0)
				lived := time.Now()
				time.Sleep(test.late)
				goGet(t.Context(), c, "k", src.load)
				src.next(t)
				time.Sleep(time.Second)
				staleHerd(t, "while it runs", c, src.load, 20, lived)
				src.want(t, 1)
			})
		})
	}
}

// All callers of a load that hangs get the stale value at their deadlines.
//
// The first one knows the value from its own read. The others learn only later that it has not been
// deleted.
func TestStaleIfError_HangingLoad(t *testing.T) {
	hangs := takes(20*time.Second, "new", nil)
	for name, test := range map[string]struct {
		opts singlefill.Options[string]
		late time.Duration
	}{
		"a load":    {singlefill.Options[string]{StaleIfError: time.Minute}, time.Second},
		"a refresh": {singlefill.Options[string]{StaleWhileRevalidate: time.Second, StaleIfError: time.Minute}, 900 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				c := oldCache(t, rdb, test.opts, "old", test.late)
				read := func() <-chan answer {
					ctx, cancel := context.WithTimeout(t.Context(), time.Second)
					t.Cleanup(cancel)
					return goAsk(ctx, c, "k", hangs)
				}
				first := read()
				time.Sleep(200 * time.Millisecond)
				second, third := read(), read()
				for i, answers := range []<-chan answer{first, second, third} {
					a := <-answers
					if a.value != "old" || a.err != nil || !a.info.Stale {
						t.Errorf("caller %d is answered %+v", i, a)
					}
				}
				if n := c.Stats().Loads; n != 1 {
					t.Errorf("%d loads, want 1", n)
				}
			})
		})
	}
}

// A caller without a stale value gets its context's error at its deadline, and the load goes on.
func TestStaleIfError_DeadlineWithoutAValue(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		c := newCache(t, rdb, staleOptions(time.Minute, time.Hour))
		src := &countedSource{takes: time.Second, value: "v"}
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		ask(ctx, c, "k", src.load).want(t, "impatient", answer{err: context.DeadlineExceeded, took: 100 * time.Millisecond})
		ask(t.Context(), c, "k", src.load).want(t, "patient", answer{value: "v", took: 900 * time.Millisecond})
		src.wantLoads(t, "the deadline of one", 1)
		synctest.Wait()
		ask(t.Context(), c, "k", mustNotLoad[string](t)).wantFresh(t, "the background result", "v")
	})
}

// staleHerd asks n times at once, with a deadline of a second each, and wants the old value, whose
// life ended at lived.
func staleHerd(t *testing.T, what string, c *singlefill.Cache[string], load singlefill.Loader[string], n int, lived time.Time) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	var herd []<-chan answer
	for range n {
		herd = append(herd, goAsk(ctx, c, "k", load))
	}
	for _, replies := range herd {
		receive(t, "a reply", replies).want(t, what, answer{
			value: "old", took: time.Second,
			info: singlefill.ValueInfo{Stale: true, Age: staleLife + time.Since(lived), Err: context.DeadlineExceeded},
		})
	}
}

// A stale value is not served past its window, however long the load takes.
func TestStaleIfError_LoadPastTheWindow(t *testing.T) {
	const left, tick = time.Second, time.Millisecond // when the load begins
	for _, test := range []struct {
		name string
		ends time.Duration // the load, or the caller's patience, before the window's end
	}{{"just before the end", tick}, {"at the end", 0}, {"after the end", -time.Second}} {
		for _, deadline := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, deadline %t", test.name, deadline), func(t *testing.T) {
				inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
					ns := redistest.Namespace(t)
					c := newCacheIn(t, rdb, ns, staleOptions(0, time.Minute))
					setStale(t, c, "k", "old", time.Minute-left)
					m.SetTTL(ns+":{k}", 24*time.Hour)
					src := &countedSource{takes: left - test.ends, err: errSource}
					failure, ctx := errSource, t.Context()
					if deadline {
						var cancel context.CancelFunc
						ctx, cancel = context.WithTimeout(ctx, src.takes)
						defer cancel()
						src.takes += time.Second
						failure = context.DeadlineExceeded
					}
					want := answer{err: failure, took: left - test.ends}
					if test.ends > 0 {
						want = answer{
							value: "old", took: want.took,
							info: singlefill.ValueInfo{Stale: true, Age: staleLife + time.Minute - test.ends, Err: failure},
						}
					}
					ask(ctx, c, "k", src.load).want(t, test.name, want)
				})
			})
		}
	}
}

// A stale value is not served past its window, even if the release of the lock is slow.
func TestStaleIfError_SlowRelease(t *testing.T) {
	inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
		var slow atomic.Bool
		rdb.AddHook(before(func(redis.Cmder) error {
			if slow.Load() {
				time.Sleep(400 * time.Millisecond)
			}
			return nil
		}))
		c := oldCache(t, rdb, singlefill.Options[string]{StaleIfError: 2 * time.Second}, "old", 1900*time.Millisecond)
		a := <-goAsk(t.Context(), c, "k", func(context.Context, string) (string, error) {
			slow.Store(true)
			return "", errSource
		})
		if a.err != errSource || a.info != (singlefill.ValueInfo{}) {
			t.Errorf("answered %+v", a)
		}
		time.Sleep(time.Minute) // the cache and the client go on for a while
	})
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
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, m *miniredis.Miniredis, rdb *redis.Client) {
				opts.MaxLoads = 1
				c := oldCache(t, rdb, opts, "old", time.Second)
				slow := newSource[string](t)
				other := goGet(t.Context(), c, "other", slow.load)
				busy := slow.next(t)
				before := goAsk(t.Context(), c, "k", fails[string](errSource))
				synctest.Wait()
				if err := c.Delete(t.Context(), "k"); err != nil {
					t.Fatal(err)
				}
				m.SetError("LOADING dataset")
				after := goAsk(t.Context(), c, "k", fails[string](errSource))
				time.Sleep(5 * time.Second)
				busy.give("")
				if a := <-after; a.err == nil {
					t.Errorf("the caller after the Delete got %+v", a)
				}
				<-before
				other.want(t, "")
			})
		})
	}
}
